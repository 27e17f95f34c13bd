"""Bounds of what rounding does to float32 sums: never below it, nothing where there is no sum, and close to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastdp.ops import bounds

UNIT = 2.0**-24


def alike(*shape: int) -> Tensor:
    """One row again and again, which is rounded alike, and half of them taken back."""
    sign = torch.where(torch.arange(shape[-2]) < shape[-2] / 2, 1.0, -1.0).unsqueeze(1)
    return torch.randn(*shape[:-2], 1, shape[-1]) * sign


def cancelling(*shape: int) -> Tensor:
    """Rows whose sum is a thousandth of each."""
    rows = torch.randn(shape)
    rows[..., -1, :] -= rows.sum(-2) * (1 - 1e-3)
    return rows


ROWS: list[Callable[..., Tensor]] = [torch.randn, alike, cancelling]


def one_by_one(terms: Tensor) -> Tensor:
    """The sum over the second dimension in float32, a term at a time: [B,T,...] -> [B,...]."""
    total = torch.zeros_like(terms[:, 0])
    for t in range(terms.size(1)):
        total += terms[:, t]
    return total


def off(found: Tensor, exact: Tensor) -> Tensor:
    """How far each sample's sum is off, [B]."""
    return (found.double() - exact).flatten(1).norm(dim=1)


@pytest.mark.parametrize("make", ROWS)
@pytest.mark.parametrize(("t", "i", "o"), [(2, 5, 7), (40, 30, 1), (300, 1, 6), (700, 20, 24)])
def test_products_are_off_by_less_than_is_said(make: Callable[..., Tensor], t: int, i: int, o: int) -> None:
    torch.manual_seed(t)
    a, g = make(3, t, i), torch.randn(3, 1, o).abs() * torch.tensor([1e-6, 1.0, 1e6]).view(3, 1, 1)
    g = g.expand(3, t, o).contiguous()
    bound = bounds.of_products(a, g)
    assert bound is not None and bound.dtype == torch.float64
    exact = g.double().mT @ a.double()
    assert (off(torch.bmm(g.mT, a), exact) <= bound).all()
    sizes = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    assert (bound <= (2 + t / 10) * UNIT * sizes).all(), "of no use if it were larger"
    turned = bounds.of_products(a.mT.contiguous().mT, g.mT.contiguous().mT)
    torch.testing.assert_close(turned, bound)


def test_types_have_units_of_their_own() -> None:
    a, g = torch.randn(2, 9, 4, dtype=torch.float64), torch.randn(2, 9, 3, dtype=torch.float64)
    wide, single = bounds.of_products(a, g), bounds.of_products(a.float(), g.float())
    torch.testing.assert_close(wide * 2.0**29, single, rtol=1e-6, atol=0)
    short = bounds.of_products(a.bfloat16(), g.bfloat16())  # multiplied and added as float32
    torch.testing.assert_close(short, bounds.of_products(a.bfloat16().float(), g.bfloat16().float()))
    pairs = bounds.of_products(torch.complex(a, a), torch.complex(g, g))
    torch.testing.assert_close(pairs, 2 * wide)
    assert bounds.unit(torch.zeros(1, dtype=torch.float16)) == bounds.unit(torch.zeros(1)) == UNIT


def test_where_there_is_no_sum_there_is_no_bound() -> None:
    assert bounds.of_products(torch.randn(3, 1, 4), torch.randn(3, 1, 5)) is None
    for a, g in (((0, 5, 3), (0, 5, 4)), ((2, 0, 3), (2, 0, 4)), ((2, 5, 0), (2, 5, 4))):
        assert bounds.of_products(torch.randn(a), torch.randn(g)) is None
    assert bounds.of_repeats(torch.arange(20).expand(2, 20), torch.randn(2, 20, 3)) is None
    assert bounds.of_repeats(torch.zeros(2, 1, dtype=torch.long), torch.randn(2, 1, 3)) is None
    assert bounds.added(None, None) is None
    found = bounds.added(None, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]))
    assert found is not None and found.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("make", ROWS)
@pytest.mark.parametrize("count", [2, 30, 400])
def test_rows_of_equal_ids_are_off_by_less_than_is_said(make: Callable[..., Tensor], count: int) -> None:
    torch.manual_seed(count)
    g = make(2, count, 6)
    ids = torch.stack([torch.zeros(count, dtype=torch.long), torch.randint(0, 3, (count,))])
    bound = bounds.of_repeats(ids, g)
    assert bound is not None
    for b in range(2):
        found, exact = torch.zeros(3, 6), torch.zeros(3, 6, dtype=torch.float64)
        for k in range(count):
            found[ids[b, k]] += g[b, k]
            exact[ids[b, k]] += g[b, k].double()
        assert float((found.double() - exact).norm()) <= bound[b] <= bounds.of_rows(g)[b] * (1 + 1e-6)
    assert (off(one_by_one(g), g.double().sum(1)) <= bounds.of_rows(g)).all()
    order = torch.randperm(count)
    torch.testing.assert_close(bounds.of_repeats(ids[:, order], g[:, order]), bound)


def test_ordinary_ids_make_no_difference() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (3, 100))
    assert float((bounds.of_repeats(ids, torch.randn(3, 100, 8)) / 30).max()) < 1e-6


@pytest.mark.parametrize("make", ROWS)
def test_segments_are_off_by_less_than_is_said(make: Callable[..., Tensor]) -> None:
    """Two matrices, three samples, of which one has no row at the second."""
    torch.manual_seed(0)
    counts = [3, 1, 40, 0, 25, 7]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    a, g = (torch.cat([make(1, n, width)[0] for n in counts if n] + [torch.full((2, width), torch.nan)])
            for width in (9, 5))  # fmt: skip
    bound = bounds.of_segments(a, g, starts, 3)
    error = torch.zeros(3, dtype=torch.float64)
    for number, (low, high) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        rows, outs = a[low:high], g[low:high]
        error[number % 3] += (outs.mT @ rows - outs.double().mT @ rows.double()).square().sum()
    assert bound.isfinite().all(), "rows of no matrix count nothing"
    assert (error.sqrt() <= bound).all()
    assert (bound < 1e-3).all() and bound.min() > 0


def test_a_small_segment_beside_large_ones_keeps_its_bound() -> None:
    """Each is summed on its own: a difference of running sums would lose it."""
    rows = torch.ones(7, 4) * torch.tensor([1e18, 1e18, 1e-9, 1e-9, 1e18, 1e18, torch.nan]).unsqueeze(1)
    starts = torch.tensor([0, 2, 4, 4, 6])
    found = bounds.of_segments(rows, rows, starts, 4)
    small = bounds.of_segments(rows[2:4], rows[2:4], torch.tensor([0, 2]), 1)
    assert found[1] == small[0] > 0 and found[2] == 0 and found[0] == found[3]
    assert torch.equal(found, bounds.of_segments(rows, rows, starts, 4))


def test_sums_in_blocks_are_no_further_off_than_a_block() -> None:
    assert bounds.roundings(10**6) == bounds.roundings(bounds.BLOCK)
    assert bounds.roundings(10**6, blocks=False) > 100 * bounds.roundings(bounds.BLOCK)
    thin, wide = (bounds.units_of_products(torch.zeros(1, 2000, 4), torch.zeros(1, 2000, o)) for o in (1, 4))
    assert thin > 3 * wide, "a product of vectors is added term by term"


def test_norms_are_enlarged_by_a_bound_that_is_not_small() -> None:
    squares = torch.tensor([4.0, 4.0, 0.0, float("inf"), float("nan")], dtype=torch.float64)
    bound = torch.tensor([1.0, 1e-6, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = bounds.enlarged(squares, bound)
    assert abs(float(found[0]) - 9) < 1e-3 and float(found[1]) == 4 and float(found[2]) == 1
    assert not bool(torch.isfinite(found[3:]).any()), "such samples are dropped"
    assert not bounds.is_small(squares[:1], bound[:1]) and bounds.is_small(squares[1:2], bound[1:2])
    assert bounds.enlarged(squares, None) is squares
