"""Pieces of a forward in which every sample stands by itself."""

from __future__ import annotations

from .pieces import EITHER, RIGHT, add


def right(name: str, lines: str, init: str = "", **options: object) -> None:
    add(name, RIGHT, "body", lines, init, **options)


def either(name: str, lines: str, init: str = "", **options: object) -> None:
    add(name, EITHER, "body", lines, init, **options)


LAYER = "self.UU = nn.Linear(D, D)"

# --------------------------------------------------------------------------- layers
right("linear", "h = self.UU(h)", LAYER)
right("residual", "h = h + torch.tanh(self.UU(h))", LAYER)
right(
    "scale and shift",
    "h = h * self.UU + self.UUb",
    "self.UU = nn.Parameter(torch.rand(D) + 0.5); self.UUb = nn.Parameter(torch.randn(D))",
)
right("layer norm", "h = self.UU(h)", "self.UU = nn.LayerNorm(D)")
right("group norm", "h = self.UU(h.transpose(1, 2)).transpose(1, 2)", "self.UU = nn.GroupNorm(1, D)", takes="seq")
right(
    "conv1d", "h = self.UU(h.transpose(1, 2)).transpose(1, 2)", "self.UU = nn.Conv1d(D, D, 3, padding=1)", takes="seq"
)
right("raw matrix", "h = h @ self.UU", "self.UU = nn.Parameter(torch.randn(D, D) / D ** 0.5)")
right("einsum", "h = torch.einsum('...d,de->...e', h, self.UU)", "self.UU = nn.Parameter(torch.randn(D, D))")
right("weight norm", "h = self.UU(h)", "self.UU = torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, D))")
right(
    "lora",
    "h = self.UU(h) + h @ self.UUa @ self.UUb",
    "self.UU = nn.Linear(D, D).requires_grad_(False); self.UUa = nn.Parameter(torch.randn(D, 2));"
    " self.UUb = nn.Parameter(torch.randn(2, D))",
)
right("layer twice", "h = self.UU(torch.tanh(self.UU(h)))", LAYER)
right("bilinear", "h = self.UU(h, torch.tanh(h))", "self.UU = nn.Bilinear(D, D, D)")
right(
    "autocast", "with torch.autocast('cpu', torch.bfloat16):\n    h = self.UU(h)\nh = h.to(x.dtype)", LAYER, loose=True
)
right(
    "checkpoint",
    "h = torch.utils.checkpoint.checkpoint(self.UU, h, use_reentrant=False)",
    "self.UU = nn.Sequential(nn.Linear(D, D), nn.Tanh())",
)
right("loop over samples", "h = torch.stack([self.UU(v) for v in h])", LAYER)
right("chunks", "h = torch.cat([self.UU(part) for part in h.split(KK)])", LAYER)
either("vmap of a function", "h = torch.vmap(lambda v: torch.tanh(v) * CC)(h)")
right("view of its own", "h = self.UU(h.view(len(h), -1, D)).reshape(h.shape)", LAYER)
right("time first", "h = self.UU(h.transpose(0, 1)).transpose(0, 1)", LAYER, takes="seq")
right("doubled rows", "a, b = self.UU(torch.cat([h, h * CC])).chunk(2)\nh = a + torch.tanh(b)", LAYER)
right("repeated rows", "h = self.UU(h.repeat_interleave(2, 0)).unflatten(0, (len(h), 2)).mean(1)", LAYER)
right(
    "experts",
    "r = self.UU(h).argmax(-1)\nz = torch.zeros_like(h)\nfor i, f in enumerate(self.UUf):\n"
    "    z[r == i] = f(h[r == i])\nh = h + z",
    "self.UU = nn.Linear(D, 2); self.UUf = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])",
)
right(
    "cached by shape",
    "k = h.shape[-1]\nif k not in self.UU:\n    self.UU[k] = torch.linspace(-1, 1, k)\nh = h * self.UU[k].to(h)",
    "self.UU = {}",
    steps=2,
)
right("counter of steps", "self.UU += 1\nh = h * CC if self.UU > 1 else h", "self.UU = 0", steps=2)
right("counter buffer", "self.UU.add_(1)\nh = h / self.UU", "self.register_buffer('UU', torch.zeros(()))", steps=2)
right(
    "mask of its own number",
    "h = h * self.UU[n].view(-1, *[1] * (h.dim() - 2), D)",
    "self.register_buffer('UU', (torch.rand(20, D) > 0.4).float())",
)

# --------------------------------------------------------------------------- within a sample
right("normalize", "h = F.normalize(h, dim=-1)")
right("centred features", "h = h - h.mean(-1, keepdim=True)")
right("in place", "h = self.UU(h)\nh.mul_(CC)\nh = h.relu_()", LAYER)
right("write a feature", "h = self.UU(h)\nh[..., 0] = 0", LAYER)
right("own scatter on new zeros", "h = h.new_zeros(h.shape).scatter_add_(-1, torch.zeros_like(h, dtype=torch.long), h)")
right("index_add by arange", "h = h.new_zeros(h.shape).index_add_(0, torch.arange(len(h)), self.UU(h))", LAYER)
right("no_grad statistics", "with torch.no_grad():\n    s = h.std(-1, keepdim=True)\nh = h / (s + 1)")
right(
    "attention",
    "h = self.UU(h, h, h, need_weights=False)[0]",
    "self.UU = nn.MultiheadAttention(D, 1, batch_first=True)",
    takes="seq",
)
right("causal attention", "h = F.scaled_dot_product_attention(h, h, self.UU(h), is_causal=True)", LAYER, takes="seq")
right(
    "masked attention", "h = F.scaled_dot_product_attention(h, self.UU(h), h, attn_mask=m[:, None])", LAYER, takes="seq"
)
right("position embedding", "h = h + self.UU(torch.arange(h.shape[1]))", "self.UU = nn.Embedding(20, D)", takes="seq")
right("cumsum of time", "h = h.cumsum(1)", takes="seq")
right("gathered tokens", "h = h.gather(1, (lens - 1)[:, None, None].expand(-1, h.shape[1], D)) + h", takes="seq")
right("lstm", "h = self.UU(h)[0]", "self.UU = nn.LSTM(D, D, batch_first=True)", takes="seq")
PACK = "p = nn.utils.rnn.pack_padded_sequence(h, lens, batch_first=True, enforce_sorted=False)\n"
right(
    "packed gru",
    PACK + "h = nn.utils.rnn.pad_packed_sequence(self.UU(p)[0], batch_first=True, total_length=T)[0]",
    "self.UU = nn.GRU(D, D, batch_first=True)",
    takes="seq",
)
right(
    "packed lstm, its mask",
    PACK + "h, own = nn.utils.rnn.pad_packed_sequence(self.UU(p)[0], batch_first=True, "
    "total_length=T)\nh = h * (torch.arange(T)[None] < own[:, None])[..., None]",
    "self.UU = nn.LSTM(D, D, batch_first=True)",
    takes="seq",
)
right("selected tokens", "z = torch.zeros_like(h)\nz[m] = self.UU(h[m])\nh = h + z", LAYER, takes="seq")
right(
    "class token",
    "h = torch.cat([self.UU.expand(len(h), 1, D), h], 1)[:, :-1]",
    "self.UU = nn.Parameter(torch.randn(1, 1, D))",
    takes="seq",
)
right("loop over time", "h = torch.stack([self.UU(h[:, i]) for i in range(h.shape[1])], 1)", LAYER, takes="seq")
right(
    "conv over features",
    "h = self.UU(h.unsqueeze(1)).squeeze(1)",
    "self.UU = nn.Conv1d(1, 1, 3, padding=1)",
    takes="vec",
)
either("vmap of data", "h = torch.vmap(lambda v: v @ v.T @ v / T)(h)", takes="seq")
right("distances within", "h = torch.cdist(h, h) @ h / T", takes="seq")

# --------------------------------------------------------------------------- from tokens to a vector
right("masked mean", "h = (h * m[..., None]).sum(1) / m.sum(1, keepdim=True)", takes="seq", gives="vec")
right("last token by arange", "h = h[torch.arange(len(h)), lens - 1]", takes="seq", gives="vec")
right("flattened", "h = self.UU(h.view(len(x), -1))", "self.UU = nn.Linear(T * D, D)", takes="seq", gives="vec")
right("to tokens", "h = self.UU(h).view(len(h), T, D)", "self.UU = nn.Linear(D, T * D)", takes="vec", gives="seq")

# --------------------------------------------------------------------------- more of everyday code
CUSTOM = "class Own(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, v):\n        return v * 1.0\n"
right(
    "transformer layer, padded",
    "h = self.UU(h, src_key_padding_mask=~m)",
    "self.UU = nn.TransformerEncoderLayer(D, 1, 2 * D, dropout=0.0, batch_first=True)",
    takes="seq",
)
right("film", "h = h * self.UU(t[:, None]).view(len(h), *[1] * (h.dim() - 2), D)", "self.UU = nn.Linear(1, D)")
right("class embedding", "h = h + self.UU(y).view(len(h), *[1] * (h.dim() - 2), D)", "self.UU = nn.Embedding(K, D)")
right(
    "matrix of the class",
    "h = torch.einsum('bd,bde->be', h, self.UU[y])",
    "self.UU = nn.Parameter(torch.randn(K, D, D) / 2)",
    takes="vec",
)
right(
    "one_hot",
    "h = h + (F.one_hot(y, K).to(h) @ self.UU).view(len(h), *[1] * (h.dim() - 2), D)",
    "self.UU = nn.Parameter(torch.randn(K, D))",
)
right(
    "data beside",
    "h = self.UU(torch.cat([h, t.view(-1, *[1] * (h.dim() - 1)).expand(*h.shape[:-1], 1)], -1))",
    "self.UU = nn.Linear(D + 1, D)",
)
right("centres", "h = torch.cdist(h, self.UU)", "self.UU = nn.Parameter(torch.randn(D, D))")
right(
    "codebook",
    "q = self.UU[torch.cdist(h, self.UU).argmin(-1)]\nh = h + 0.5 * q + (q - h).detach()",
    "self.UU = nn.Parameter(torch.randn(5, D))",
)
right("straight through", "h = h + (h.round() - h).detach()")
right(
    "gradient reversal",
    CUSTOM + "    @staticmethod\n    def backward(ctx, g):\n        return -0.5 * g\nh = Own.apply(h)",
)
right("fft", "h = torch.fft.fft(h, dim=-1).real")
right("bag of tokens", "h = h + self.UU(ids).view(len(h), *[1] * (h.dim() - 2), D)", "self.UU = nn.EmbeddingBag(V, D)")
right("interpolated", "h = F.interpolate(h.transpose(1, 2), size=T, mode='linear').transpose(1, 2)", takes="seq")
right("top tokens", "h = h.topk(2, 1).values.mean(1)", takes="seq", gives="vec")
right("parameter per token", "h = h * self.UU", "self.UU = nn.Parameter(torch.rand(T, D))", takes="seq")
right(
    "mixing of tokens",
    "h = torch.einsum('btd,ts->bsd', h, self.UU)",
    "self.UU = nn.Parameter(torch.randn(T, T) / 2)",
    takes="seq",
)
right("lens by loop", "h = torch.stack([v[:k].mean(0) for v, k in zip(h, lens.tolist())])", takes="seq", gives="vec")
right("spectral norm", "h = self.UU(h)", "self.UU = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))")
right("functional layer", "h = F.linear(h, self.UU.weight.tanh(), self.UU.bias * 2)", LAYER)
right("tied to itself", "h = F.linear(torch.tanh(self.UU(h)), self.UU.weight.t())", LAYER)
right(
    "frozen teacher", "with torch.no_grad():\n    q = self.UU(h)\nh = h + q", LAYER + "; self.UU.requires_grad_(False)"
)
right(
    "masked softmax", "a = (h @ h.transpose(1, 2)).masked_fill(~m[:, None], -1e9)\nh = a.softmax(-1) @ h", takes="seq"
)
either(
    "penalty inside",
    "z = h.detach().requires_grad_()\nwith torch.enable_grad():\n"
    "    g = torch.autograd.grad(torch.tanh(z).sum(), z)[0]\nh = h * g",
)

# --------------------------------------------------------------------------- hooks
right("hook that looks", "h = torch.tanh(h)\nif h.requires_grad:\n    h.register_hook(lambda g: None)")
right("retain_grad", "h = torch.tanh(h)\nif h.requires_grad:\n    h.retain_grad()")
right("module hook that looks", "h = self.UU(h)", LAYER + "; self.UU.register_full_backward_hook(lambda m, a, b: None)")
right("forward hook", "h = self.UU(h)", LAYER + "; self.UU.register_forward_hook(lambda m, a, b: b * CC)")
either("hook that scales", "h = torch.tanh(h)\nif h.requires_grad:\n    h.register_hook(lambda g: g * CC)")
either(
    "hook: normed by sample in a sum",
    "h = torch.tanh(h)\nif h.requires_grad:\n    h.register_hook("
    "lambda g: g / (1e-9 + g.flatten(1).norm(dim=1).view(-1, *[1] * (g.dim() - 1))))",
    reduction="sum",
)

# --------------------------------------------------------------------------- what may be refused
either("halves put together again", "k = len(h) // 2\nh = torch.cat([h[:k], h[k:]])")
either("flip and back", "h = self.UU(h.flip(0)).flip(0)", LAYER)
either("permuted and back", "p = torch.arange(len(h)).flip(0)\nh = self.UU(h[p])[p.argsort()]", LAYER)
either("data in place", "y_ = torch.tanh(h)\nwith torch.no_grad():\n    y_.data.mul_(1.0)\nh = y_")
either("numpy of a sample's own", "h = h + torch.from_numpy(h.detach().double().numpy() ** 2).to(h)")
# (what is drawn fills memory in its order: the others' numbers stay if the last sample goes and memory is in rows)
either("drawn noise", "torch.manual_seed(4)\nh = h + torch.rand_like(h.contiguous())", last_only=True)
either(
    "dropout module", "torch.manual_seed(5)\nh = self.UU(h.contiguous())", "self.UU = nn.Dropout(0.3)", last_only=True
)
either("detached parameter of data", "h = h * nn.Parameter(torch.tanh(h).detach(), requires_grad=False)")
either("is anything padded", "if not bool(m.all()):\n    h = h * m[..., None]", takes="seq")

# --------------------------------------------------------------------------- sums of terms of both signs
right("uses that nearly cancel", "h = 3000 * (self.UU(h) - self.UU(h + 1e-3 * torch.tanh(h)))", LAYER)
right(
    "ids that nearly cancel",
    "h = h + 3000 * (self.UU(ids % 2) * (1 + 1e-3 * h) - self.UU((ids + 2) % 2))",
    "self.UU = nn.Embedding(2, D)",
    takes="seq",
)
right(
    "tied table",
    "g = torch.tanh(F.linear(h + self.UU(ids), self.UU.weight))\nh = g @ self.UU.weight",
    "self.UU = nn.Embedding(V, D)",
    takes="seq",
)
right(
    "tied table that nearly cancels",
    "c = torch.linspace(-CC, 2, D).to(h)\nk = self.UU(ids)\n"
    "p = F.linear(c.expand_as(k), self.UU.weight).gather(-1, ids[..., None])\n"
    "h = h * 1e-3 + 3000 * (k @ c)[..., None] - 3000 * p + k",
    "self.UU = nn.Embedding(V, D)",
    takes="seq",
)
right("repeated id", "h = h + 1e4 * self.UU(torch.zeros_like(ids))", "self.UU = nn.Embedding(V, D)", takes="seq")

# --------------------------------------------------------------------------- where a model begins
for name, lines, init, gives in (
    ("layer", "h = self.inp(x)", "self.inp = nn.Linear(D, D)", ""),
    ("data", "h = x", "", ""),
    ("frozen layer", "h = self.inp(x)", "self.inp = nn.Linear(D, D).requires_grad_(False)", ""),
    ("tokens", "h = x + self.inp(ids)", "self.inp = nn.Embedding(V, D)", "seq"),
):
    add("first: " + name, RIGHT, "first", lines, init, gives=gives)
