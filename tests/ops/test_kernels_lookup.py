"""Norms and sums of a table's gradient, and clip factors, by the Triton kernels that serve a GPU without nvcc."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastdp.ops import clip as plain_clip
from fastdp.ops import embedding as plain

from .kernels_truth import DEVICE

pytest.importorskip("triton")
from fastdp.kernels import clip, lookup

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def data(words: int, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(words)
    batch, k, d = shape
    ids = torch.randint(0, words, (batch, k), generator=generator)
    g = torch.randn(batch, d, k, generator=generator).to(dtype).to(DEVICE).mT  # rows that are strided
    c = torch.rand(batch, generator=generator)
    c[0] = 0
    return ids.to(DEVICE), g, c.to(DEVICE)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("words", "shape"), [(5, (3, 7, 20)), (1, (2, 90, 3)), (400, (3, 70, 300)), (3, (1, 1, 1))])
@pytest.mark.parametrize("padding", [None, 0])
def test_lookups(dtype: torch.dtype, words: int, shape: tuple[int, int, int], padding: int | None) -> None:
    ids, g, c = data(words, shape, dtype)
    exact = g.double()
    found = lookup.embedding_norm_sq(ids, g, padding, dtype=torch.float64)
    torch.testing.assert_close(found, plain._norm_sq(ids, exact, padding), rtol=1e-12, atol=0)
    g[0] = math.nan  # of a sample with the factor 0
    wanted = plain._clipped_sum(ids, g.double(), c.double(), words, padding)
    total = lookup.embedding_clipped_sum(ids, g, c, words, padding)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(lookup.embedding_clipped_sum(ids, g, c, words, padding), total)
    more = torch.ones_like(total)
    lookup.add_embedding_clipped_sum(ids, g, c, words, padding, out=more)
    torch.testing.assert_close(more, total + 1)


def test_one_id_over_many_programs() -> None:
    """Padding that is trained: the program of its first position goes through it."""
    ids = torch.zeros(2, 150, dtype=torch.int64, device=DEVICE)
    ids[:, 140:] = torch.arange(10, device=DEVICE) + 3
    g, c = torch.randn(2, 150, 5, device=DEVICE), torch.tensor([1.0, 0.5], device=DEVICE)
    found = lookup.embedding_clipped_sum(ids, g, c, 20)
    torch.testing.assert_close(found, plain._clipped_sum(ids, g, c, 20), rtol=1e-5, atol=1e-5)


def test_nothing_to_look_up() -> None:
    ids, g = torch.zeros(2, 0, dtype=torch.int64, device=DEVICE), torch.zeros(2, 0, 3, device=DEVICE)
    assert torch.equal(lookup.embedding_norm_sq(ids, g), torch.zeros(2, device=DEVICE))
    assert not lookup.embedding_clipped_sum(ids, g, torch.ones(2, device=DEVICE), 4).any()


NUMBERS = [0.0, 1e-45, 1e-40, 2.0**-101, 2.0**-99, 1e-30, 0.9999, 1.0, 2.25, 2.2500001, 1e20, 3e38, math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "gamma"), [("local", 0.01), ("global", 0.01), ("automatic", 0.01), ("automatic", 0.0)]
)
@pytest.mark.parametrize("limit", [1.5, 1e-30])
def test_clip_factors_are_those_of_the_reference(dtype: torch.dtype, kind: str, gamma: float, limit: float) -> None:
    norm_sq = torch.tensor(NUMBERS * 12, dtype=dtype, device=DEVICE)
    found, wanted = clip.clip_factors(norm_sq, limit, kind, gamma), plain_clip._factors(norm_sq, limit, kind, gamma)
    torch.testing.assert_close(found, wanted, rtol=2e-7, atol=0)
    bound = found.double() * norm_sq.double().sqrt()
    assert bool((bound[found > 0] <= limit).all()) or kind == "automatic"


def test_clip_factors_of_nothing_and_of_nonsense() -> None:
    assert clip.clip_factors(torch.empty(0, device=DEVICE), 1.0).shape == (0,)
    for wrong in (lambda x: clip.clip_factors(x, 0.0), lambda x: clip.clip_factors(x, 1.0, "none")):
        with pytest.raises(ValueError):
            wrong(torch.ones(2, device=DEVICE))
