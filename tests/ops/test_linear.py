"""Weight gradients of matrix products: every backend against float64, a sample at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdp.ops import bounds, linear, linear_clipped_sum, linear_norm_sq, linear_per_sample, registry
from fastdp.ops.linear import METHODS, norm_sq_and_bound

from .backends import (
    DTYPES,
    NATIVE,
    TRITON,
    asked,
    assert_equal_bits,
    assert_norms,
    assert_sums,
    random,
    sum_of,
    weighted,
)

pytestmark = pytest.mark.slow  # `make test-all` runs it

# (B, T, I, O): one position, positions that end with a tile of 16 or beside its end, odd sizes and whole vectors
SHAPES = [(3, 37, 37, 50), (5, 1, 37, 50), (5, 2, 5, 7), (2, 15, 32, 48), (2, 16, 32, 48), (2, 17, 32, 48),
          (3, 33, 48, 32), (2, 40, 3, 1)]  # fmt: skip
# one position, whole tiles, several blocks of positions, several blocks of outputs
LARGE = [(3, 1, 5, 7), (2, 128, 48, 32), (2, 300, 21, 33), (1, 130, 17, 400), (3, 9, 700, 300), (2, 600, 3, 40)]


def data(b: int, t: int, i: int, o: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return random(b, t, i, dtype=dtype), random(b, t, o, dtype=dtype, seed=1)


def truth(a: Tensor, g: Tensor) -> Tensor:
    """[B,O,I] in float64, a position at a time."""
    total = torch.zeros(a.size(0), g.size(2), a.size(2), dtype=torch.float64)
    for t in range(a.size(1)):
        total += g[:, t, :, None].double() * a[:, t, None].double()
    return total


@asked(SHAPES, LARGE)
def test_norms_gradients_and_sums(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, g = data(*shape, dtype)  # type: ignore[arg-type]
    exact, plain = truth(a, g), torch.bmm(g.float().mT, a.float())
    for method in METHODS:
        found = linear_norm_sq(a, g, method)
        assert found.dtype == sum_of(dtype)
        assert_norms(backend, found, exact, dtype)
        bounded, bound = norm_sq_and_bound(a, g, method)
        assert bounded.dtype == torch.float64 and (bound is None) == (shape[1] == 1)
        squares = exact.square().sum((1, 2))
        most = bounds.enlarged(squares, bounds.of_products(a, g))
        assert bool((bounded >= squares * (1 - 6e-6)).all()) and bool((bounded <= most * (1 + 2e-5)).all())
    assert_sums(linear_per_sample(a, g), exact, plain)
    c = torch.linspace(0.1, 1 + 2**-9, shape[0])  # bfloat16 has no such number
    c[1:2] = 0
    total, rough = weighted(exact, c), weighted(plain, c)
    a[1:2, -1], g[1:2, 0] = math.nan, math.inf  # of a dropped sample
    found = linear_clipped_sum(a, g, c)
    assert found.dtype == sum_of(dtype)
    assert_sums(found, total, rough)
    out = torch.ones_like(found.mT).mT  # strides that are not the result's
    assert linear_clipped_sum(a, g, c, out) is out
    assert_sums(out, total + 1, rough + 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 150), st.integers(1, 70), st.integers(1, 70), st.sampled_from(DTYPES))
def test_any_size(b: int, t: int, i: int, o: int, dtype: torch.dtype) -> None:
    a, g = data(b, t, i, o, dtype)
    exact = truth(a, g).square().sum((1, 2))
    for method in ("gram", "direct"):
        torch.testing.assert_close(linear_norm_sq(a, g, method).double(), exact, rtol=5e-6, atol=1e-9 * t)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_strides_are_only_strides(backend: str, dtype: torch.dtype) -> None:
    a, g = data(3, 40, 35, 18, dtype)
    views = [
        (a.mT.contiguous().mT, g.bfloat16()), (a, g.mT.contiguous().mT),
        (a.transpose(0, 1).contiguous().transpose(0, 1), g), (a[:1].expand(3, 40, 35), g),
        (a[:, :1].expand(3, 40, 35), g), (a[::2, ::2, ::2], g[::2, ::2, ::3]), (a[..., :1].expand(3, 40, 35), g),
    ]  # fmt: skip
    for x, y in views:
        for method in ("gram", "direct"):
            assert_norms(backend, linear_norm_sq(x, y, method), truth(x, y))


def test_two_dimensions_and_nothing(backend: str) -> None:
    a, g = random(3, 40), random(3, 2100)
    assert_norms(backend, linear_norm_sq(a, g), truth(a[:, None], g[:, None]))
    for b, t, i, o in ((0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0)):
        a, g = torch.ones(b, t, i).bfloat16(), torch.ones(b, t, o).bfloat16()
        for method in METHODS:
            assert linear_norm_sq(a, g, method).tolist() == [0.0] * b
        assert linear_per_sample(a, g).shape == (b, o, i)
        out = torch.ones(o, i)
        assert torch.equal(linear_clipped_sum(a, g, torch.ones(b)), out - 1)
        assert torch.equal(linear_clipped_sum(a, g, torch.ones(b), out), torch.ones(o, i))
    assert not linear_clipped_sum(*data(2, 40, 20, 18, torch.bfloat16), torch.zeros(2)).any()


@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize("t", [1, 40])
def test_a_bad_sample_stays_alone(backend: str, method: str, t: int) -> None:
    a, g = data(4, t, 20, 30, torch.bfloat16)
    clean = linear_norm_sq(a, g, method)
    a[2, t // 2, 3], g[0, -1, 29] = math.nan, math.inf
    found = linear_norm_sq(a, g, method)
    assert not found[[0, 2]].isfinite().any() and torch.equal(found[[1, 3]], clean[[1, 3]])
    torch.testing.assert_close(linear_norm_sq(a[1:2], g[1:2], method), clean[1:2], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(8, 40, 64, 64), (1, 128, 40, 50), (2, 300, 33, 20), (3, 64, 1000, 300)])
@pytest.mark.skipif(not NATIVE, reason="needs the compiled extension")
def test_threads_and_repetition_change_no_bit(shape: tuple[int, ...]) -> None:
    pair = data(*shape)  # type: ignore[arg-type]
    assert_equal_bits(lambda: [linear_norm_sq(*pair, method, dtype=torch.float64) for method in METHODS])


# ---------------------------------------------------------------------- rounding


@pytest.mark.skipif(not NATIVE, reason="needs the compiled extension")
def test_constant_data_does_not_shrink() -> None:
    """Rounding in one direction: a long float32 sum of equal terms loses far more than a random one."""
    for value in (0.1, 0.3, 1 / 3, 0.7071, 1.1):
        a, g = torch.full((1, 600, 4000), value), torch.full((1, 600, 50), value)
        exact = float(torch.tensor(value).double() ** 4) * 600**2 * 4000 * 50
        for method in ("gram", "direct"):
            ratio = float(linear_norm_sq(a, g, method, dtype=torch.float64)) / exact
            assert abs(ratio - 1) < 8e-6, (value, method, ratio)  # what clip factors allow for: 4e-6 of the norm


@pytest.mark.parametrize("method", METHODS)
def test_norms_are_enlarged_by_the_bound_where_terms_cancel(backend: str, method: str) -> None:
    """Equal inputs, and output gradients that add up to almost nothing; of another sample nothing cancels, though its
    terms differ in size. By gram a sample that is in doubt is computed again, or its norm is rather too large."""
    a, g = random(3, 1, 24).expand(3, 40, 24).contiguous(), random(3, 40, 20)
    g[0, -1] -= g[0].sum(0)
    a[2, 0], g[2, 0] = 1e5 * a[2, 0], 1e-5 * g[2, 0]
    exact = truth(a, g).square().sum((1, 2))
    want = bounds.enlarged(exact, bounds.of_products(a, g))
    found, bound = norm_sq_and_bound(a, g, method)
    assert bound is not None and want[0] > 4 * exact[0] and torch.equal(want[1:], exact[1:])
    assert found[0] >= want[0] * (1 - 1e-5)
    torch.testing.assert_close(found[1:], exact[1:], rtol=1e-4, atol=0)
    plain = linear_norm_sq(a, g, method, dtype=torch.float64)
    assert bool((plain >= exact * (1 - 1e-2)).all())
    torch.testing.assert_close(plain[1:], exact[1:], rtol=1e-4, atol=0)


@pytest.mark.parametrize("backend", TRITON[:1], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_positions_that_cancel(backend: str, dtype: torch.dtype) -> None:
    """All but one of the terms cancel: what the gram route adds for them is less than sums of them may be off."""
    a, g = torch.ones(1, 511, 32, dtype=dtype), torch.ones(1, 511, 32, dtype=dtype)
    g[:, 256:] = -1
    found, bound = norm_sq_and_bound(a, g, "gram")
    assert bound is not None and found.sqrt() >= 32 + bound * (1 - 1e-3) and bound > 20 * bounds.TOLERANCE * 32


@pytest.mark.parametrize(("method", "scale"), [("gram", 1e-12), ("gram", 1e12), ("direct", 1e-25), ("direct", 1e25)])
def test_small_and_large_numbers(backend: str, method: str, scale: float) -> None:
    a, g = data(3, 20, 18, 20)
    for pair in ((a * scale, g), (a, g * scale)):
        assert_norms("Triton", linear_norm_sq(*pair, method, dtype=torch.float64), truth(*pair))


@pytest.mark.parametrize("scale", [1e-19, 1e-21, 1e-30])
def test_what_underflow_takes_is_put_back(backend: str, scale: float) -> None:
    """Squares of these are lost in float32, on either side: the norm is too large rather than too small."""
    a, g = data(2, 20, 18, 20)
    for pair in ((a * scale, g), (a, g * scale)):
        exact = truth(*pair).square().sum((1, 2))
        assert bool((linear_norm_sq(*pair, "gram", dtype=torch.float64) >= exact * (1 - 6e-6)).all())


def test_refusals(backend: str) -> None:
    a, g = data(2, 3, 4, 5)
    with pytest.raises(ValueError, match="method"):
        linear_norm_sq(a, g, "fast")
    with pytest.raises(ValueError, match="expected a"):
        linear_norm_sq(a, g[:, :2])
    with pytest.raises(ValueError, match="float32"):
        linear_norm_sq(a, g, dtype=torch.float16)
    with pytest.raises(ValueError, match="expected a"):
        linear_clipped_sum(a, g[:1], torch.ones(2))


def test_the_compiled_kernel_serves_where_it_is_built() -> None:
    operator = registry.OPERATORS["linear_norm_sq"]
    assert (operator.implementation("cpu") is not operator.reference) == NATIVE
    with registry.forced("reference"):
        assert operator.implementation("cpu") is operator.reference


# ---------------------------------------------------------------------- several at once, long ones, and Triton's tiles


@asked([(2, 20, 32, 16), (3, 1, 40, 24), (2, 20, 21, 18)], dtypes=DTYPES[:3])
def test_many_products_of_one_shape(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One of them lies otherwise, and one begins between two vectors, where loads of 16 bytes would be a fault."""
    pairs = [(random(*shape[:3], dtype=dtype, seed=n) * 2.0**n,
              random(*shape[:2], shape[3], dtype=dtype, seed=n + 9)) for n in range(4)]  # fmt: skip
    pairs[1] = (pairs[1][0].transpose(0, 1).contiguous().transpose(0, 1), pairs[1][1])
    buffer = torch.zeros(pairs[2][0].numel() + 1, dtype=dtype)
    buffer[1:] = pairs[2][0].flatten()
    pairs[2] = (buffer[1:].view(shape[:3]), pairs[2][1])
    exact = [truth(*pair) for pair in pairs]
    for method in ("gram", "direct"):
        found = linear.norm_sq_of_many(pairs, method)
        assert found.dtype == torch.float64
        for row, pair, gradients in zip(found, pairs, exact, strict=True):
            assert_norms(backend, row, gradients)
            torch.testing.assert_close(row, norm_sq_and_bound(*pair, method)[0], rtol=1e-6, atol=0)
    pairs[3][1][1, -1, 3] = math.nan
    good = linear.norm_sq_of_many(pairs, "gram").isfinite()
    assert not good[3, 1] and int(good.sum()) == good.numel() - 1
    c = torch.linspace(0.1, 1.7, shape[0])
    c[1] = 0
    sums = linear.clipped_sums_of_many(list(pairs), c, drop=True)
    assert len({total.untyped_storage().data_ptr() for total in sums}) == 4, "memory of its own"
    for total, gradients in zip(sums, exact, strict=True):
        assert_sums(total, weighted(gradients, c), weighted(gradients, c).float())


@pytest.mark.parametrize("backend", TRITON, indirect=True)
@pytest.mark.parametrize("first", [0, 1])
def test_sums_of_products_of_other_widths(backend: str, first: int) -> None:
    """Of layers of one vocabulary some are filled up once, and others are not, whose inputs begin between vectors."""
    x = random(2, 37, 64, dtype=torch.bfloat16)
    inputs = [x[..., 1:17], x[..., :16], x[..., 16:32], x[..., 32:48]]
    pairs = [(a, random(2, 37, 19, dtype=torch.bfloat16, seed=n)) for n, a in enumerate(inputs)]
    pairs = pairs[first:] + pairs[:first]
    whole, c = [linear.filled_once(*pair) for pair in pairs], torch.tensor([0.5, 2.0])
    assert sorted(g.size(2) for _, g in whole) == [19, 32, 32, 32]
    for total, pair in zip(linear.clipped_sums_of_many(list(whole), c), pairs, strict=True):
        exact = weighted(truth(*pair), c)
        assert_sums(total[:19, :16], exact, exact.float())


@pytest.mark.parametrize("backend", TRITON[1:], indirect=True)
@pytest.mark.parametrize(("a", "o"), [((2, 50, 69), 37), ((3, 66, 24), 16)])
def test_long_sums_are_taken_in_chunks(backend: str, a: Any, o: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of positions and of columns; and narrow rows are filled up for two samples at a time."""
    monkeypatch.setattr("fastdp.kernels.linear.chunk_of", lambda x: 32)
    monkeypatch.setattr("fastdp.kernels.clipped.CHUNK", 32)
    monkeypatch.setattr("fastdp.kernels.common.PAD_BYTES", 2 * a[1] * (a[2] + o + 32) * 2)
    x, g = random(*a, dtype=torch.bfloat16), random(*a[:2], o, dtype=torch.bfloat16, seed=1)
    for method in ("gram", "direct"):
        assert_norms(backend, linear_norm_sq(x, g, method), truth(x, g))
    c = torch.linspace(0.3, 1.7, a[0])
    exact = weighted(truth(x, g), c)
    assert_sums(linear_clipped_sum(x, g, c), exact, exact.float())
    x, g = (torch.zeros(1, 64, 16, dtype=torch.bfloat16) for _ in range(2))
    x[0, 0], g[0, 0] = 2**12, 2**12
    x[0, [32, 48]], g[0, [32, 48]] = 1, 1  # one by one they would be rounded away
    assert bool((linear_clipped_sum(x, g, torch.ones(1)) == 2**24 + 2).all())


@pytest.mark.parametrize("backend", TRITON, indirect=True)
@pytest.mark.parametrize("t", [64, 65, 197])
def test_sums_in_steps_of_32_or_64_rows(backend: str, t: int) -> None:
    a, g = data(3, t, 16, 32, torch.bfloat16)
    c = torch.tensor([0.3, 0.0, 1 + 2**-9])
    exact = weighted(truth(a, g), c)
    a[1] = math.nan
    assert_sums(linear_clipped_sum(a, g, c), exact, exact.float())


@pytest.mark.parametrize("backend", TRITON[1:], indirect=True)
@pytest.mark.parametrize("way", ["apart", "as others"])
def test_tiles_on_the_diagonal(backend: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formed of rows that are read once or as other tiles are; the bound is of their sizes."""
    monkeypatch.setattr("fastdp.kernels.linear.diagonal", lambda a, g, n: way if n > 1 else "only")
    for t in (16, 17, 31, 32, 33):
        for dtype in DTYPES[:3]:
            a, g = data(3, t, 32, 48, dtype)
            found, bound = norm_sq_and_bound(a, g, "gram")
            assert_norms(backend, found, truth(a, g))
            sizes = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1) * bounds.units_of_products(a, g)
            assert bound is not None and bool((bound >= sizes * (1 - 1e-12)).all())
            assert bool((bound <= sizes * (1 + 5e-5)).all())


@pytest.mark.parametrize("backend", TRITON[:1], indirect=True)
def test_which_tiles_are_chosen(backend: str) -> None:
    from fastdp.kernels import clipped, tiles

    meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
    pair_of = lambda t, i=768, o=3072, **kind: (meta(8, t, i, **kind), meta(8, t, o, **kind))
    steps = {t: tiles.sum_tile(*pair_of(t)).k for t in (40, 64, 65, 96, 97, 128, 129, 197, 224, 225, 256, 512, 1000)}
    assert [t for t, k in steps.items() if k == 32] == [65, 96, 129, 197, 224] and steps[64] == steps[512] == 64
    assert tiles.diagonal(*pair_of(128), 1) == "only" and tiles.diagonal(*pair_of(197), 2) == "apart"
    assert tiles.diagonal(*pair_of(197, o=3001), 2) == "as others"  # loads of two bytes
    # the tiles of 768 -> 3072 are 144 on 132 multiprocessors: of one group they would run for two samples' time
    assert clipped.splits(8, 512, 144, 132) > 1 == clipped.splits(8, 512, 36 * 144, 132)
    assert clipped.splits(8, 512, 4, 132) == 8 and clipped.splits(1, 512, 4, 132) == 1


@pytest.mark.parametrize("backend", TRITON[1:], indirect=True)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_are_added_to_memory_of_any_strides(backend: str, parts: int) -> None:
    """Sums of groups of samples, one after the other, where strides are not the result's; dropped samples hold NaN."""
    from fastdp.kernels import clipped, tiles

    a, g = data(5, 37, 37, 50, torch.bfloat16)
    c = torch.tensor([0.3, 0.0, 1.7, 0.01, 0.0])
    exact = weighted(truth(a, g), c)
    a[1], g[4, 0, 3] = float("nan"), float("inf")
    out = torch.ones(37, 50).mT
    assert clipped.linear_clipped_sum(a, g, c, out, tile=tiles.Tile(16, 16, 16, 4, 1), parts=parts) is out
    assert_sums(out, exact + 1, exact.float() + 1)
