"""Mixtures of experts for `benchmarks.training`: one Mixtral-like block, its experts written in the usual ways.

8 experts, 2 for each token, d = 512, hidden 1024, 64 tokens, 8 samples. `moe-dense` computes the same function with
every expert on every token, in separate modules of nn.Linear: the only form that Opacus can take (a module that gets
tokens of several samples at once has, to its hooks, as many samples as tokens), at four times the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .models import Workload, class_losses

D, HIDDEN, EXPERTS, EACH, TOKENS, HEADS = 512, 1024, 8, 2, 64, 8


class Stacked(nn.Module):
    """Experts as two stacks: gate and up [E, 2h, d], down [E, d, h]."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * hidden, d) * d**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, d, hidden) * hidden**-0.5)


class Eager(Stacked):
    """A loop over the experts that got a token."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(x[token], self.up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, place, None]
            out.index_add_(0, token, y)
        return out


class Grouped(Stacked):
    """Rows sorted by expert, and a grouped product."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, order = torch.sort(chosen.flatten(), stable=True)
        ends = torch.bincount(ids, minlength=EXPERTS).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // EACH], self.up.mT, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // EACH, y)


class Dense(nn.Module):
    """Every expert on every token, in modules."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.gates, self.ups = (nn.ModuleList(nn.Linear(d, hidden, bias=False) for _ in range(EXPERTS)) for _ in "gu")
        self.downs = nn.ModuleList(nn.Linear(hidden, d, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        share = torch.zeros(*chosen.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)
        out = torch.zeros_like(x)
        for number, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            out = out + down(F.silu(gate(x)) * up(x)) * share[..., number, None]
        return out


class Block(nn.Module):
    """Attention, then experts, then a classifier of the mean token."""

    def __init__(self, kind: Callable[[int, int], nn.Module], d: int = D, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.flat = kind is not Dense
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.router = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, EXPERTS, bias=False)
        self.experts, self.head = kind(d, hidden), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        tokens = self.norm2(x)
        tokens = tokens.flatten(0, 1) if self.flat else tokens
        weights, chosen = self.router(tokens).softmax(-1).topk(EACH, dim=-1)
        y = self.experts(tokens, chosen, weights / weights.sum(-1, keepdim=True))
        return self.head((x + y.view_as(x)).mean(1))


def _workload(kind: Callable[[int, int], nn.Module], d: int = D, hidden: int = HIDDEN, tokens: int = TOKENS,
              small: Workload | None = None) -> Workload:  # fmt: skip
    def batch(b: int) -> tuple[Tensor, Tensor]:
        return torch.randn(b, tokens, d), torch.randint(0, 10, (b,))

    return Workload(lambda: Block(kind, d, hidden), batch, class_losses, 8, small)


MOE = {
    f"moe-{kind.__name__.lower()}": _workload(kind)
    for kind in (Eager, Grouped, Dense)
}  # fmt: skip
