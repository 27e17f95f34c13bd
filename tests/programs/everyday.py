"""Right pieces near to what is refused: numbers of rows, constants of the batch's size, reads for the record."""

from __future__ import annotations

from .losses import either as either_loss
from .losses import right as right_loss
from .right import LAYER, either, right

EMBEDDING = "self.UU = nn.Embedding(20, D)"
OWN = ".view(-1, *[1] * (h.dim() - 1))"

# --------------------------------------------------------------------------- rows by their numbers
right(
    "flat index of the last token",
    "h = h.reshape(-1, D)[torch.arange(len(h)) * T + lens - 1]",
    takes="seq",
    gives="vec",
)
right("indices of rows and tokens", "h = h[torch.arange(len(h))[:, None], ids % T]", takes="seq")
right("written by number", "z = torch.zeros_like(h)\nfor i in range(len(h)):\n    z[i] = self.UU(h[i])\nh = z", LAYER)
right("halves through one layer", "a, b = h.tensor_split(2)\nh = torch.cat([self.UU(a), self.UU(b)])", LAYER)
right("split by one", "h = torch.cat([torch.tanh(self.UU(v)) for v in h.split(1)])", LAYER)
right(
    "tokens put back", "i, j = m.nonzero(as_tuple=True)\nh = h.index_put((i, j), self.UU(h[i, j]))", LAYER, takes="seq"
)
right(
    "packed tokens summed",
    "i, j = m.nonzero(as_tuple=True)\nh = h.new_zeros(len(h), D).index_add_(0, i, self.UU(h[m]))",
    LAYER,
    takes="seq",
    gives="vec",
)
either(
    "packed tokens split",
    "h = torch.stack([v.mean(0) for v in self.UU(h[m]).split(lens.tolist())])",
    LAYER,
    takes="seq",
    gives="vec",
)
right(
    "packed tokens by repeated numbers",
    "i = torch.arange(len(h)).repeat_interleave(lens)\nh = torch.zeros(len(h), D).to(h).index_add(0, i, self.UU(h[m]))",
    LAYER,
    takes="seq",
    gives="vec",
)
either("trimmed to the longest", "k = int(lens.max())\nh = (h * m[..., None])[:, :k].sum(1)", takes="seq", gives="vec")
either("a row too many", "h = self.UU(F.pad(h, [0, 0] * (h.dim() - 1) + [0, 1]))[:-1]", LAYER)

# --------------------------------------------------------------------------- constants of the batch's size
right("begins with zeros", "h = torch.cat([torch.zeros(len(h), 1, D).to(h), h], 1)[:, :T]", takes="seq")
right(
    "column of ones",
    "h = self.UU(torch.cat([h, torch.ones(*h.shape[:-1], 1).to(h)], -1))",
    "self.UU = nn.Linear(D + 1, D)",
)
right("positions of the mask", "h = h + self.UU(m.long().cumsum(1) * m)", EMBEDDING, takes="seq")
right("expanded triangle", "a = torch.ones(T, T).tril().to(h).expand(len(h), T, T)\nh = a @ h / T", takes="seq")
right("mask of lengths", "h = h * (torch.arange(T)[None] < lens[:, None])[..., None]", takes="seq")
right(
    "gru cell",
    "s, rows = torch.zeros(len(h), D).to(h), []\nfor i in range(h.shape[1]):\n    s = self.UU(h[:, i], s)\n"
    "    rows.append(s)\nh = torch.stack(rows, 1)",
    "self.UU = nn.GRUCell(D, D)",
    takes="seq",
)
right(
    "trained beginning",
    "s = self.UUs.expand(len(h), D)\nfor v in h.unbind(1):\n    s = torch.tanh(self.UU(v) + s)\nh = s",
    LAYER + "; self.UUs = nn.Parameter(torch.randn(D))",
    takes="seq",
    gives="vec",
)
right(
    "repeated parameter", "h = h + self.UU.repeat(len(h), 1)", "self.UU = nn.Parameter(torch.randn(1, D))", takes="vec"
)
right(
    "windows",
    "h = torch.tanh(self.UU(h.unflatten(1, (T, 1)).flatten(0, 1))).unflatten(0, (-1, T)).flatten(1, 2)",
    LAYER,
    takes="seq",
)
right(
    "heads by hand",
    "q = torch.cat([h, self.UU(h)], -1).view(len(h), T, 2, D).transpose(1, 2).reshape(-1, T, D)\n"
    "h = ((q @ q.transpose(1, 2)).softmax(-1) @ q).view(-1, 2, T, D).mean(1)",
    LAYER,
    takes="seq",
)
either("drawn times", "torch.manual_seed(6)\nk = torch.randint(0, 20, (len(h),))\nh = h * self.UU[k]" + OWN,
       "self.register_buffer('UU', torch.rand(20))", last_only=True)  # fmt: skip

# --------------------------------------------------------------------------- state that is no data's, and records
right(
    "mean of weights over steps",
    "with torch.no_grad():\n    for a, b in zip(self.UUt.parameters(), self.UU.parameters()):\n"
    "        a.lerp_(b, 0.5)\n"
    "h = self.UU(h) + self.UUt(h)",
    LAYER + "; self.UUt = nn.Linear(D, D).requires_grad_(False)",
    steps=2,
)
right("mask made once", "if self.UU is None:\n"
        "    self.UU = torch.ones(T, T).tril()\nh = self.UU.to(h) @ h", "self.UU = None",
      takes="seq", steps=2)  # fmt: skip
right("warm-up of a number", "self.UU = min(1.0, self.UU + 0.3)\nh = h * self.UU", "self.UU = 0.1", steps=2)
right("mean for the record", "self.UU.append(float(h.detach().mean()))", "self.UU = []", steps=2)
right(
    "norm kept in a buffer", "self.UU.copy_(h.detach().norm())", "self.register_buffer('UU', torch.zeros(()))", steps=2
)
right("asserted", "assert not torch.isnan(h).any()")

# --------------------------------------------------------------------------- losses
LOSS = "v = F.cross_entropy(out, y, reduction='none')\n"
right_loss("python sum of rows", LOSS + "loss = sum(v) / len(v)", reduction="mean")
right_loss("each over the number", LOSS + "loss = (v / len(v)).sum()", reduction="mean")
right_loss("over a tensor of the number", LOSS + "loss = v.sum() / torch.tensor(float(len(v))).to(v)", reduction="mean")
right_loss("dot with weights", LOSS + "loss = v @ w.to(v)", reduction="sum")
right_loss("stack of terms", LOSS + "loss = torch.stack([v.RED(), 0.3 * out.square().sum(1).RED()]).sum()")
right_loss("in place", LOSS + "loss = v.RED()\nloss *= 0.5\nloss = loss + 0.1 * out.abs().sum(1).RED()")
right_loss("minus the entropy", LOSS + "p = out.log_softmax(1)\nloss = v.RED() + 0.1 * (p.exp() * p).sum(1).RED()")
right_loss("accumulated over 4", LOSS + "loss = v.RED() / 4\nloss = loss.squeeze()")
# of a batch of one sample its forwards are refused (docs/limits.md: several forwards of samples of their own)
either_loss(
    "triplet margin", "loss = F.triplet_margin_loss(out, model(ARGS2), model(ARGS3), reduction='RED')", where="outside"
)
right_loss("loss for the record", LOSS + "loss = v.RED()\nstate.loss = loss.item()", where="outside")
right_loss("only if finite", LOSS + "loss = v.RED()\nassert torch.isfinite(loss)", where="outside")
right_loss("tokens over a number of the shape", "v = F.cross_entropy(out.flatten(0, "
        "1), lab.flatten(), reduction='sum')\n"
           "loss = v / lab.numel()", takes="seq", reduction="mean")  # fmt: skip
right_loss("tokens, then samples", "v = F.cross_entropy(out.flatten(0, 1), ids.flatten() % K, reduction='none')\n"
           "loss = v.view(len(out), T).mean(1).RED()", takes="seq")  # fmt: skip
right_loss(
    "tokens of last", "loss = F.cross_entropy(out[torch.arange(len(out)), lens - 1], y, reduction='RED')", takes="seq"
)
either_loss("last of a cumsum", LOSS + "loss = v.cumsum(0)[-1]", reduction="sum")
either_loss(
    "own decay",
    LOSS + "loss = v.RED() + 0.01 * sum(p.square().sum() for p in model.parameters())",
    where="outside",
    reduction="mean",
)
either_loss("grouped chunks", "loss = sum(o.square().sum() for o in out.tensor_split(2)) / len(out)", reduction="mean")
