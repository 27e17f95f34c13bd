"""Sums of squares and weighted sums of stored rows by Triton's kernels, and sizes of products, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from .by_triton import serve_by_triton
from .kernels_truth import DEVICE, DTYPES, numbers, poisoned

pytest.importorskip("triton")
from fastdp.kernels import linear, rows

from fastdp.ops import bounds

KINDS = [*DTYPES, torch.float64]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(3,), (2, 7), (3, 1023), (2, 17, 61), (1, 40_001)])
def test_square_sum(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PART", 2048)
    x = numbers(*shape, dtype=dtype)
    found = rows.square_sum(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, x.double().reshape(shape[0], -1).square().sum(1), rtol=1e-12, atol=0)


def test_squares_neither_vanish_nor_overflow() -> None:
    x = numbers(4, 1500)
    x[1], x[2] = x[1] * 1e-30, x[2] * 1e30
    torch.testing.assert_close(rows.square_sum(x), x.double().square().sum(1), rtol=1e-12, atol=0)
    x[3, 7] = math.inf
    assert rows.square_sum(x).isfinite().tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(3,), (5, 7), (3, 1025), (4, 17, 61)])
def test_weighted_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, c = numbers(*shape, dtype=dtype), torch.linspace(0.1, 1.7, 2 * shape[0], device=DEVICE)[::2]
    exact = torch.einsum("b,b...->...", c.double(), x.double())
    found = rows.weighted_sum(x, c)
    assert found.shape == shape[1:] and found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=4e-6)


def test_dropped_rows_are_not_read_as_numbers() -> None:
    x, c = numbers(4, 33), torch.tensor([0.5, 0.0, -0.0, 2.0], device=DEVICE)
    clean = rows.weighted_sum(x, c)
    x[1], x[2, 5] = math.nan, math.inf
    assert torch.equal(rows.weighted_sum(x, c), clean)
    c[1] = 1
    assert not rows.weighted_sum(x, c).isfinite().any()


def test_rows_lie_as_they_lie() -> None:
    """Neither transposed gradients nor expanded ones are copied, nor do they come out in another order."""
    x, c = numbers(3, 20, 31), torch.tensor([0.5, 2.0, 1.0], device=DEVICE)
    for y in (x.mT, x.mT.contiguous().mT, x[:, ::2], x[:1].expand(3, -1, -1), x.transpose(0, 1)[:3]):
        torch.testing.assert_close(rows.square_sum(y), y.double().square().sum((1, 2)), rtol=1e-12, atol=0)
        want = torch.einsum("b,bij->ij", c.double(), y.double())
        torch.testing.assert_close(rows.weighted_sum(y, c).double(), want, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- sizes of products


def bound_of(a: torch.Tensor, g: torch.Tensor, method: str, units: float = 1.0) -> torch.Tensor:
    found, bound = linear.linear_norm_sq_and_bound(a, g, method, units, math.inf)
    assert bound is not None and found.dtype == bound.dtype == torch.float64
    plain = linear.linear_norm_sq(a, g, method, dtype=torch.float64)
    assert torch.equal(found, plain), "a bound that never enlarges changes nothing"
    return bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize(("t", "i", "o"), [(2, 5, 9), (37, 50, 37), (70, 16, 33)])
def test_sizes(t: int, i: int, o: int, method: str, dtype: torch.dtype) -> None:
    """sum_t |a_t| |g_t|, from the diagonal of what the gram route has in hand, else by one read: never too small."""
    a, g = numbers(3, t, i, dtype=dtype), numbers(3, t, o, dtype=dtype, seed=1)
    want = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    found = bound_of(a, g, method)
    assert bool((found >= want).all()) and bool((found <= want * (1 + 5e-5)).all()), (found / want - 1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_alone(dtype: torch.dtype) -> None:
    """Of any strides, of one position, of nothing; neither lost nor infinite where squares of float32 are."""
    for t in (1, 15, 16, 17, 40):
        a, g = numbers(3, t, 37, dtype=dtype), numbers(3, 50, t, dtype=dtype, seed=1).mT
        want = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
        torch.testing.assert_close(linear.sizes(a, g), want, rtol=1e-12, atol=0)
    assert linear.sizes(a[:, :0], g[:, :0]).tolist() == [0, 0, 0] and not linear.sizes(a[:0], g[:0]).numel()
    single = numbers(2, 5, 6) * torch.tensor([1e-30, 1e30], device=DEVICE)[:, None, None]
    want = single.double().square().sum((1, 2))
    torch.testing.assert_close(linear.sizes(single, single), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_are_the_same_by_the_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a, g = numbers(3, 20, 37, dtype=dtype), numbers(3, 20, 9, dtype=dtype, seed=1)
    ids = torch.arange(20, device=DEVICE).expand(3, -1) % 7
    starts = torch.tensor([0, 3, 3, 15, 16], device=DEVICE)

    def found() -> list[torch.Tensor | None]:
        rows = a.flatten(0, 1), g.flatten(0, 1)
        return [bounds.of_products(a, g), bounds.of_repeats(ids, g), bounds.of_segments(*rows, starts, 2)]

    plain = found()
    serve_by_triton(monkeypatch)
    for one, other in zip(found(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["gram", "direct"])
def test_norms_are_enlarged_where_the_sum_may_be_off(method: str) -> None:
    """By what `bounds` says in float64, and by nothing where terms do not cancel."""
    a, g = numbers(2, 1, 24).expand(2, 40, 24).contiguous(), numbers(2, 40, 20)
    g[0, -1] -= g[0].sum(0)  # equal inputs, output gradients that add up to almost nothing
    exact = torch.einsum("bti,bto->boi", a.double(), g.double()).square().sum((1, 2))
    units = bounds.units_of_products(a, g)
    norm_sq, _ = linear.linear_norm_sq_and_bound(a, g, method, units, bounds.TOLERANCE)
    want = bounds.enlarged(exact, bounds.of_products(a, g))
    assert want[0] > 4 * exact[0] and want[1] == exact[1]
    assert bool((norm_sq >= want * (1 - 1e-5)).all())
    torch.testing.assert_close(norm_sq[1], exact[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-19, 1e-21, 1e-30])
@pytest.mark.parametrize("side", [0, 1])
def test_what_underflow_takes_is_put_back(side: int, scale: float) -> None:
    """Squares of these are lost in float32, on either side: the norm is too large rather than too small."""
    sides = [numbers(2, 20, 18), numbers(2, 20, 20, seed=1)]
    sides[side] = sides[side] * scale
    truth = torch.einsum("bti,bto->boi", *(x.double() for x in sides)).square().sum((1, 2))
    assert bool((linear.linear_norm_sq(*sides, "gram", dtype=torch.float64) >= truth).all())
