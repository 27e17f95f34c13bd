"""What only Triton's kernels do, in their interpreter: tiles, long sums in chunks, many layers at once, far memory, and
what matrix units cut off."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdp.ops import (
    bounds,
    conv_clipped_sum,
    conv_norm_sq,
    conv_per_sample,
    linear,
    linear_clipped_sum,
    linear_norm_sq,
    linear_per_sample,
    square_sum,
    weighted_sum,
)
from fastdp.ops.linear import norm_sq_and_bound

from .backends import DTYPES, NORM_ERROR, TRITON, asked, assert_sums, random, weighted
from .table import CONVS, assert_norms, conv_data, conv_gradients, linear_data, linear_gradients, squares

pytest.importorskip("triton")
import triton
import triton.language as tl
from fastdp.kernels import clipped, common, depthwise, patches, tiles
from fastdp.kernels.conv_problem import Geometry as ThreeSizes
from fastdp.kernels.conv_problem import Problem

pytestmark = pytest.mark.slow  # `make test-all` runs it
IN_TILES = pytest.mark.parametrize("backend", TRITON[1:], indirect=True)
BY_TRITON = pytest.mark.parametrize("backend", TRITON, indirect=True)
ONCE = pytest.mark.parametrize("backend", TRITON[:1], indirect=True)
LIMIT = NORM_ERROR["card"]


# ---------------------------------------------------------------------- many layers at once


def check_many(shape: tuple[int, ...], dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """One of them lies otherwise, and one begins between two vectors, where loads of 16 bytes would be a fault."""
    pairs = [(random(*shape[:3], dtype=dtype, seed=n).to(device) * 2.0**n,
              random(*shape[:2], shape[3], dtype=dtype, seed=n + 9).to(device)) for n in range(4)]  # fmt: skip
    pairs[1] = (pairs[1][0].transpose(0, 1).contiguous().transpose(0, 1), pairs[1][1])
    buffer = torch.zeros(pairs[2][0].numel() + 1, dtype=dtype, device=device)
    buffer[1:] = pairs[2][0].flatten()
    pairs[2] = (buffer[1:].view(shape[:3]), pairs[2][1])
    exact = [linear_gradients(*pair) for pair in pairs]
    for method in ("gram", "direct"):
        found = linear.norm_sq_of_many(pairs, method)
        assert found.dtype == torch.float64
        for row, pair, gradients in zip(found, pairs, exact, strict=True):
            assert_norms(row, squares(gradients), NORM_ERROR[backend])
            torch.testing.assert_close(row, norm_sq_and_bound(*pair, method)[0], rtol=1e-6, atol=0)
    pairs[3][1][1, -1, 3] = math.nan
    good = linear.norm_sq_of_many(pairs, "gram").isfinite()
    assert not good[3, 1] and int(good.sum()) == good.numel() - 1
    c = torch.linspace(0.1, 1.7, shape[0], device=device)
    c[1] = 0
    sums = linear.clipped_sums_of_many(list(pairs), c, drop=True)
    assert len({total.untyped_storage().data_ptr() for total in sums}) == 4, "memory of its own"
    for total, gradients in zip(sums, exact, strict=True):
        assert_sums(total, weighted(gradients, c), weighted(gradients, c).float())


@asked([(2, 20, 32, 16), (3, 1, 40, 24), (2, 20, 21, 18)], dtypes=DTYPES[:3])
def test_many_products_of_one_shape(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_many(shape, dtype, backend)


@BY_TRITON
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
        exact = weighted(linear_gradients(*pair), c)
        assert_sums(total[:19, :16], exact, exact.float())


# ---------------------------------------------------------------------- tiles and chunks


@IN_TILES
@pytest.mark.parametrize(("a", "o"), [((2, 50, 69), 37), ((3, 66, 24), 16)])
def test_long_sums_are_taken_in_chunks(backend: str, a: Any, o: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of positions and of columns; and narrow rows are filled up for two samples at a time."""
    monkeypatch.setattr("fastdp.kernels.linear.chunk_of", lambda x: 32)
    monkeypatch.setattr("fastdp.kernels.clipped.CHUNK", 32)
    monkeypatch.setattr("fastdp.kernels.common.PAD_BYTES", 2 * a[1] * (a[2] + o + 32) * 2)
    x, g = random(*a, dtype=torch.bfloat16), random(*a[:2], o, dtype=torch.bfloat16, seed=1)
    for method in ("gram", "direct"):
        assert_norms(linear_norm_sq(x, g, method), squares(linear_gradients(x, g)), LIMIT)
    c = torch.linspace(0.3, 1.7, a[0])
    exact = weighted(linear_gradients(x, g), c)
    assert_sums(linear_clipped_sum(x, g, c), exact, exact.float())
    x, g = (torch.zeros(1, 64, 16, dtype=torch.bfloat16) for _ in range(2))
    x[0, 0], g[0, 0] = 2**12, 2**12
    x[0, [32, 48]], g[0, [32, 48]] = 1, 1  # one by one they would be rounded away
    assert bool((linear_clipped_sum(x, g, torch.ones(1)) == 2**24 + 2).all())


@BY_TRITON
@pytest.mark.parametrize("t", [64, 65, 197])
def test_sums_in_steps_of_32_or_64_rows(backend: str, t: int) -> None:
    a, g = linear_data((3, t, 16, 32), torch.bfloat16)
    c = torch.tensor([0.3, 0.0, 1 + 2**-9])
    exact = weighted(linear_gradients(a, g), c)
    a[1] = math.nan
    assert_sums(linear_clipped_sum(a, g, c), exact, exact.float())


@IN_TILES
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_sums_of_groups_of_samples_are_added(backend: str, parts: int) -> None:
    """One after the other; dropped samples hold NaN."""
    a, g = linear_data((5, 37, 37, 50), torch.bfloat16)
    c = torch.tensor([0.3, 0.0, 1.7, 0.01, 0.0])
    exact = weighted(linear_gradients(a, g), c)
    a[1], g[4, 0, 3] = math.nan, math.inf
    found = clipped.linear_clipped_sum(a, g, c, tile=tiles.Tile(16, 16, 16, 4, 1), parts=parts)
    assert_sums(found, exact, exact.float())


@IN_TILES
@pytest.mark.parametrize("way", ["apart", "as others"])
def test_tiles_on_the_diagonal(backend: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formed of rows that are read once or as other tiles are; the bound is of their sizes."""
    monkeypatch.setattr("fastdp.kernels.linear.diagonal", lambda a, g, n: way if n > 1 else "only")
    for t in (16, 17, 31, 32, 33):
        for dtype in DTYPES[:3]:
            a, g = linear_data((3, t, 32, 48), dtype)
            found, bound = norm_sq_and_bound(a, g, "gram")
            assert_norms(found, squares(linear_gradients(a, g)), LIMIT)
            sizes = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1) * bounds.units_of_products(a, g)
            assert bound is not None and bool((bound >= sizes * (1 - 1e-12)).all())
            assert bool((bound <= sizes * (1 + 5e-5)).all())


def test_which_tiles_are_chosen() -> None:
    meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
    pair_of = lambda t, i=768, o=3072, **kind: (meta(8, t, i, **kind), meta(8, t, o, **kind))
    assert tiles.diagonal(*pair_of(128), 1) == "only" and tiles.diagonal(*pair_of(197), 2) == "apart"
    assert tiles.diagonal(*pair_of(197, o=3001), 2) == "as others"  # loads of two bytes
    # the tiles of 768 -> 3072 are 144 on 132 multiprocessors: of one group they would run for two samples' time
    assert clipped.splits(8, 512, 144, 132) > 1 == clipped.splits(8, 512, 36 * 144, 132)
    assert clipped.splits(8, 512, 4, 132) == 8 and clipped.splits(1, 512, 4, 132) == 1


# ---------------------------------------------------------------------- convolutions: ways of loading


@ONCE
@pytest.mark.parametrize("name", ["wide", "wide groups", "groups", "depthwise"])
def test_offsets_of_64_bits_and_divisions_give_the_same_bits(
    backend: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, g, *args = conv_data(CONVS[name], torch.bfloat16)

    def every() -> list[Tensor]:
        norms = [conv_norm_sq(x, g, *args, method) for method in ("gram", "direct")]
        return [*norms, conv_per_sample(x, g, *args), conv_clipped_sum(x, g, torch.tensor([0.7, 1.3]), *args)]

    found, own = every(), Problem.constants
    monkeypatch.setattr(Problem, "constants", lambda p: own(p) | {"FAST": False, "FAR": True, "DEEP": True})
    assert all(torch.equal(a, b) for a, b in zip(found, every(), strict=True))
    monkeypatch.setattr(depthwise, "SPAN", 16)  # positions beyond a program's are another's
    monkeypatch.setattr("fastdp.kernels.conv.chunk_of", lambda x: 64)
    for a, b in zip(found, every(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@triton.jit
def _over_kernel(p_x, p_out, y, inverse, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o, mask=o < n, other=0)
    tl.store(p_out + o, patches._over(x, y, inverse, True), mask=o < n)


@ONCE
def test_positions_are_divided_exactly(backend: str) -> None:
    """Next to every multiple, up to the largest position for which the launcher takes this way."""
    for y in (2, 3, 7, 14, 55, 224, 4096, 32767, 46340):
        last = (1 << 31) // y - 1
        multiples = torch.linspace(0, last // y, 300, dtype=torch.float64).long() * y
        x = torch.cat([multiples - 1, multiples, multiples + 1, torch.tensor([last])]).clamp(0, last).int()
        found = torch.empty_like(x)
        _over_kernel[(triton.cdiv(x.numel(), 256),)](x, found, y, -(-(1 << 31) // y), x.numel(), BLOCK=256)
        assert torch.equal(found, x // y), y

    def constants(width: int, stride: int = 1) -> dict[str, Any]:
        x = torch.empty(1, device="meta").expand(1, 2, 1, 4, width)
        x, g = x.as_strided(x.shape, (1, stride, 1, 1, 1)), torch.empty(1, 2, 4 * width, device="meta")
        sizes = ThreeSizes((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1))
        return Problem(x, g, (4, width), sizes, 1, (2, 2, 1, 1)).constants()

    assert constants(56)["FAST"] and not constants(1)["FAST"] and not constants(46340)["FAST"]
    assert not constants(56)["FAR"] and constants(56, 1 << 30)["FAR"] and not constants(56)["DEEP"]


# ---------------------------------------------------------------------- memory more than 2^31 elements apart

FAR = 2**28  # 11 columns so far apart are 2^31.4 elements


@pytest.fixture
def far(tmp_path: Path) -> Callable[[Tensor, int], Tensor]:
    """Copies of tensors, with one of their dimensions FAR apart, in a file with holes."""
    made = []

    def spread(x: Tensor, dim: int) -> Tensor:
        strides = list(torch.empty([size for d, size in enumerate(x.shape) if d != dim], device="meta").stride())
        strides.insert(dim, FAR)
        size = (x.size(dim) - 1) * FAR + x.numel()
        made.append(torch.from_file(str(tmp_path / str(len(made))), shared=True, size=size, dtype=x.dtype))
        return made[-1].as_strided(x.shape, strides).copy_(x)

    return spread


@IN_TILES
@pytest.mark.parametrize("dim", [1, 2])
def test_products_of_far_rows_or_columns(backend: str, dim: int, far: Any) -> None:
    """As those of a convolution of 1 x 1 on an image of 2^28 pixels."""
    a, g, c = random(2, 20, 18), random(2, 20, 11, seed=1), torch.tensor([0.5, 2.0])
    exact, x, y = linear_gradients(a, g), far(a, dim), far(g, dim)
    for method in ("gram", "direct"):
        norms, bound = norm_sq_and_bound(x, y, method)
        assert_norms(norms, squares(exact), LIMIT)
        torch.testing.assert_close(bound, norm_sq_and_bound(a, g, method)[1], rtol=1e-4, atol=0)
    assert_sums(linear_per_sample(x, y), exact)
    assert_sums(linear_clipped_sum(x, y, c), weighted(exact, c))
    for row in linear.norm_sq_of_many([(x, y), (far(a, dim), far(g, dim))], "gram"):
        assert_norms(row, squares(exact), LIMIT)
    one = linear_norm_sq(far(a[:, 0], 1), far(g[:, 0], 1))
    assert_norms(one, squares(linear_gradients(a[:, :1], g[:, :1])), LIMIT)
    rows, c = random(3, 12), torch.tensor([0.5, 2.0, 1.0])
    torch.testing.assert_close(square_sum(far(rows, dim - 1)), squares(rows.double()), rtol=1e-12, atol=0)
    torch.testing.assert_close(weighted_sum(far(rows, dim - 1), c), c @ rows, rtol=1e-5, atol=1e-5)


@IN_TILES
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_convolutions_of_far_pixels(backend: str, dim: int, far: Any) -> None:
    x, g, *args = conv_data(((1, 10, 10, 10), 3, 3, 1, 1, 1, 1))
    for method in ("gram", "direct"):
        found = conv_norm_sq(far(x, dim), g, *args, method)
        assert_norms(found, squares(conv_gradients(x, g, *args)), LIMIT)


# ---------------------------------------------------------------------- what matrix units cut off

GUARD = 2  # bits behind a sum's last place that the unit keeps of each product. MEASURED, by its effect, on an H100


def _cut(x: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Towards zero, to multiples of `last`."""
    return np.trunc(x / last) * last


def _last_place(x: np.ndarray) -> np.ndarray:
    """The worth of the last bit of float32 numbers of this size."""
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 1e-300))) - 23)


def by_matrix_unit(products: np.ndarray, chunk: int) -> np.ndarray:
    """Sums of products [rows, K]: 16 at a time aligned to the largest of them and the sum, cut off, added, cut off
    again; after `chunk` products added to a float32 number."""
    total = np.zeros(len(products), dtype=np.float32)
    for start in range(0, products.shape[1], chunk):
        own = np.zeros(len(products))
        for k in range(start, min(start + chunk, products.shape[1]), 16):
            step = products[:, k : k + 16]
            last = _last_place(np.maximum(np.abs(own), np.abs(step).max(1))) * 2.0**-GUARD
            own = _cut(own, last) + _cut(step, last[:, None]).sum(1)
            own = _cut(own, _last_place(own))
        total += own.astype(np.float32)
    return total.astype(np.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [16, 64, 512, 1024, 4096, 8192])
@pytest.mark.parametrize("one_sign", [True, False])
def test_norms_are_enlarged_by_what_is_cut_off(dtype: torch.dtype, count: int, one_sign: bool) -> None:
    """Of a gradient of 400 elements, each a sum of `count` products: by as much, and by little more."""
    generator = torch.Generator().manual_seed(count)
    sides = [torch.randn(400, count, generator=generator), torch.randn(400, count, generator=generator) * 0.01]
    a, g = ((x.abs() if one_sign else x).to(dtype) for x in sides)
    products = (a.double() * g.double()).numpy()
    found = float(np.linalg.norm(by_matrix_unit(products, common.chunk_of(a))))
    truth = float(np.linalg.norm(products.sum(1)))
    assert found < truth
    share = 2 * common.truncation(count, torch.empty(0, dtype=dtype))  # of the squared norm, as `finish` adds it
    enlarged = found * (1 + share) ** 0.5
    assert -3e-7 * truth <= enlarged - truth <= 5e-6 * truth, enlarged / truth - 1
    assert common.truncation(count, torch.empty(0)) == 0.0, "float32 loses nothing"


def test_float16_loses_more_than_bfloat16() -> None:
    """The share of bfloat16 alone leaves its norms too small, by what ten tests on an H100 saw: 2.3e-6 to 4e-6."""
    sides = [(torch.rand(400, 1024, generator=torch.Generator().manual_seed(n)) + 0.5).half().double() for n in (0, 1)]
    exact = (sides[0] * sides[1]).numpy()
    found = np.linalg.norm(by_matrix_unit(exact, 1024)) / np.linalg.norm(exact.sum(1))
    share = 2 * common.truncation(1024, torch.empty(0, dtype=torch.bfloat16))
    assert -6e-6 < found * (1 + share) ** 0.5 - 1 < -2e-6
