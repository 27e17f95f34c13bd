"""What rounding does to float32 sums: bounds that are never below it and close to it, and norms that hold it."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random as random_numbers

import pytest
import torch
from torch import Tensor

from fastdp.ops import bounds, conv, conv_norm_sq, embedding_norm_sq, linear_clipped_sum, linear_norm_sq, routed_norm_sq
from fastdp.ops.common import MARGIN
from fastdp.ops.geometry import geometry_of
from fastdp.ops.linear import METHODS, clipped_sums, norm_sq_and_bound
from fastdp.ops.routed import longest_gram

from .backends import BACKENDS, CPU, TRITON, random
from .table import (
    FAMILIES,
    assert_norms,
    conv_data,
    conv_gradients,
    linear_data,
    linear_gradients,
    lookup_data,
    lookup_gradients,
    routed_gradients,
    squares,
)

pytestmark = pytest.mark.slow  # `make test-all` runs it

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


Make = Callable[..., Tensor]
BY_ROWS = pytest.mark.parametrize("make", [torch.randn, alike, cancelling])


def off(found: Tensor, exact: Tensor) -> Tensor:
    """How far each sample's sum is off, [B]."""
    return (found.double() - exact).flatten(1).norm(dim=1)


# ---------------------------------------------------------------------- bounds


@BY_ROWS
@pytest.mark.parametrize(("t", "i", "o"), [(2, 5, 7), (40, 30, 1), (300, 1, 6), (700, 20, 24)])
def test_products_are_off_by_less_than_is_said(make: Make, t: int, i: int, o: int) -> None:
    torch.manual_seed(t)
    a, g = make(3, t, i), torch.randn(3, 1, o).abs() * torch.tensor([1e-6, 1.0, 1e6]).view(3, 1, 1)
    g = g.expand(3, t, o).contiguous()
    bound = bounds.of_products(a, g)
    assert bound is not None and bound.dtype == torch.float64
    assert (off(torch.bmm(g.mT, a), g.double().mT @ a.double()) <= bound).all()
    sizes = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    assert (bound <= (2 + t / 10) * UNIT * sizes).all(), "of no use if it were larger"
    torch.testing.assert_close(bounds.of_products(a.double(), g.double()), bound * 2.0**-29, rtol=1e-6, atol=0)
    short = bounds.of_products(a.bfloat16(), g.bfloat16())  # multiplied and added as float32
    torch.testing.assert_close(short, bounds.of_products(a.bfloat16().float(), g.bfloat16().float()))


@BY_ROWS
@pytest.mark.parametrize("count", [2, 30, 400])
def test_rows_of_equal_ids_are_off_by_less_than_is_said(make: Make, count: int) -> None:
    torch.manual_seed(count)
    g = make(2, count, 6)
    ids = torch.stack([torch.zeros(count, dtype=torch.long), torch.randint(0, 3, (count,))])
    bound = bounds.of_repeats(ids, g)
    found, exact = torch.zeros(2, 3, 6), torch.zeros(2, 3, 6, dtype=torch.float64)
    for b in range(2):
        for k in range(count):  # one by one
            found[b, ids[b, k]] += g[b, k]
            exact[b, ids[b, k]] += g[b, k].double()
    assert bound is not None and (off(found, exact) <= bound).all()
    assert (bound <= bounds.of_rows(g) * (1 + 1e-6)).all()
    order = torch.randperm(count)
    torch.testing.assert_close(bounds.of_repeats(ids[:, order], g[:, order]), bound)


@BY_ROWS
def test_segments_are_off_by_less_than_is_said(make: Make) -> None:
    """Two matrices, three samples, of which one has no row at the second; rows of no matrix count nothing."""
    torch.manual_seed(0)
    counts = [3, 1, 40, 0, 25, 7]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    a, g = (torch.cat([make(1, n, width)[0] for n in counts if n] + [torch.full((2, width), torch.nan)])
            for width in (9, 5))  # fmt: skip
    bound, error = bounds.of_segments(a, g, starts, 3), torch.zeros(3, dtype=torch.float64)
    for number, (low, high) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        rows, outs = a[low:high], g[low:high]
        error[number % 3] += (outs.mT @ rows - outs.double().mT @ rows.double()).square().sum()
    assert (error.sqrt() <= bound).all() and (bound < 1e-3).all() and bound.min() > 0
    large = torch.ones(7, 4) * torch.tensor([1e18, 1e18, 1e-9, 1e-9, 1e18, 1e18, torch.nan]).unsqueeze(1)
    found = bounds.of_segments(large, large, torch.tensor([0, 2, 4, 4, 6]), 4)
    small = bounds.of_segments(large[2:4], large[2:4], torch.tensor([0, 2]), 1)
    assert found[1] == small[0] > 0 and found[2] == 0 and found[0] == found[3], "each is summed on its own"


def test_where_there_is_no_sum_there_is_no_bound() -> None:
    for a, g in (((3, 1, 4), (3, 1, 5)), ((0, 5, 3), (0, 5, 4)), ((2, 0, 3), (2, 0, 4)), ((2, 5, 0), (2, 5, 4))):
        assert bounds.of_products(torch.randn(a), torch.randn(g)) is None
    assert bounds.of_repeats(torch.arange(20).expand(2, 20), torch.randn(2, 20, 3)) is None
    assert bounds.added(None, None) is None
    found = bounds.added(None, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]))
    assert found is not None and found.tolist() == [1.5, 2.5]
    assert bounds.roundings(10**6) == bounds.roundings(bounds.BLOCK) < bounds.roundings(10**6, blocks=False) / 100
    thin, wide = (bounds.units_of_products(torch.zeros(1, 2000, 4), torch.zeros(1, 2000, o)) for o in (1, 4))
    assert thin > 3 * wide, "a product of vectors is added term by term"


def test_norms_are_enlarged_by_a_bound_that_is_not_small() -> None:
    norms = torch.tensor([4.0, 4.0, 0.0, math.inf, math.nan], dtype=torch.float64)
    bound = torch.tensor([1.0, 1e-6, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = bounds.enlarged(norms, bound)
    assert abs(float(found[0]) - 9) < 1e-3 and float(found[1]) == 4 and float(found[2]) == 1
    assert not bool(torch.isfinite(found[3:]).any()), "such samples are dropped"
    assert not bounds.is_small(norms[:1], bound[:1]) and bounds.is_small(norms[1:2], bound[1:2])


# ---------------------------------------------------------------------- norms of operators


@pytest.mark.parametrize("backend", CPU, indirect=True)
@pytest.mark.parametrize("side", [20, 120])
def test_constant_data_does_not_shrink(backend: str, side: int) -> None:
    """Rounding in one direction: a long float32 sum of equal terms loses far more than a random one."""
    for value in (0.1, 1 / 3, 0.7071):
        shape = ((1, 16, side, side), 8, 3, 1, 1, 1, 1)
        data = tuple(torch.full_like(t, value) if isinstance(t, Tensor) else t for t in conv_data(shape))
        ratio = conv_norm_sq(*data, "direct", dtype=torch.float64) / squares(conv_gradients(*data))
        assert abs(float(ratio) - 1) < 4e-6, (value, ratio)  # 3.2e-6 MEASURED: summands of one sign
    a, g = torch.full((1, 600, 4000), 0.3), torch.full((1, 600, 50), 0.3)
    exact = float(torch.tensor(0.3).double() ** 4) * 600**2 * 4000 * 50
    for method in ("gram", "direct") if backend == "C++" else ():  # clip factors allow for 4e-6 of the norm
        assert abs(float(linear_norm_sq(a, g, method, dtype=torch.float64)) / exact - 1) < 8e-6, method


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_norms_of_products_hold_what_cancels(backend: str, method: str) -> None:
    """Equal inputs, and output gradients that add up to almost nothing; of another sample nothing cancels, though its
    terms differ in size. By gram a sample that is in doubt is computed again, or its norm is rather too large."""
    a, g = random(3, 1, 24).expand(3, 40, 24).contiguous(), random(3, 40, 20)
    g[0, -1] -= g[0].sum(0)
    a[2, 0], g[2, 0] = 1e5 * a[2, 0], 1e-5 * g[2, 0]
    exact = squares(linear_gradients(a, g))
    want = bounds.enlarged(exact, bounds.of_products(a, g))
    found, bound = norm_sq_and_bound(a, g, method)
    assert bound is not None and want[0] > 4 * exact[0] and torch.equal(want[1:], exact[1:])
    assert found[0] >= want[0] * (1 - 1e-5)
    assert_norms(found[1:], exact[1:], 1e-4)
    plain = linear_norm_sq(a, g, method, dtype=torch.float64)
    assert bool((plain >= exact * (1 - 1e-2)).all())
    assert_norms(plain[1:], exact[1:], 1e-4)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("method", ["gram", "direct"])
def test_norms_of_convolutions_hold_what_cancels(backend: str, method: str) -> None:
    """A constant image and gradients whose sum is 0: what is left of the sum is rounding, which the norm must bound."""
    x, g, *args = conv_data(((3, 4, 6, 7), 6, 3, 1, 0, 1, 1))
    x[1] = 1000.0
    g[1] -= g[1].mean((1, 2), keepdim=True)
    norms, geometry = squares(conv_gradients(x, g, *args)).sqrt(), geometry_of(x, g, *args)
    bound = conv.rounding(x[:, None], g[:, None], geometry)
    assert bound is not None and norms[1] < 20 * bound[1]
    found = conv.bounded_norm_sq(x[:, None], g[:, None], geometry, method).sqrt()
    share = 0.99 if method == "direct" else 0.5  # by gram the bound is of the patches' own sizes
    assert found[1] > norms[1] + share * bound[1]
    assert_norms(found[[0, 2]], norms[[0, 2]], 1e-5)
    plain = conv_norm_sq(x, g, *args, method)
    assert bool((plain >= norms.square() * 0.98).all()), "what is in doubt is computed again, or rather too large"


@pytest.mark.parametrize("backend", TRITON[:1], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_positions_that_cancel(backend: str, dtype: torch.dtype) -> None:
    """All but one of the terms cancel: what the gram route adds for them is less than sums of them may be off."""
    a, g = torch.ones(1, 511, 32, dtype=dtype), torch.ones(1, 511, 32, dtype=dtype)
    g[:, 256:] = -1
    found, bound = norm_sq_and_bound(a, g, "gram")
    assert bound is not None and found.sqrt() >= 32 + bound * (1 - 1e-3) and bound > 20 * bounds.TOLERANCE * 32


@pytest.mark.parametrize("backend", CPU, indirect=True)
def test_rows_of_experts_that_cancel_or_vanish(backend: str) -> None:
    """Pairs of rows whose gradients are nearly opposite: the gram route loses all digits, and is not believed."""
    pairs = 30
    a, g = random(2 * pairs, 200), random(2 * pairs, 220)
    a[1::2], g[1::2] = a[::2], -g[::2] * (1 + 1e-5)
    owner = torch.arange(pairs).repeat_interleave(2)
    rows = (a, g, owner % 3, owner)
    exact = squares(routed_gradients(*rows, 3, pairs))
    assert_norms(routed_norm_sq(*rows, 3, pairs, dtype=torch.float64), exact, 1e-2)  # of what float32 leaves of it
    small = routed_norm_sq(a[::2] * 1e-20, g[::2] * 1e-2, owner[::2] % 3, owner[::2] // 2, 3, 15, dtype=torch.float64)
    exact = squares(routed_gradients(a[::2], g[::2], owner[::2] % 3, owner[::2] // 2, 3, 15)) * 1e-44
    assert_norms(small, exact, 1e-4)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_norms_of_look_ups_are_not_too_small(backend: str) -> None:
    ids, g, rows, padding = lookup_data((2, 200, 30, 3))
    g += 3  # sums of many terms of one sign
    assert_norms(embedding_norm_sq(ids, g, dtype=torch.float64), squares(lookup_gradients(ids, g, rows, padding)), 4e-6)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize(("method", "scale"), [("gram", 1e-12), ("gram", 1e12), ("direct", 1e-25), ("direct", 1e25)])
def test_small_and_large_numbers(backend: str, method: str, scale: float) -> None:
    a, g = linear_data((3, 20, 18, 20))
    for pair in ((a * scale, g), (a, g * scale)):
        found = linear_norm_sq(*pair, method, dtype=torch.float64)
        assert_norms(found, squares(linear_gradients(*pair)), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_underflow_takes_is_put_back(backend: str, dtype: torch.dtype) -> None:
    """Squares of these are lost in float32, on either side: the norm is too large rather than too small."""
    a, g = linear_data((2, 20, 18, 20), dtype)
    for scale in (1e-19, 1e-21, 1e-30):
        for pair in ((a * scale, g), (a, g * scale)):
            found = linear_norm_sq(*pair, "gram", dtype=torch.float64)
            assert bool((found >= squares(linear_gradients(*pair)) * (1 - 6e-6)).all())
    x, g, *args = conv_data(((2, 4, 5, 5), 6, 3, 1, 1, 1, 2), dtype)
    x, g = x * 1e-24, g * 1e17
    exact, geometry = squares(conv_gradients(x, g, *args)).sqrt(), geometry_of(x, g, *args)
    for found in (conv_norm_sq(x, g, *args, "gram"), conv.bounded_norm_sq(x[:, None], g[:, None], geometry, "gram")):
        assert bool((found.double().sqrt() >= exact * (1 - 3e-6)).all()) and bool((exact > 1e-7).all())


def test_the_route_of_a_segment_changes_with_its_length() -> None:
    """Of the table's sizes, segments lie on both sides of it."""
    sizes = [*FAMILIES["routed"].shapes.values(), *FAMILIES["routed"].large.values()]
    lengths = [(s / max(experts * batch, 1), longest_gram(i, o)) for s, i, o, experts, batch in sizes]
    assert any(1 < n < limit for n, limit in lengths) and any(n > limit > 0 for n, limit in lengths)


@pytest.mark.parametrize(
    ("samples", "i", "o", "pattern"),
    [(385, 7, 100, [1.0]), (385, 16, 2, [1.0]), (1537, 8, 7, [1.0]), (3000, 16, 4, [1.0]), (2348, 16, 1, [1.0, 1e-3])],
)
def test_a_sample_among_alike_ones_moves_the_float_sum_by_no_more_than_the_noise_is_for(
    samples: int, i: int, o: int, pattern: list[float]
) -> None:
    """Rounding of one sign adds up. Batches that the blocks of libraries just exceed, whose last blocks are halved."""
    a, g = torch.full((samples, i), 0.7), torch.full((samples, o), 1.3)
    a *= torch.tensor(pattern).repeat(samples)[:samples, None]
    c = linear_norm_sq(a, g, dtype=torch.float64).rsqrt().float()

    def sums(kept: Tensor) -> Tensor:  # alone, and as two layers of equal shape
        x, y = a[kept], g[kept]
        both = clipped_sums(torch.cat([x, x])[:, None], torch.cat([y, y])[:, None], c[kept], 2)
        return torch.stack([linear_clipped_sum(x, y, c[kept]), *both]).double()

    every = torch.arange(samples)
    whole = sums(every)
    for sample in (0, samples // 2, samples - 1):
        moved = (whole - sums(every[every != sample])).flatten(1).norm(dim=1)
        assert bool((moved < 1 + bounds.of_sums(samples)).all()), "half of it is for batches larger than expected"


@pytest.mark.parametrize("alike_ones", [True, False])
def test_in_any_order_a_sample_moves_a_float_sum_by_no_more_than_is_proven(alike_ones: bool) -> None:
    """docs/privacy.md: R (1 + n (n + 1) 2^-24), whatever the tree of sums."""
    chance = random_numbers(7)
    for n in (2, 5, 15, 60):
        rows = torch.full((n, 3), 0.7) if alike_ones else torch.randn(n, 3)
        rows = (rows / rows.double().norm(dim=1, keepdim=True)).float()
        for one_by_one in (True, False):
            order = [0] * (n - 1) if one_by_one else [chance.randrange(n - 1 - k) for k in range(n - 1)]

            def total(without: int, rows: Tensor = rows, order: list[int] = order) -> Tensor:
                parts = [torch.zeros(3) if k == without else row for k, row in enumerate(rows)]
                for place in order:
                    parts[place : place + 2] = [parts[place] + parts[place + 1]]
                return parts[0].double()

            whole = total(-1)
            moved = max(float((whole - total(k)).norm() / rows[k].double().norm()) for k in range(n))
            assert moved <= 1 + n * (n + 1) * UNIT
    assert all(n * (n + 1) * UNIT <= bounds.MOVED * n for n in range(1, 16)), "and the noise is made for it"


def test_many_samples_in_several_batches() -> None:
    """Their sums are added in float32, in which one sample is little beside 64,000."""
    a, g = torch.full((1000, 16), 0.7), torch.full((1000, 10), 1.3)
    c = linear_norm_sq(a, g, dtype=torch.float64).rsqrt().float()
    one, less = linear_clipped_sum(a, g, c), linear_clipped_sum(a[1:], g[1:], c[1:])
    for place in (0, 32, 63):
        whole, without = one.clone(), (less if place == 0 else one).clone()
        for number in range(1, 64):
            whole += one
            without += less if number == place else one
        assert float((whole.double() - without.double()).norm()) < 1 + bounds.of_sums(64_000) < 1.02


@pytest.mark.parametrize(("batch", "t"), [(4096, 1), (64, 256)])
def test_a_sample_moves_the_float_sum_by_no_more_than_its_share(batch: int, t: int) -> None:
    """The sum's own rounding, which depends on all samples, is far below what factors leave of the clipping norm."""
    a, g = (random(batch, t, 256, seed=seed) + 0.3 for seed in (1, 2))
    c = linear_norm_sq(a, g).rsqrt()
    whole = linear_clipped_sum(a, g, c).double()
    for sample in range(0, batch, batch // 8):
        kept = torch.arange(batch) != sample
        moved = float((whole - linear_clipped_sum(a[kept], g[kept], c[kept]).double()).norm())
        assert abs(moved - 1) < MARGIN / 10
