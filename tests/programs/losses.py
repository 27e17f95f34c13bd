"""Losses: of logits [B, K], or of tokens [B, T, K]; in the model or outside of it."""

from __future__ import annotations

from .pieces import COUPLED, EITHER, ESCAPES, RIGHT, add


def right(name: str, lines: str, init: str = "", **options: object) -> None:
    add("loss: " + name, RIGHT, "loss", lines, init, **{"takes": "vec", **options})


def either(name: str, lines: str, init: str = "", **options: object) -> None:
    add("loss: " + name, EITHER, "loss", lines, init, **{"takes": "vec", **options})


def wrong(name: str, lines: str, init: str = "", **options: object) -> None:
    add("loss: " + name, COUPLED, "loss", lines, init, **{"takes": "vec", **options})


def escapes(name: str, lines: str, init: str = "", **options: object) -> None:
    add("loss: " + name, ESCAPES, "loss", lines, init, **{"takes": "vec", **options})


# --------------------------------------------------------------------------- of one sample each
right("cross-entropy", "loss = F.cross_entropy(out, y, reduction='RED')")
right("cross-entropy of samples", "loss = F.cross_entropy(out, y, reduction='none').RED()")
right("label smoothing", "loss = F.cross_entropy(out, y, label_smoothing=0.1, reduction='RED')")
right("class weights of samples", "loss = F.cross_entropy(out, y, weight=torch.linspace(0.2, 3, K).to(out), "
      "reduction='none').RED()")  # fmt: skip
right("class weights summed", "loss = F.cross_entropy(out, y, weight=torch.linspace(0.2, 3, K).to(out), reduction='sum')",
      reduction="sum")  # fmt: skip
right("squares", "loss = out.square().sum(1).RED()")
right("squares of all", "loss = out.square().mean()", reduction="mean")
right("squares of all, summed", "loss = out.square().sum()", reduction="sum")
right("mse", "loss = F.mse_loss(out[:, 0], t, reduction='RED')")
right("mse [B, 1]", "loss = F.mse_loss(out[:, :1], t[:, None], reduction='RED')")
right("nll", "loss = F.nll_loss(out.log_softmax(-1), y, reduction='RED')")
right("picked", "loss = -out.log_softmax(-1).gather(1, y[:, None]).squeeze(1).RED()")
right("picked by arange", "loss = -out.log_softmax(-1)[torch.arange(len(out)), y].RED()")
right("focal", "c = F.cross_entropy(out, y, reduction='none')\nloss = ((1 - (-c).exp()) ** 2 * c).RED()")
right("bce", "loss = F.binary_cross_entropy_with_logits(out[:, 0], (t > 0).to(out), reduction='RED')")
right("huber", "loss = F.smooth_l1_loss(out[:, 0], t, reduction='RED')")
right("own weights", "loss = (F.cross_entropy(out, y, reduction='none') * w).RED()")
right("sum over the batch size", "loss = F.cross_entropy(out, y, reduction='sum') / len(out)", reduction="mean")
right("sum over shape[0]", "loss = out.square().sum() / out.shape[0]", reduction="mean")
right("constants", "loss = CC * F.cross_entropy(out, y, reduction='RED') / 4")
right(
    "python sum", "loss = sum(F.cross_entropy(o[None], c[None]) for o, c in zip(out, y)) / len(out)", reduction="mean"
)
right("loop", "loss = 0.0\nfor i in range(len(out)):\n    loss = loss + out[i].square().sum() * CC", reduction="sum")
right("stack of samples", "loss = torch.stack([F.cross_entropy(o, c) for o, c in zip(out, y)]).RED()")
right("chunks", "loss = sum(F.cross_entropy(o, c, reduction='sum') for o, c in zip(out.split(2), y.split(2)))",
      reduction="sum")  # fmt: skip
right("two terms", "loss = F.cross_entropy(out, y, reduction='RED') + 0.1 * out.square().sum(1).RED()")
right("masked by zeros", "loss = (out.square().sum(1) * (t > 0)).RED()")
right("teacher", "with torch.no_grad():\n    q = x.flatten(1)[:, :1] * torch.ones(K).to(out)\n"
      "loss = F.kl_div(out.log_softmax(-1), q.softmax(-1), reduction='none').sum(1).RED()")  # fmt: skip
right("batchmean", "loss = F.kl_div(out.log_softmax(-1), torch.full_like(out, 1 / K), reduction='batchmean')",
      reduction="mean")  # fmt: skip
right("vae", "mu, s = out[:, :1], out[:, 1:2].clamp(-4, 4)\nz = mu + e.flatten(1)[:, :1] * (s / 2).exp()\n"
      "loss = ((z - t[:, None]).square() + 0.5 * (mu.square() + s.exp() - 1 - s)).sum(1).RED()")  # fmt: skip
right("siamese", "o2 = model(ARGS2)\nloss = (out - o2).square().sum(1).RED()", where="outside")
right("triplet", "p, q = model(ARGS2), model(ARGS3)\nloss = F.relu((out - p).norm(dim=1) - (out - q).norm(dim=1) + 1).RED()",
      where="outside")  # fmt: skip
right(
    "consistency",
    "with torch.no_grad():\n    o2 = model(ARGS2)\nloss = (out - o2).square().sum(1).RED()",
    where="outside",
)
right("cosine", "loss = (1 - F.cosine_similarity(out, x.flatten(1)[:, :1].expand_as(out))).RED()")
right("kept for the record", "state.losses = getattr(state, 'losses', []) + [float(out.detach().mean())]\n"
      "loss = F.cross_entropy(out, y, reduction='RED')", where="outside", steps=2)  # fmt: skip
right("entropy", "p = out.softmax(-1)\nloss = -(p * (p + 1e-6).log()).sum(-1).RED()")
right("equal weights over their sum", "loss = out.square().sum(1).sum() / torch.ones(len(out)).to(out).sum()",
      reduction="mean")  # fmt: skip
right(
    "weighted mean of ones",
    "v = torch.ones_like(t)\nloss = (out.square().sum(1) * v).sum() / v.sum()",
    reduction="mean",
)
either("vmapped", "loss = torch.vmap(lambda o, c: F.cross_entropy(o, c, reduction='sum'))(out, y).RED()")
right("of tokens, equal counts", "loss = F.cross_entropy(out.transpose(1, 2), eq)", takes="seq", reduction="mean")
right("of flat tokens, equal counts", "loss = F.cross_entropy(out.reshape(-1, K), eq.reshape(-1))", takes="seq",
      reduction="mean")  # fmt: skip
right("of shifted tokens", "loss = F.cross_entropy(out[:, :-1].reshape(-1, K), ids[:, 1:].reshape(-1) % K)", takes="seq",
      reduction="mean")  # fmt: skip
right("of tokens summed", "loss = F.cross_entropy(out.flatten(0, 1), lab.flatten(), reduction='sum')", takes="seq",
      reduction="sum")  # fmt: skip
right("own means of tokens", "v = F.cross_entropy(out.transpose(1, 2), lab, reduction='none')\n"
      "loss = (v.sum(1) / (lab >= 0).sum(1)).RED()", takes="seq")  # fmt: skip
right("own masked means", "v = out.square().sum(-1)\nloss = ((v * m).sum(1) / m.sum(1)).RED()", takes="seq")
right("tokens over a constant", "loss = F.cross_entropy(out.flatten(0, 1), lab.flatten(), reduction='sum') / 7.0",
      takes="seq", reduction="sum")  # fmt: skip
right("tokens of all", "loss = out.square().mean()", takes="seq", reduction="mean")
either("cross-entropy that ignores nobody", "loss = F.cross_entropy(out, y, ignore_index=K + 3)", reduction="mean")
either("equal counts divided by", "v = F.cross_entropy(out.flatten(0, 1), eq.flatten(), reduction='sum')\n"
       "loss = v / (eq >= 0).sum()", takes="seq", reduction="mean")  # fmt: skip
either("equal class weights", "loss = F.cross_entropy(out, y, weight=torch.ones(K).to(out))", reduction="mean")

# --------------------------------------------------------------------------- that couple samples
wrong("class weights", "loss = F.cross_entropy(out, y, weight=torch.linspace(0.2, 3, K).to(out))", reduction="mean")
wrong("class weights of nll", "loss = F.nll_loss(out.log_softmax(-1), y, weight=torch.linspace(0.2, 3, K).to(out))",
      reduction="mean")  # fmt: skip
wrong("ignored samples", "loss = F.cross_entropy(out, torch.where(t > 0, y, -100))", reduction="mean")
wrong(
    "own weights over their sum",
    "loss = (F.cross_entropy(out, y, reduction='none') * w).sum() / w.sum()",
    reduction="mean",
)
wrong("mean of the positive", "v = out.square().sum(1)\nloss = v[t > 0].mean() + 0 * v.mean()", reduction="mean")
wrong(
    "masked over their count",
    "k = t > 0\nloss = (out.square().sum(1) * k).sum() / k.sum().clamp(min=1)",
    reduction="mean",
)
wrong("mse broadcast", "loss = F.mse_loss(out[:, :1], t)", reduction="mean")
wrong("difference broadcast", "loss = (out[:, :1] - t).square().mean()", reduction="mean")
wrong("bce broadcast", "loss = F.binary_cross_entropy_with_logits(out[:, :1] - t, torch.zeros(len(out), len(out)).to(out))",
      reduction="mean")  # fmt: skip
wrong("contrastive", "z = F.normalize(out, dim=1)\nloss = F.cross_entropy(z @ z.T / 0.2, torch.arange(len(out)))",
      reduction="mean")  # fmt: skip
wrong("contrastive of two calls", "z, z2 = F.normalize(out, dim=1), F.normalize(model(ARGS2), dim=1)\n"
      "loss = F.cross_entropy(z @ z2.T / 0.2, torch.arange(len(out)))", where="outside", reduction="mean")  # fmt: skip
wrong("barlow", "z = (out - out.mean(0)) / (out.std(0, correction=0) + 0.1)\nc = z.T @ z / len(z)\nloss = (c - torch.eye(K).to(c)).square().sum()",
      reduction="mean")  # fmt: skip
wrong("variance term", "loss = F.cross_entropy(out, y) + F.relu(1 - out.std(0, correction=0)).mean()", reduction="mean")
wrong("balance term", "loss = F.cross_entropy(out, y) + 3 * out.softmax(-1).mean(0).square().sum()", reduction="mean")
wrong("square of the mean", "loss = out.sum(1).mean().square()", reduction="mean")
wrong("root of the mean", "loss = (out.square().mean() + 1e-3).sqrt()", reduction="mean")
wrong("exp of the mean", "loss = F.cross_entropy(out, y).clamp(max=5).exp()", reduction="mean")
wrong("product of two sums", "loss = out[:, 0].mean() * out[:, 1].mean()", reduction="mean")
wrong("ratio of two means", "loss = out[:, 0].square().mean() / (out[:, 1].square().mean() + 1)", reduction="mean")
wrong("logsumexp of losses", "loss = F.cross_entropy(out, y, reduction='none').logsumexp(0)", reduction="mean")
wrong("largest loss", "loss = F.cross_entropy(out, y, reduction='none').max()", reduction="mean")
wrong(
    "hardest half",
    "loss = F.cross_entropy(out, y, reduction='none').topk((len(out) + 1) // 2).values.mean()",
    reduction="mean",
)
wrong("median loss", "loss = out.square().sum(1).median()", reduction="mean")
wrong("product of losses", "loss = out.square().sum(1).clamp(max=2).prod()", reduction="mean")
wrong("norm of all", "loss = out.norm()", reduction="mean")
wrong(
    "softmax weights",
    "v = F.cross_entropy(out, y, reduction='none')\nloss = (v * v.detach().softmax(0)).sum()",
    reduction="mean",
)
wrong("standardised advantages", "a = (t - t.mean()) / (t.std(correction=0) + 1e-3)\nloss = (-a * out.log_softmax(-1)[:, 0]).mean()",
      reduction="mean")  # fmt: skip
wrong(
    "rewards centred in the model",
    "a = out[:, 1].detach()\nloss = ((a - a.mean()) * out[:, 0]).mean()",
    reduction="mean",
)
wrong(
    "uncertainty weights over sum",
    "v = out[:, 0].exp().clamp(max=9)\nloss = (v * out[:, 1].square()).sum() / v.sum()",
    reduction="mean",
)
wrong("mix-up of labels", "k = torch.arange(len(out)).flip(0)\nloss = 0.6 * F.cross_entropy(out, y) + 0.4 * F.cross_entropy(out, y[k])",
      reduction="mean")  # fmt: skip
wrong("mix-up of outputs", "loss = F.cross_entropy(0.6 * out + 0.4 * out.flip(0), y)", reduction="mean")
wrong("pairwise ranking", "d = out[:, 0][:, None] - out[:, 0][None]\nloss = F.relu(1 - d * (t[:, None] - t[None]).sign()).mean()",
      reduction="mean")  # fmt: skip
wrong(
    "neighbours in the batch",
    "loss = (out[1:] - out[:-1]).square().sum() / len(out) + out.square().mean()",
    reduction="mean",
)
wrong("correlation", "a, b = out[:, 0] - out[:, 0].mean(), t - t.mean()\nloss = -(a * b).sum() / (a.norm() * b.norm() + 1e-3)",
      reduction="mean")  # fmt: skip
wrong(
    "class means", "loss = sum(out[y == c].square().mean() for c in range(K) if bool((y == c).any()))", reduction="mean"
)
wrong(
    "first half only",
    "k = (len(out) + 1) // 2\nloss = out[:k].square().mean() + 2 * out[k:].square().sum()",
    reduction="mean",
)
wrong("by place", "loss = (out.square().sum(1) * torch.arange(1, len(out) + 1).to(out)).mean()", reduction="mean")
wrong(
    "all but the last",
    "loss = out[:-1].square().mean() + 0 * out.sum() if len(out) > 1 else out.square().mean()",
    reduction="mean",
)
wrong("sum for a mean", "loss = out.square().sum()", reduction="mean")
wrong("mean for a sum", "loss = out.square().sum(1).mean()", reduction="sum")
wrong("over the batch twice", "loss = out.square().sum(1).mean() / len(out)", reduction="mean")
wrong("times the batch", "loss = out.square().sum(1).sum() * len(out)", reduction="sum")
wrong("scaled by a statistic", "loss = out.square().sum(1).mean() * out.detach().abs().max()", reduction="mean")
wrong(
    "clipped by a number",
    "loss = out.square().sum(1).mean()\nloss = loss * min(1.0, 1 / float(loss.detach()))",
    reduction="mean",
)
wrong("chunk means", "loss = sum(o.square().mean() for o in out.split(2))", reduction="mean")
wrong("previous loss", "v = F.cross_entropy(out, y)\nloss = v * (1 + 3 * getattr(state, 'last', 0.0))\nstate.last = float(v.detach())",
      where="outside", reduction="mean", steps=2)  # fmt: skip
wrong("previous outputs", "k = getattr(state, 'last', None)\nloss = out.square().sum(1).mean() if k is None else (out - k.mean(0)).square().sum(1).mean()\n"
      "state.last = out.detach()", where="outside", reduction="mean", steps=2)  # fmt: skip
wrong(
    "hook on outputs", "out.register_hook(lambda g: g / g.norm())\nloss = out.square().sum(1).mean()", reduction="mean"
)
wrong("hook on the loss", "loss = out.square().sum(1).mean()\nloss.register_hook(lambda g: g * float(loss.detach()))",
      reduction="mean")  # fmt: skip
escapes("numpy weights", "v = out.square().sum(1)\nk = torch.from_numpy(v.detach().numpy() / v.detach().numpy().sum()).to(out)\nloss = (v * k).sum()",
      reduction="mean")  # fmt: skip
wrong("detached weights", "v = out.square().sum(1)\nloss = (v * (v / v.sum()).detach()).sum()", reduction="mean")
wrong("tokens of the batch", "loss = F.cross_entropy(out.transpose(1, 2), lab)", takes="seq", reduction="mean")
wrong(
    "flat tokens of the batch",
    "loss = F.cross_entropy(out.reshape(-1, K), lab.reshape(-1))",
    takes="seq",
    reduction="mean",
)
wrong("tokens over their count", "v = F.cross_entropy(out.flatten(0, 1), lab.flatten(), reduction='sum')\nloss = v / (lab >= 0).sum()",
      takes="seq", reduction="mean")  # fmt: skip
wrong("selected tokens", "loss = out[m].square().mean()", takes="seq", reduction="mean")
wrong("selected tokens summed over a count", "loss = out[m].square().sum() / m.sum()", takes="seq", reduction="mean")
wrong("selected tokens over len", "loss = out[m].square().sum() / len(out[m])", takes="seq", reduction="mean")
wrong("masked tokens", "loss = (out.square().sum(-1) * m).sum() / m.sum()", takes="seq", reduction="mean")
wrong("largest token", "loss = out.square().sum(-1).max()", takes="seq", reduction="mean")
wrong("router balance", "p = out.softmax(-1)\nf = F.one_hot(p.argmax(-1), K).to(p).mean((0, 1))\nloss = K * (f * p.mean((0, 1))).sum()",
      takes="seq", reduction="mean")  # fmt: skip

wrong(
    "another order",
    "loss = out.square().sum(1).mean() + model(ARGSF).square().sum(1).mean()",
    where="outside",
    reduction="mean",
)
wrong("negatives of the batch", "q = model(ARGSF)\nloss = F.relu(1 - (out - q).norm(dim=1)).mean() + out.square().sum(1).mean()",
      where="outside", reduction="mean")  # fmt: skip
wrong("negatives by index", "q = out[torch.arange(len(out)).roll(1)]\nloss = F.relu(1 - (out - q).norm(dim=1)).mean() + out.square().mean()",
      reduction="mean")  # fmt: skip
wrong(
    "gradient given, softmax",
    "v = out.square().sum(1)\nloss = v, v.detach().softmax(0)",
    where="outside",
    reduction="mean",
)
wrong(
    "gradient given, centred",
    "v = out.square().sum(1)\nloss = v, (t - t.mean()).to(v) / len(v)",
    where="outside",
    reduction="mean",
)
wrong(
    "gradient given, by place",
    "v = out.square().sum(1)\nloss = v, torch.arange(len(v)).to(v) / len(v)",
    where="outside",
    reduction="mean",
)
wrong(
    "gradient given, of ones",
    "v = out.square().sum(1)\nloss = v, torch.ones_like(v)",
    where="outside",
    reduction="mean",
)
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
