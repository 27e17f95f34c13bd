"""Sums by segment by Triton's kernel, whatever the lengths of segments, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastdp.ops import routed
from fastdp.ops.registry import OPERATORS

from .by_triton import launches, serve_by_triton
from .kernels_truth import DEVICE, DTYPES, check_close, check_norms, numbers, poisoned
from .test_routed import SIZES, rows, squares, truth

pytest.importorskip("triton")
from fastdp.kernels import segments
from fastdp.kernels.common import Tile

SMALL = Tile(16, 32, 16, 4, 2)
LENGTHS = [[7], [0, 0, 40], [40, 0, 0], [1] * 9, [100, 1, 0, 3, 17, 16, 15], [0, 0], [3, 0, 33]]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def each(a: Tensor, g: Tensor, lengths: list[int], factors: Tensor | None = None) -> Tensor:
    """[K,O,I] float64, row by row."""
    out = torch.zeros(len(lengths), g.size(1), a.size(1), dtype=torch.float64, device=a.device)
    row = 0
    for k, length in enumerate(lengths):
        for _ in range(length):
            if factors is None or factors[row] != 0:
                c = 1.0 if factors is None else float(factors[row])
                out[k] += c * torch.outer(g[row].double(), a[row].double())
            row += 1
    return out


def data(lengths: list[int], dtype: torch.dtype, behind: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """a, g, starts; with rows behind the last segment, which count nowhere."""
    size = sum(lengths) + behind
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    a, g = numbers(size, 37, dtype=dtype), numbers(size, 50, dtype=dtype, seed=1)
    if behind:
        a[-behind:] = math.nan
    return a, g, starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("tile", [SMALL, None])
def test_norms_and_sums(tile: Tile | None, lengths: list[int], dtype: torch.dtype) -> None:
    a, g, starts = data(lengths, dtype, behind=5)
    exact = each(a, g, lengths)
    norms = segments.norm_sq(a, g, starts, tile=tile)
    assert norms.dtype == torch.float64
    check_norms(norms, exact, exact.float().flatten(1).square().sum(1))
    into = torch.full((len(lengths), 37, 50), math.nan, device=DEVICE).mT  # strides that are not the result's
    assert segments.overwrite_sums(a, g, starts, into, tile=tile) is into
    check_close(into, exact, exact.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS[2:5])
def test_factors_by_row(lengths: list[int], dtype: torch.dtype) -> None:
    """In float32, whatever the rows are; those of factor 0 are not read as numbers."""
    a, g, starts = data(lengths, dtype)
    c = torch.linspace(0.1, 1 + 2**-9, len(a), device=DEVICE)
    c[1::4] = 0
    exact = each(a, g, lengths, c)
    a[1], g[5:6] = math.nan, math.inf
    into = torch.empty(len(lengths), 50, 37, device=DEVICE)
    segments.overwrite_sums(a, g, starts, into, c)
    check_close(into, exact, exact.float())
    alone = torch.full((1, 50, 37), math.nan, device=DEVICE)
    row = torch.tensor([0, 1], device=DEVICE)
    segments.overwrite_sums(a[:1], g[:1], row, alone, torch.tensor([1 + 2**-9], device=DEVICE))
    size = (a[0].double().norm() * g[0].double().norm()) * (1 + 2**-9)
    assert abs(alone.double().norm() / size - 1) < 1e-6


def test_long_segments_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "chunk_of", lambda x: 32)
    lengths = [70, 33]
    a, g, starts = data(lengths, torch.bfloat16)
    exact = each(a, g, lengths)
    check_norms(segments.norm_sq(a, g, starts, tile=SMALL), exact, exact.float().flatten(1).square().sum(1))


def test_a_bad_row_stays_in_its_segment() -> None:
    a, g, starts = data([5, 20, 4], torch.bfloat16)
    before = segments.norm_sq(a, g, starts)
    a[7, 3] = math.nan
    after = segments.norm_sq(a, g, starts)
    assert not after[1].isfinite() and torch.equal(before[[0, 2]], after[[0, 2]])


@pytest.mark.skipif(DEVICE == "cuda", reason="runs in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_operators(size: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one launch for all norms of a stack of experts, and one for their sums."""
    serve_by_triton(monkeypatch)
    monkeypatch.setattr(routed, "_by_tiles", lambda a, g, batch: batch > 0 and a.numel() > 0 and g.numel() > 0)
    given, (experts, batch) = rows(size, dtype), size[3:]
    exact, c = truth(*given, experts, batch), torch.rand(batch)
    reference = {name: OPERATORS[name].reference for name in ("routed_norm_sq", "routed_clipped_sum")}
    with launches() as found:
        norms = reference["routed_norm_sq"](*given, experts, batch, dtype=torch.float64)
        total = reference["routed_clipped_sum"](*given, c, experts)
    if given[0].numel() and given[1].numel() and batch:
        assert found["segment_kernel"] == 2 and found.total() <= 3, dict(found)
    torch.testing.assert_close(norms, squares(exact), rtol=2e-5, atol=0)
    torch.testing.assert_close(total.double(), torch.einsum("b,beoi->eoi", c.double(), exact), rtol=1e-5, atol=1e-4)
