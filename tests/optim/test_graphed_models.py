"""Replayed steps of models with one trait each: bit-equal with the eager ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .test_graphed import B, assert_equal, eagerly, pair

pytestmark = pytest.mark.slow  # `make test-all` runs it

D, T = 6, 5


class Trait(nn.Module):
    """A forward to choose, from [B,T,D] to three classes."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(D, D) / 2)
        self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.up, self.table = nn.ConvTranspose1d(D, D, 2, stride=2), nn.Embedding(7, D, padding_idx=0)
        self.head, self.own = nn.Linear(D, 3), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.own(self, x).mean(1))


def tied(m: Trait, x: Tensor) -> Tensor:
    return torch.tanh(x @ m.w) @ m.w.T


def masked_attention(m: Trait, x: Tensor) -> Tensor:
    padding = x[..., 0] < -1
    padding = padding & ~padding.all(1, keepdim=True)
    return m.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def looked_up(m: Trait, x: Tensor) -> Tensor:
    return m.table((x[..., 0] * 2).long().clamp(-3, 3) + 3) + m.table(torch.arange(x.size(1)))


def in_place(m: Trait, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[:, 1:] += x[:, :-1]
    h[..., 0].mul_(2)
    return F.relu(h, inplace=True)


def looped(m: Trait, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t in range(x.size(1)):
        h = torch.tanh(x[:, t] @ m.w + m.linear(h))
    return h.unsqueeze(1)


TRAITS: dict[str, Callable[[Trait, Tensor], Tensor]] = {
    "tied": tied,
    "masked attention": masked_attention,
    "looked up": looked_up,
    "in place": in_place,
    "looped": looped,
    "transposed convolution": lambda m, x: m.up(x.mT).mT,
    "pooled, channels last": lambda m, x: F.adaptive_avg_pool1d(m.linear(x).mT, 1).mT,
    "sorted": lambda m, x: m.linear(x.sort(1).values).topk(2, 1).values,
    "chosen by data": lambda m, x: torch.where(x.mean(1, keepdim=True) > 0, m.linear(x), m.norm(x)),
}


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def data(seed: int, size: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, T, D, generator=generator), torch.randint(0, 3, (size,), generator=generator)


@pytest.mark.parametrize("name", TRAITS)
def test_a_trait_is_replayed_bit_by_bit(name: str) -> None:
    (one, first), (two, second) = pair(lambda: Trait(TRAITS[name]), clipping="local", max_grad_norm=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = second.graphed(losses, data(99), sizes=(4, B))
        for k in range(4):
            assert torch.equal(eagerly(one, first, data(k)), step(*data(k)))
            assert torch.equal(first.norms, second.norms)
            assert_equal(one, two)
        step(*data(7, 3))
        eagerly(one, first, data(7, 3))
    torch.testing.assert_close(first.norms, second.norms)
    assert (step.replayed, step.eager) == (5, 0)
