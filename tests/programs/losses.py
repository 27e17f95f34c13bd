"""Losses: of logits [B, K], or of tokens [B, T, K]; in the model or outside of it."""

from __future__ import annotations

from .pieces import EITHER, ESCAPES, RIGHT, add


def right(name: str, lines: str, init: str = "", **options: object) -> None:
    add("loss: " + name, RIGHT, "loss", lines, init, **{"takes": "vec", **options})


def either(name: str, lines: str, init: str = "", **options: object) -> None:
    add("loss: " + name, EITHER, "loss", lines, init, **{"takes": "vec", **options})


# --------------------------------------------------------------------------- of one sample each
right("cross-entropy", "loss = F.cross_entropy(out, y, reduction='RED')")
right("cross-entropy of samples", "loss = F.cross_entropy(out, y, reduction='none').RED()")
right("unbound losses", "losses = F.cross_entropy(out, y, reduction='none')\nloss = torch.stack(losses.unbind()).RED()")
right("label smoothing", "loss = F.cross_entropy(out, y, label_smoothing=0.1, reduction='RED')")
right(
    "class weights of samples",
    "loss = F.cross_entropy(out, y, weight=torch.linspace(0.2, 3, K).to(out), reduction='none').RED()",
)
right(
    "class weights summed",
    "loss = F.cross_entropy(out, y, weight=torch.linspace(0.2, 3, K).to(out), reduction='sum')",
    reduction="sum",
)
right("squares", "loss = out.square().sum(1).RED()")
right("squares of all", "loss = out.square().mean()", reduction="mean")
right("mse", "loss = F.mse_loss(out[:, 0], t, reduction='RED')")
right("picked", "loss = -out.log_softmax(-1).gather(1, y[:, None]).squeeze(1).RED()")
right("focal", "c = F.cross_entropy(out, y, reduction='none')\nloss = ((1 - (-c).exp()) ** 2 * c).RED()")
right("own weights", "loss = (F.cross_entropy(out, y, reduction='none') * w).RED()")
right("sum over the batch size", "loss = F.cross_entropy(out, y, reduction='sum') / len(out)", reduction="mean")
right("constants", "loss = CC * F.cross_entropy(out, y, reduction='RED') / 4")
right(
    "python sum", "loss = sum(F.cross_entropy(o[None], c[None]) for o, c in zip(out, y)) / len(out)", reduction="mean"
)
right("loop", "loss = 0.0\nfor i in range(len(out)):\n    loss = loss + out[i].square().sum() * CC", reduction="sum")
right(
    "chunks",
    "loss = sum(F.cross_entropy(o, c, reduction='sum') for o, c in zip(out.split(2), y.split(2)))",
    reduction="sum",
)
right("two terms", "loss = F.cross_entropy(out, y, reduction='RED') + 0.1 * out.square().sum(1).RED()")
right(
    "teacher",
    "with torch.no_grad():\n    q = x.flatten(1)[:, :1] * torch.ones(K).to(out)\n"
    "loss = F.kl_div(out.log_softmax(-1), q.softmax(-1), reduction='none').sum(1).RED()",
)
right(
    "batchmean",
    "loss = F.kl_div(out.log_softmax(-1), torch.full_like(out, 1 / K), reduction='batchmean')",
    reduction="mean",
)
right(
    "vae",
    "mu, s = out[:, :1], out[:, 1:2].clamp(-4, 4)\nz = mu + e.flatten(1)[:, :1] * (s / 2).exp()\n"
    "loss = ((z - t[:, None]).square() + 0.5 * (mu.square() + s.exp() - 1 - s)).sum(1).RED()",
)
right("siamese", "o2 = model(ARGS2)\nloss = (out - o2).square().sum(1).RED()", where="outside")
right(
    "triplet",
    "p, q = model(ARGS2), model(ARGS3)\nloss = F.relu((out - p).norm(dim=1) - (out - q).norm(dim=1) + 1).RED()",
    where="outside",
)
right(
    "consistency",
    "with torch.no_grad():\n    o2 = model(ARGS2)\nloss = (out - o2).square().sum(1).RED()",
    where="outside",
)
right(
    "kept for the record",
    "state.losses = getattr(state, 'losses', []) + [float(out.detach().mean())]\n"
    "loss = F.cross_entropy(out, y, reduction='RED')",
    where="outside",
    steps=2,
)
right(
    "equal weights over their sum",
    "loss = out.square().sum(1).sum() / torch.ones(len(out)).to(out).sum()",
    reduction="mean",
)
either("vmapped", "loss = torch.vmap(lambda o, c: F.cross_entropy(o, c, reduction='sum'))(out, y).RED()")
right("of tokens, equal counts", "loss = F.cross_entropy(out.transpose(1, 2), eq)", takes="seq", reduction="mean")
right(
    "of flat tokens, equal counts",
    "loss = F.cross_entropy(out.reshape(-1, K), eq.reshape(-1))",
    takes="seq",
    reduction="mean",
)
right(
    "of shifted tokens",
    "loss = F.cross_entropy(out[:, :-1].reshape(-1, K), ids[:, 1:].reshape(-1) % K)",
    takes="seq",
    reduction="mean",
)
right(
    "of tokens summed",
    "loss = F.cross_entropy(out.flatten(0, 1), lab.flatten(), reduction='sum')",
    takes="seq",
    reduction="sum",
)
right(
    "own means of tokens",
    "v = F.cross_entropy(out.transpose(1, 2), lab, reduction='none')\nloss = (v.sum(1) / (lab >= 0).sum(1)).RED()",
    takes="seq",
)
right("own masked means", "v = out.square().sum(-1)\nloss = ((v * m).sum(1) / m.sum(1)).RED()", takes="seq")
right(
    "tokens over a constant",
    "loss = F.cross_entropy(out.flatten(0, 1), lab.flatten(), reduction='sum') / 7.0",
    takes="seq",
    reduction="sum",
)
right("tokens of all", "loss = out.square().mean()", takes="seq", reduction="mean")
either("cross-entropy that ignores nobody", "loss = F.cross_entropy(out, y, ignore_index=K + 3)", reduction="mean")
either(
    "equal counts divided by",
    "v = F.cross_entropy(out.flatten(0, 1), eq.flatten(), reduction='sum')\nloss = v / (eq >= 0).sum()",
    takes="seq",
    reduction="mean",
)
either("equal class weights", "loss = F.cross_entropy(out, y, weight=torch.ones(K).to(out))", reduction="mean")
right("gradient given", "v = out.square().sum(1)\nloss = v, torch.ones_like(v)", where="outside", reduction="sum")
right("gradient given, own", "v = out.square().sum(1)\nloss = v, w.to(v)", where="outside", reduction="sum")
right(
    "gradient given, a mean's",
    "v = out.square().sum(1)\nloss = v, torch.full_like(v, 1 / len(v))",
    where="outside",
    reduction="mean",
)

# --------------------------------------------------------------------------- before the model
add("before: mix-up", ESCAPES, "before", "x = 0.6 * x + 0.4 * x.flip(0)")
add("before: centred", ESCAPES, "before", "x = x - x.mean(0)")
add("before: own noise", RIGHT, "before", "x = x + 0.1 * e")
add("before: scaled", RIGHT, "before", "x = x * CC")
