"""Pieces of a forward that couple samples: refused or warned of, wherever a sample could move others."""

from __future__ import annotations

from .pieces import COUPLED, add


def wrong(name: str, lines: str, init: str = "", **options: object) -> None:
    add(name, COUPLED, "body", lines, init, **options)


LAYER = "self.UU = nn.Linear(D, D)"
ROWS = ".view(-1, *[1] * (h.dim() - 1))"

# --------------------------------------------------------------------------- statistics over the batch
wrong("mean(0)", "h = h - CC * h.mean(0)")
wrong("std(0)", "h = h / (h.std(0, correction=0) + 0.1)")
wrong("var of all", "h = h / (h.var() + 1)")
wrong("median(0)", "h = h - h.median(0).values")
wrong("norm of all", "h = h / h.norm()")
wrong("logsumexp(0)", "h = h - h.logsumexp(0)")
wrong("cumsum(0)", "h = h.cumsum(0)")
wrong("sort(0)", "h = h.sort(0).values")
wrong("softmax(0)", "h = h.softmax(0) * B")
wrong("topk(0)", "h = h * (h >= h.topk(max(1, len(h) // 2), 0).values[-1])")
wrong("quantile", "h = h.clamp(max=h.flatten().quantile(0.5).detach())")
wrong("kthvalue", "h = h * (h > h.kthvalue(1, 0).values)")
wrong("renorm(0)", "h = torch.renorm(h, 2, -1, CC)")
wrong("rank", "h = h * h.argsort(0).argsort(0)")
wrong("batch norm", "h = self.UU(h.reshape(-1, D)).view_as(h)", "self.UU = nn.BatchNorm1d(D)")
wrong("batch norm, functional", "h = F.batch_norm(h.reshape(-1, D), None, None, training=True).view_as(h)")
wrong("normalize(0)", "h = F.normalize(h, dim=0)")
wrong("detached mean", "h = h - h.detach().mean(0)")
wrong("no_grad mean", "with torch.no_grad():\n    s = h.mean(0)\nh = h * s")
wrong("attention over the batch", "z = h.flatten(1)\nh = ((z @ z.T / D).softmax(-1) @ z).view_as(h)")
wrong("gram", "z = h.flatten(1)\nh = (torch.tanh(z @ z.T) @ z).view_as(h)")
wrong("cdist over the batch", "z = h.flatten(1)\nh = h * torch.cdist(z, z).mean(1)" + ROWS)
wrong(
    "time first attention",
    "h = self.UU(h, h, h, need_weights=False)[0]",
    "self.UU = nn.MultiheadAttention(D, 1)",
    takes="seq",
)
wrong("vector attention", "h = F.scaled_dot_product_attention(h, h, h)", takes="vec")
wrong(
    "conv over the batch", "h = self.UU(h.T.unsqueeze(0))[0].T", "self.UU = nn.Conv1d(D, D, 3, padding=1)", takes="vec"
)
wrong("rnn over the batch", "h = self.UU(h)[0]", "self.UU = nn.GRU(D, D)", takes="seq")
wrong("index of another", "h = h + h[torch.zeros(len(h), dtype=torch.long)]")
wrong("index by class", "h = h + h[y % len(h)]")
wrong("class means", "s = h.new_zeros(K, *h.shape[1:]).index_add_(0, y, h)\nh = h - s[y] * CC")
wrong("scatter of classes", "s = torch.zeros(K, D).to(h).index_add(0, y, h)\nh = h + s[y]", takes="vec")
wrong(
    "segment of classes",
    "h = h - torch.stack([h[y == i].mean(0) if bool((y == i).any()) else h[0] * 0 for i in range(K)])[y]",
)
wrong(
    "nearest neighbour",
    "z = h.flatten(1)\nd = torch.cdist(z, z) + torch.eye(len(z)).to(z) * 1e6\nh = h + h[d.argmin(1)]",
)
wrong("in place mean", "h = h * CC\nh.sub_(h.mean(0))")
wrong("in place write", "h = h * CC\nh[1:] = h[:-1].clone()")
wrong("chunk means", "h = torch.cat([p - p.mean(0) for p in h.split(2)])")
wrong("chunk norms", "h = torch.cat([p / p.norm() for p in h.split(3)])")
wrong(
    "running through a loop",
    "s, rows = 0, []\nfor v in h:\n    s = 0.5 * s + v\n    rows.append(s)\nh = torch.stack(rows)",
)
wrong(
    "checkpointed mean",
    "h = torch.utils.checkpoint.checkpoint(lambda v: v - v.mean(0), self.UU(h), use_reentrant=False)",
    LAYER,
)
wrong(
    "reentrant checkpointed mean",
    "h = torch.utils.checkpoint.checkpoint(lambda v: v - v.mean(0), self.UU(h), use_reentrant=True)",
    LAYER,
)
wrong(
    "autocast mean",
    "with torch.autocast('cpu', torch.bfloat16):\n    h = self.UU(h)\n    h = h - h.mean(0)\nh = h.to(x.dtype)",
    LAYER,
    loose=True,
)
wrong("vmap over features", "h = torch.vmap(lambda v: v - v.mean(), in_dims=-1, out_dims=-1)(h)")
wrong("mixed batch", "h = CC * h + h.flip(0)")
wrong("mixed batch by roll", "h = h - CC * h.roll(1, 0)")
wrong("pairs", "h = h.view(-1, 2, D).flip(1).reshape(-1, D) + h if len(h) % 2 == 0 else h + h.flip(0)", takes="vec")
wrong("transposed", "h = h + (h.T if h.shape[0] == h.shape[1] else h.sum(0))", takes="vec")
wrong("reshaped askew", "h = h + h.reshape(D, -1).T.reshape(h.shape)", takes="vec")
wrong("repeat rows", "h = h + h.repeat(2, 1)[1:len(h) + 1]", takes="vec")
wrong("median of lengths", "h = h * (lens > lens.median())" + ROWS)
wrong("longest", "h = h * (lens / lens.max())" + ROWS)
wrong("weights normalised", "h = h * (w / w.sum())" + ROWS)
wrong("centred targets", "h = h * (t - t.mean())" + ROWS)
wrong("standardised data", "z = x.flatten(1).mean(1)\nh = h * ((z - z.mean()) / (z.std(correction=0) + 0.1))" + ROWS)

# --------------------------------------------------------------------------- state of earlier batches
wrong(
    "previous batch",
    "k = min(len(h), len(self.UU))\nz = h.detach()\n"
    "h = h + F.pad(self.UU[:k], [0, 0] * (h.dim() - 1) + [0, len(h) - k])\nself.UU = z",
    "self.UU = torch.zeros(0, *SHAPE)",
    steps=2,
)
wrong("mean of the previous", "z = h.detach().mean(0)\nh = h + self.UU\nself.UU = z", "self.UU = 0", steps=2)
wrong(
    "ema of features",
    "h = h - self.UU\nwith torch.no_grad():\n    self.UU.mul_(0.5).add_(h.mean(0), alpha=0.5)",
    "self.register_buffer('UU', torch.zeros(*SHAPE))",
    steps=2,
)
wrong(
    "ema assigned",
    "z = h.detach().flatten(0, -2).mean(0)\nh = h * (1 + self.UU)\nself.UU = 0.9 * self.UU + CC * z",
    "self.UU = torch.zeros(D)",
    steps=2,
)
wrong(
    "queue",
    "z = h.flatten(1)\nif self.UU is not None:\n    h = h + (z @ self.UU.T).mean(1)"
    + ROWS
    + "\nself.UU = z.detach() if self.UU is None else torch.cat([z.detach(), self.UU])[:8]",
    "self.UU = None",
    steps=2,
)
wrong(
    "list of pasts",
    "z = h.detach()\nfor past in self.UU:\n    h = h + past.mean(0)\nself.UU.append(z)",
    "self.UU = []",
    steps=2,
)
wrong(
    "buffer written by rows",
    "z = h.detach()\nh = h + self.UU[n % 4]\nself.UU[:min(4, len(z))] = z[:4]",
    "self.register_buffer('UU', torch.zeros(4, *SHAPE))",
    steps=2,
)
wrong(
    "memory of numbers",
    "z = h.detach()\nh = h + self.UU[(n + 1) % 20]\nself.UU[n] = z",
    "self.register_buffer('UU', torch.zeros(20, *SHAPE))",
    steps=2,
)
wrong(
    "largest seen",
    "z = h.detach().abs().max()\nh = h / (1 + self.UU)\nself.UU = max(self.UU, float(z))",
    "self.UU = 0.0",
    steps=2,
)
wrong(
    "running batch norm",
    "self.UU.train(self.UUk < 1)\nself.UUk += 1\nh = self.UU(h.reshape(-1, D)).view_as(h)",
    "self.UU = nn.BatchNorm1d(D); self.UUk = 0",
    steps=2,
)
wrong("counts of rows seen", "self.UU += len(h)\nh = h * self.UU", "self.UU = 0", steps=2)
wrong(
    "no_grad pre-pass keeps",
    "with torch.no_grad():\n    z = self.UU(h).mean(0)\nh = h + self.UUp\nself.UUp = z",
    LAYER + "; self.UUp = 0",
    steps=2,
)
wrong(
    "previous logits by shape",
    "z = h.detach().clone()\nif self.UU is not None and self.UU.shape == h.shape:\n    h = h + self.UU\nself.UU = z",
    "self.UU = None",
    steps=2,
)

# --------------------------------------------------------------------------- position in the batch
wrong("linspace by row", "h = h * torch.linspace(-3, 3, 20).to(h)[:len(h)]" + ROWS)
wrong("arange by row", "h = h * (1 + torch.arange(len(h)))" + ROWS)
wrong("arange like", "h = h * torch.arange(h.shape[0]).to(h).add(CC)" + ROWS)
wrong("parity", "h = h * ((-1.0) ** torch.arange(len(h))).to(h)" + ROWS)
wrong("parameter by row", "h = h * self.UU[:len(h)]" + ROWS, "self.UU = nn.Parameter(torch.randn(20))")
wrong("table by row", "h = h + self.UU[:len(h)]", "self.UU = nn.Parameter(torch.randn(20, *SHAPE))")
wrong(
    "embedding of arange by row", "h = h + self.UU(torch.arange(len(h)))", "self.UU = nn.Embedding(20, D)", takes="vec"
)
wrong(
    "ids by row, written out of sight",
    "ids = torch.arange(len(h))\np = self.UU(ids)\nids.data.zero_()\nh = h + p",
    "self.UU = nn.Embedding(20, D)",
    takes="vec",
)
wrong("buffer by row", "h = h * self.UU[:len(h)]" + ROWS, "self.register_buffer('UU', torch.randn(20))")
wrong("halves treated apart", "k = len(h) // 2\nh = torch.cat([h[:k] * 3, -h[k:]])")
wrong(
    "halves through two layers",
    "k = len(h) // 2\nh = torch.cat([self.UU(h[:k]), self.UUb(h[k:])])",
    LAYER + "; self.UUb = nn.Linear(D, D)",
)
wrong("first dropped", "h = torch.cat([h[:1] * 0, h[1:]])")
wrong("loop by place", "h = torch.stack([v * (i + 1) for i, v in enumerate(h)])")
wrong(
    "layer by place",
    "h = torch.stack([self.UU[i % 2](v) for i, v in enumerate(h)])",
    "self.UU = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])",
)
wrong("every second", "z = h.clone()\nz[::2] = h[::2] * CC\nh = -z")
wrong("first written", "h = h * CC\nh[0] = 3")
wrong("last zeroed", "h = h * CC\nh[-1] = 0")
wrong("split by place", "a, b = h.tensor_split(2)\nh = torch.cat([a, b * CC, ])")
wrong("noise table by row", "h = h + torch.randn(20, generator=torch.Generator().manual_seed(1)).to(h)[:len(h)]" + ROWS)
wrong("mask by row", "z = torch.zeros(len(h), dtype=torch.bool)\nz[0] = True\nh = h.masked_fill(z" + ROWS + ", CC)")
wrong("cumsum of ones", "h = h * torch.ones(len(h)).to(h).cumsum(0)" + ROWS)

# --------------------------------------------------------------------------- numbers of data through sizes
wrong("times the batch", "h = h * len(h)")
wrong("over the batch", "h = h / h.shape[0]")
wrong("times shape[0] tensor", "h = h * torch.tensor(float(x.size(0))).to(h)")
wrong("batch squared through numel", "h = h * h.numel()")
wrong("number of positives", "h = h * (h > 0).nonzero().shape[0]")
wrong("rows selected", "h = h * h[h > 0].shape[0]")
wrong("rows of a mask", "h = h * m.nonzero().shape[0]")
wrong("number of classes met", "h = h * len(torch.unique(y))")
wrong("number of ids met", "h = h / len(ids.unique())")
wrong("longest as size", "h = h * int(lens.max())")
wrong("where of one argument", "h = h * len(torch.where(t > 0)[0])")
wrong("masked_select", "h = h * torch.masked_select(h, h > 0).numel()")
wrong("bincount", "h = h * torch.bincount(y).shape[0]")
wrong("tolist", "h = h * sum(v > 0 for v in t.tolist())")
wrong("item of a sum", "h = h * t.sum().item()")
wrong("branch on the batch", "h = h * 3 if bool((t > 0).any()) else -h")
wrong("padded to the longest", "h = h[:, :int(lens.max())]\nh = h.sum(1) * h.shape[1]", takes="seq", gives="vec")

wrong(
    "padded sequences",
    "h = nn.utils.rnn.pad_sequence([v[:k] for v, k in zip(h, lens.tolist())], batch_first=True)\nh = h.mean(1)",
    takes="seq",
    gives="vec",
)
wrong(
    "packed to the longest",
    "p = nn.utils.rnn.pack_padded_sequence(h, "
    "lens, batch_first=True, enforce_sorted=False)\n"
    "h = nn.utils.rnn.pad_packed_sequence(p, batch_first=True)[0].mean(1)",
    takes="seq",
    gives="vec",
)
wrong("classes of one_hot", "h = h * F.one_hot(y).shape[1]")
wrong("formatted sum", "h = h * float(f'{t.sum():.3f}')")
wrong("largest in Python", "h = h * max(float(v) for v in t)")
wrong(
    "sorted in Python",
    "k = sorted(range(len(t)), key=lambda i: float(t[i]))\n"
    "h = h * torch.tensor([float(k.index(i)) for i in range(len(t))]).to(h)" + ROWS,
)
wrong(
    "seed of data",
    "g = torch.Generator().manual_seed(int(t.abs().sum() * 100))\nh = h * torch.randn(D, generator=g).to(h)",
)
wrong("compared with the first", "h = h * 3 if t[0] > t[-1] else -h")
wrong("list index", "h = h + h[int(t.argmax())]")
wrong("isin", "h = h * torch.isin(y, y[:1])" + ROWS)
wrong("unique inverse", "h = h * torch.unique(t, return_inverse=True)[1]" + ROWS)
wrong("searchsorted in the batch", "h = h * torch.searchsorted(t.sort().values, t)" + ROWS)
wrong("histogram", "h = h * torch.histc(t.float(), 4).to(h)[0]")
wrong("counts of classes", "h = h * torch.bincount(y, minlength=K)[y]" + ROWS)
