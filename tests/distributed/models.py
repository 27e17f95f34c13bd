"""A small language model in several forms, its batches, and the same steps by one process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.losses import linear_cross_entropy

D, WORDS, LENGTH = 12, 37, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D, bias=False)
        self.mlp = nn.Sequential(nn.Linear(D, 29), nn.GELU(), nn.Linear(29, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


@dataclass(frozen=True)
class Shared:
    """What blocks hand on."""

    bias: Any


class Biased(Block):
    """With biases of relative positions, which the first block makes of its table and all use, as in T5."""

    def __init__(self, table: bool, within: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * LENGTH - 1, 1) if table else None
        self.within = within  # a dataclass

    def forward(self, x: Tensor, given: Any = None) -> tuple[Tensor, Any]:
        bias = given.bias if isinstance(given, Shared) else given
        if self.table is not None:
            places = torch.arange(LENGTH)
            bias = self.table(places[:, None] - places + LENGTH - 1).squeeze(-1).unsqueeze(0)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-2, -1) / D**0.5 + bias).softmax(-1) @ v)
        return x + self.mlp(x), Shared(bias) if self.within else bias


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.square()


class LM(nn.Module):
    def __init__(self, tied: bool = False, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Parameter(torch.randn(LENGTH, D) * 0.1)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(D)
        self.head = nn.Linear(D, WORDS, bias=False)
        self.unused = nn.Linear(D, D)  # by half of the ranks
        self.checkpointed, self.reentrant, self.fused, self.spanned = checkpointed, reentrant, False, False
        if tied:
            self.head.weight = self.words.weight

    def all_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block(x) * self.places.sigmoid(), x, use_reentrant=False)
        return x

    def forward(self, tokens: Tensor, extra: bool = False) -> Tensor:
        x = self.words(tokens) + self.places
        bias: Any = None
        if self.spanned:
            x = checkpoint(self.all_blocks, x, use_reentrant=False)
        for block in () if self.spanned else self.blocks:
            if isinstance(block, Biased):
                x, bias = block(x, bias)
                continue
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpointed else block(x)
        x = self.norm(x + self.unused(x) if extra else x)
        if self.fused:  # losses [B]
            return linear_cross_entropy(x, self.head.weight, tokens.roll(-1, 1))
        return self.head(x)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, half: bool) -> None:
        super().__init__()
        self.base, self.half = base.bfloat16() if half else base, half
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.half:
            return self.base(x) + self.b(self.a(x))
        weight, bias = self.base.weight.to(x.dtype), self.base.bias.to(x.dtype)  # no 16-bit products, which round by B
        return F.linear(x, weight, bias) + self.b(self.a(x))


def build(kind: str = "") -> LM:
    """kind: of "tied", "checkpointed", "reentrant", "lora", "frozen", "derived", "biased", "dataclass" and "fused" what
    its words say; "spanned": checkpointed regions within one that spans all blocks; "half": frozen layers of 16 bits.
    """
    torch.manual_seed(0)
    model = LM("tied" in kind, "checkpointed" in kind or "reentrant" in kind, "reentrant" in kind)
    model.fused, model.spanned = "fused" in kind, "spanned" in kind
    if "biased" in kind:
        model.blocks = nn.ModuleList(Biased(place == 0, "dataclass" in kind) for place in range(2))
    if "derived" in kind:
        for block in model.blocks:
            nn.utils.parametrizations.weight_norm(block.mlp[0])
            nn.utils.parametrize.register_parametrization(block.out, "weight", Doubled())
    if "lora" in kind:
        model.requires_grad_(False)
        for block in model.blocks:
            block.qkv, block.mlp[0] = (LoRA(layer, "half" in kind) for layer in (block.qkv, block.mlp[0]))
            for part in (block.qkv, block.mlp[0]):
                part.a.requires_grad_(True)
                part.b.requires_grad_(True)
    if "frozen" in kind:
        model.words.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
    return model


def loss_of(model: nn.Module, tokens: Tensor, total: bool = False, **options: Any) -> Tensor:
    out = model(tokens, **options)
    losses = out
    if out.dim() == 3:
        losses = F.cross_entropy(out.transpose(1, 2), tokens.roll(-1, 1), reduction="none").mean(1)
    return losses.mean() if len(losses) and not total else losses.sum()


def batch(number: int, size: int) -> Tensor:
    return torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(number))


def adamw(model: nn.Module, kind: Any = fastdp.DPAdamW, **options: Any) -> Any:
    given = {
        "lr": 1e-2,
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        "expected_batch_size": 6,
        "sample_rate": 0.1,
        "accountant": "rdp",
    }
    return kind(model, **{**given, **options})


def compare(
    rank: int,
    world: int,
    kind: str = "",
    sizes: Any = None,
    wrap: Any = DistributedDataParallel,
    accumulate: int = 1,
    sigma: float = 0.0,
    steps: int = 3,
    extra: Any = None,
    norm: float = 0.5,
    build: Any = build,
    loss: Any = loss_of,
    batch: Any = batch,
    mesh: Any = None,
    around: Any = contextlib.nullcontext,
    seed: int = 5,
    **options: Any,
) -> tuple[float, float, float, float]:
    """Three steps of AdamW in several processes, and in this one on the union of their batches.

    sizes: of each step, the number of samples of each rank. extra: of a rank, whether its batches use one layer more.
    rank, world: of those who have samples of their own, along this mesh. around: loss and backward of the several.
    seed: of noise that leaves no sum at the middle of two multiples of its grid, where it counts in which order
    gradients are added.

    Returns the largest relative error of a norm, of a weight, and epsilon of both.
    """
    sizes, rows = sizes or [[3] * world] * steps, options.get("rows_per_sample", 1)
    shared = dict(lr=1e-2, eps=1e-3, noise_multiplier=sigma, max_grad_norm=norm, seed=seed, sample_rate=0.1,
                  expected_batch_size=3 * world * accumulate, accountant="rdp", **options)  # fmt: skip
    several, one = wrap(build(kind)), build(kind)
    optimizer = fastdp.DPAdamW(several, mesh=mesh, **shared)
    with single():
        truth = fastdp.DPAdamW(one, **shared)
    worst, total = 0.0, {"total": True} if options.get("loss_reduction") == "sum" else {}
    for step, row in enumerate(sizes):
        for part in range(accumulate):
            batches = [batch(1000 * step + 10 * r + 100 * part, n * rows) for r, n in enumerate(row)]
            uses = {} if extra is None else {"extra": extra(rank)}
            with around():
                loss(several, batches[rank], **total, **uses).backward()
            with single():
                if extra is None:
                    loss(one, torch.cat(batches), **total).backward()
                else:
                    for r, own in enumerate(batches):
                        loss(one, own, extra=extra(r)).backward()
            if extra is None:
                begin = sum(row[:rank])
                mine, theirs = optimizer.norms, truth.norms
                groups = [(mine, theirs)] if isinstance(mine, Tensor) else [(mine[k], theirs[k]) for k in mine]
                for a, b in groups:
                    b = b[begin : begin + row[rank]]
                    worst = max([worst, *((a - b).abs() / b.clamp(min=1e-3)).tolist()])
        optimizer.step()
        optimizer.zero_grad()
        with single():
            truth.step()
        truth.zero_grad()
    error = max(float((whole(p) - q).abs().max()) for p, q in zip(several.parameters(), one.parameters(), strict=True))
    found = worst, error, optimizer.epsilon(1e-5) if sigma else 0.0, truth.epsilon(1e-5) if sigma else 0.0
    optimizer.detach()
    truth.detach()
    return found


@torch.no_grad()
def whole(parameter: Tensor) -> Tensor:
    """Of all ranks' parts; all must ask."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


class single:
    """Within it, torch.distributed says that there is one process."""

    def __enter__(self) -> None:
        import fastdp.distributed.world as world

        self._world, self._was = world, world.processes
        world.processes = lambda: 1

    def __exit__(self, *_: object) -> None:
        self._world.processes = self._was
