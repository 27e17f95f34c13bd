"""Losses that couple samples, in the model or outside of it."""

from __future__ import annotations

from .pieces import COUPLED, ESCAPES, add


def wrong(name: str, lines: str, init: str = "", **options: object) -> None:
    add("loss: " + name, COUPLED, "loss", lines, init, **{"takes": "vec", **options})


def escapes(name: str, lines: str, init: str = "", **options: object) -> None:
    add("loss: " + name, ESCAPES, "loss", lines, init, **{"takes": "vec", **options})


# --------------------------------------------------------------------------- that couple samples
wrong("class weights", "loss = F.cross_entropy(out, y, weight=torch.linspace(0.2, 3, K).to(out))", reduction="mean")
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
wrong(
    "bce broadcast",
    "loss = F.binary_cross_entropy_with_logits(out[:, :1] - t, torch.zeros(len(out), len(out)).to(out))",
    reduction="mean",
)
wrong(
    "contrastive",
    "z = F.normalize(out, dim=1)\nloss = F.cross_entropy(z @ z.T / 0.2, torch.arange(len(out)))",
    reduction="mean",
)
wrong(
    "contrastive of two calls",
    "z, z2 = F.normalize(out, dim=1), F.normalize(model(ARGS2), dim=1)\n"
    "loss = F.cross_entropy(z @ z2.T / 0.2, torch.arange(len(out)))",
    where="outside",
    reduction="mean",
)
wrong(
    "barlow",
    "z = (out - out.mean(0)) / (out.std(0, correction=0) + 0.1)\n"
    "c = z.T @ z / len(z)\nloss = (c - torch.eye(K).to(c)).square().sum()",
    reduction="mean",
)
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
wrong("norm of all", "loss = out.norm()", reduction="mean")
wrong(
    "softmax weights",
    "v = F.cross_entropy(out, y, reduction='none')\nloss = (v * v.detach().softmax(0)).sum()",
    reduction="mean",
)
wrong(
    "standardised advantages",
    "a = (t - t.mean()) / (t.std(correction=0) + 1e-3)\nloss = (-a * out.log_softmax(-1)[:, 0]).mean()",
    reduction="mean",
)
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
wrong(
    "mix-up of labels",
    "k = torch.arange(len(out)).flip(0)\nloss = 0.6 * F.cross_entropy(out, y) + 0.4 * F.cross_entropy(out, y[k])",
    reduction="mean",
)
wrong("mix-up of outputs", "loss = F.cross_entropy(0.6 * out + 0.4 * out.flip(0), y)", reduction="mean")
wrong(
    "pairwise ranking",
    "d = out[:, 0][:, None] - out[:, 0][None]\nloss = F.relu(1 - d * (t[:, None] - t[None]).sign()).mean()",
    reduction="mean",
)
wrong(
    "neighbours in the batch",
    "loss = (out[1:] - out[:-1]).square().sum() / len(out) + out.square().mean()",
    reduction="mean",
)
wrong(
    "correlation",
    "a, b = out[:, 0] - out[:, 0].mean(), t - t.mean()\nloss = -(a * b).sum() / (a.norm() * b.norm() + 1e-3)",
    reduction="mean",
)
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
escapes(
    "previous loss",
    "v = F.cross_entropy(out, y)\nloss = v * (1 + 3 * getattr(state, 'last', 0.0))\nstate.last = float(v.detach())",
    where="outside",
    reduction="mean",
    steps=2,
)
wrong(
    "previous outputs",
    "k = getattr(state, 'last', None)\n"
    "loss = out.square().sum(1).mean() if k is None else (out - k.mean(0)).square().sum(1).mean()\n"
    "state.last = out.detach()",
    where="outside",
    reduction="mean",
    steps=2,
)
wrong(
    "hook on outputs", "out.register_hook(lambda g: g / g.norm())\nloss = out.square().sum(1).mean()", reduction="mean"
)
wrong(
    "hook on the loss",
    "loss = out.square().sum(1).mean()\nloss.register_hook(lambda g: g * float(loss.detach()))",
    reduction="mean",
)
escapes(
    "numpy weights",
    "v = out.square().sum(1)\n"
    "k = torch.from_numpy(v.detach().numpy() / v.detach().numpy().sum()).to(out)\nloss = (v * k).sum()",
    reduction="mean",
)
wrong("detached weights", "v = out.square().sum(1)\nloss = (v * (v / v.sum()).detach()).sum()", reduction="mean")
wrong("tokens of the batch", "loss = F.cross_entropy(out.transpose(1, 2), lab)", takes="seq", reduction="mean")
wrong(
    "flat tokens of the batch",
    "loss = F.cross_entropy(out.reshape(-1, K), lab.reshape(-1))",
    takes="seq",
    reduction="mean",
)
wrong(
    "tokens over their count",
    "v = F.cross_entropy(out.flatten(0, 1), lab.flatten(), reduction='sum')\nloss = v / (lab >= 0).sum()",
    takes="seq",
    reduction="mean",
)
wrong("selected tokens", "loss = out[m].square().mean()", takes="seq", reduction="mean")
wrong("selected tokens over len", "loss = out[m].square().sum() / len(out[m])", takes="seq", reduction="mean")
wrong("masked tokens", "loss = (out.square().sum(-1) * m).sum() / m.sum()", takes="seq", reduction="mean")
wrong("largest token", "loss = out.square().sum(-1).max()", takes="seq", reduction="mean")
wrong(
    "router balance",
    "p = out.softmax(-1)\nf = F.one_hot(p.argmax(-1), K).to(p).mean((0, 1))\nloss = K * (f * p.mean((0, 1))).sum()",
    takes="seq",
    reduction="mean",
)

wrong(
    "another order",
    "loss = out.square().sum(1).mean() + model(ARGSF).square().sum(1).mean()",
    where="outside",
    reduction="mean",
)
wrong(
    "negatives of the batch",
    "q = model(ARGSF)\nloss = F.relu(1 - (out - q).norm(dim=1)).mean() + out.square().sum(1).mean()",
    where="outside",
    reduction="mean",
)
wrong(
    "negatives by index",
    "q = out[torch.arange(len(out)).roll(1)]\nloss = F.relu(1 - (out - q).norm(dim=1)).mean() + out.square().mean()",
    reduction="mean",
)
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
