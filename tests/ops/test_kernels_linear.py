"""Triton kernels of matrix products against float64: in the interpreter, or compiled where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from .kernels_truth import DEVICE, DTYPES, check_close, check_norms, linear_gradients, numbers, poisoned, weighted

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from fastdp.kernels import clipped, common, linear, tiles  # noqa: E402
from fastdp.kernels.clipped import add_linear_clipped_sum, linear_clipped_sum  # noqa: E402
from fastdp.kernels.common import Tile, triangle  # noqa: E402
from fastdp.kernels.linear import linear_norm_sq, linear_norm_sq_and_bound, linear_per_sample  # noqa: E402

from fastdp.ops import bounds  # noqa: E402

SMALL = Tile(16, 16, 16, 4, 2)  # so that small sizes have several tiles
SUM_TILE = Tile(32, 16, 16, 4, 2)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def pair(b: int, t: int, i: int, o: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return numbers(b, t, i, dtype=dtype), numbers(b, t, o, dtype=dtype, seed=1)


def plain_norms(a: Tensor, g: Tensor) -> Tensor:
    """By PyTorch in float32."""
    return (g.float().mT @ a.float()).flatten(1).square().sum(1)


# ---------------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize(("t", "tile"), [(1, None), (2, SMALL), (37, SMALL), (37, None)])
def test_norms(dtype: torch.dtype, method: str, t: int, tile: Tile | None) -> None:
    a, g = pair(3, t, 37, 50, dtype)
    found = linear_norm_sq(a, g, method, tile=tile)
    assert found.dtype == torch.float32
    check_norms(found, linear_gradients(a, g), plain_norms(a, g))


@pytest.mark.parametrize("method", ["gram", "direct"])
def test_norms_summed_in_chunks(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "chunk_of", lambda x: 32)
    a, g = pair(2, 50, 69, 37, torch.bfloat16)
    found = linear_norm_sq(a, g, method, tile=SMALL, dtype=torch.float64)
    assert found.dtype == torch.float64
    check_norms(found, linear_gradients(a, g), plain_norms(a, g))


def test_norms_of_one_row_need_no_dimension_for_it() -> None:
    a, g = numbers(3, 40), numbers(3, 2100)
    check_norms(linear_norm_sq(a, g), linear_gradients(a, g), plain_norms(a[:, None], g[:, None]))


@pytest.mark.parametrize("method", ["gram", "direct", "auto"])
def test_norms_of_any_strides_and_mixed_types(method: str) -> None:
    a = numbers(37, 3, 20).transpose(0, 1)[:, :, ::2]  # [3, 37, 10]
    g = numbers(3, 7, 37, dtype=torch.bfloat16).mT  # [3, 37, 7]
    check_norms(linear_norm_sq(a, g, method, tile=SMALL), linear_gradients(a, g), plain_norms(a, g))
    expanded = numbers(1, 37, 10).expand(3, 37, 10)
    check_norms(linear_norm_sq(expanded, g, method, tile=SMALL), linear_gradients(expanded, g),
                plain_norms(expanded, g))  # fmt: skip


@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (3, 0, 3, 4), (3, 5, 0, 4)])
def test_norms_of_nothing_are_zero(method: str, shape: tuple[int, int, int, int]) -> None:
    found = linear_norm_sq(*pair(*shape, torch.float32), method)
    assert found.shape == (shape[0],) and bool((found == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize("t", [1, 20])
def test_a_bad_number_stays_in_its_sample(method: str, t: int, bad: float) -> None:
    a, g = pair(3, t, 18, 20, torch.bfloat16)
    before = linear_norm_sq(a, g, method, tile=SMALL)
    g[1, -1, 19] = bad
    after = linear_norm_sq(a, g, method, tile=SMALL)
    assert not after[1].isfinite() and torch.equal(before[[0, 2]], after[[0, 2]])
    alone = linear_norm_sq(a[2:], g[2:], method, tile=SMALL)
    torch.testing.assert_close(alone, before[2:], rtol=1e-6, atol=0)


def test_cancelling_summands_never_give_too_small_a_norm() -> None:
    # equal inputs at all positions, output gradients that add up to almost nothing
    a, g = numbers(1, 1, 24).expand(16, 40, 24), numbers(16, 40, 20)
    g[:, -1] -= g.sum(1) * (1 - 1e-6)
    truth = linear_gradients(a, g).flatten(1).square().sum(1)
    found = linear_norm_sq(a, g, "gram", tile=SMALL, dtype=torch.float64)
    assert bool((found >= truth * (1 - 1e-6)).all())


@pytest.mark.parametrize(("method", "scale"), [("gram", 1e-12), ("gram", 1e12), ("direct", 1e-25), ("direct", 1e25)])
def test_norms_near_the_ends_of_float32(method: str, scale: float) -> None:
    a, g = pair(2, 20, 18, 20, torch.float32)
    found = linear_norm_sq(a, g * scale, method, tile=SMALL, dtype=torch.float64)
    truth = linear_gradients(a, g * scale)
    check_norms(found, truth, truth.square().sum((1, 2)))


def test_products_lost_by_underflow_leave_no_small_norm() -> None:
    a, g = pair(2, 20, 18, 20, torch.float32)
    g = g * 1e-19  # squares near 1e-38
    truth = linear_gradients(a, g).flatten(1).square().sum(1)
    assert bool((linear_norm_sq(a, g, "gram", tile=SMALL, dtype=torch.float64) >= truth).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [16, 1024])
@pytest.mark.parametrize("t", [2, 15, 16, 17, 31, 32, 33])
def test_tiles_on_the_diagonal(t: int, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formed from rows that are read once or as others are, at T that end with a tile or beside its end."""
    monkeypatch.setattr(linear, "chunk_of", lambda x: chunk)
    a, g = pair(3, t, 32, 48, dtype)
    truth, found = linear_gradients(a, g), {}
    for way in ("only",) if t <= 16 else ("apart", "as others"):
        monkeypatch.setattr(linear, "diagonal", lambda a, g, n, way=way: way)
        found[way], bound = linear._norms(a, g, "gram", torch.float64, SMALL, (1.0, 1e9))
        check_norms(found[way], truth, plain_norms(a, g))
        sizes = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
        assert bound is not None and bool((bound >= sizes).all()) and bool((bound <= sizes * (1 + 5e-5)).all())
    first, *others = found.values()
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-6, atol=0)


def test_which_tiles_are_chosen() -> None:
    meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
    pair_of = lambda t, i=768, o=3072, **kind: (meta(8, t, i, **kind), meta(8, t, o, **kind))
    steps = {t: tiles.sum_tile(*pair_of(t)).k for t in (40, 64, 65, 96, 97, 128, 129, 197, 224, 225, 256, 512, 1000)}
    assert [t for t, k in steps.items() if k == 32] == [65, 96, 129, 197, 224] and steps[64] == steps[512] == 64
    assert tiles.sum_tile(*pair_of(197)).stages == 2 * tiles.sum_tile(*pair_of(512)).stages
    assert tiles.diagonal(*pair_of(128), 1) == "only" and tiles.diagonal(*pair_of(197), 2) == "apart"
    assert tiles.diagonal(*pair_of(197, o=3001), 2) == "as others"  # loads of two bytes
    assert tiles.diagonal(*pair_of(197, o=3001, dtype=torch.float32), 2) == "apart"


def test_float64_stays_float64() -> None:
    a, g = numbers(3, 37, 5, dtype=torch.float64), numbers(3, 37, 4, dtype=torch.float64)
    truth = linear_gradients(a, g)
    for method in ("gram", "direct"):
        torch.testing.assert_close(linear_norm_sq(a, g, method), truth.square().sum((1, 2)), rtol=1e-12, atol=0)
    c = torch.tensor([0.5, 0.0, 2.0], device=DEVICE)
    torch.testing.assert_close(linear_per_sample(a, g), truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear_clipped_sum(a, g, c), weighted(truth, c), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [{"method": "ghost"}, {"dtype": torch.float16}])
def test_errors_name_what_is_wrong(wrong: dict[str, str]) -> None:
    a, g = pair(2, 3, 4, 5, torch.float32)
    with pytest.raises(ValueError, match="method must be|norms are"):
        linear_norm_sq(a, g, **wrong)
    with pytest.raises(ValueError, match="expected a"):
        linear_norm_sq(a, g[:, 1:])
    with pytest.raises(ValueError, match="expected factors"):
        linear_clipped_sum(a, g, torch.ones(3, device=DEVICE))


@triton.jit
def list_triangle(p_out, n):
    pid = tl.program_id(0)
    row, column = triangle(pid, n, 8)
    tl.store(p_out + 2 * pid, row)
    tl.store(p_out + 2 * pid + 1, column)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 17, 18])
def test_triangle_has_every_tile_once(n: int) -> None:
    out = torch.empty((n * (n + 1) // 2, 2), dtype=torch.int32, device=DEVICE)
    list_triangle[(out.size(0),)](out, n)
    assert sorted(map(tuple, out.tolist())) == [(row, column) for row in range(n) for column in range(row + 1)]


# ---------------------------------------------------------------------- per-sample gradients and clipped sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [SUM_TILE, None])
def test_per_sample_gradients(dtype: torch.dtype, tile: Tile | None) -> None:
    a, g = pair(3, 37, 37, 50, dtype)
    found = linear_per_sample(a, g, tile=tile)
    assert found.dtype == torch.float32
    check_close(found, linear_gradients(a, g), g.float().mT @ a.float())


@pytest.mark.parametrize(
    ("dtype", "t", "parts"),
    [(dtype, t, parts) for dtype in DTYPES[:2] for t in (1, 5, 37) for parts in (1, 2, 5, None)]
    + [(torch.float16, 37, 2)],  # it is loaded as bfloat16 is, by the same lines
)
def test_clipped_sums(dtype: torch.dtype, t: int, parts: int | None) -> None:
    a, g = pair(5, t, 37, 50, dtype)
    c = torch.tensor([0.3, 0.0, 1.7, 0.01, 0.0], device=DEVICE)
    truth = weighted(linear_gradients(a, g), c)
    plain = torch.mm((g.float() * c[:, None, None]).flatten(0, 1).mT, a.float().flatten(0, 1))
    a[1], g[4, 0, 3] = float("nan"), float("inf")  # of dropped samples
    tile = None if parts is None else SUM_TILE
    found = linear_clipped_sum(a, g, c, tile=tile, parts=parts)
    assert found.dtype == torch.float32
    check_close(found, truth, plain)
    out = torch.ones(37, 50, device=DEVICE).mT  # strides that are not the result's
    add_linear_clipped_sum(a, g, c, out)
    assert linear_clipped_sum(a, g, c, out, tile=tile, parts=parts) is out
    check_close(out, 2 * truth + 1, 2 * plain + 1)


@pytest.mark.parametrize("t", [1, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_are_not_rounded_to_16_bits(dtype: torch.dtype, t: int) -> None:
    a, g = pair(1, t, 16, 32, dtype)
    c = torch.tensor([1 + 2**-9], device=DEVICE)  # rounds to 1 or to 1 + 2^-7 in bfloat16
    found = linear_clipped_sum(a, g, c, tile=SUM_TILE)
    truth = weighted(linear_gradients(a, g), c)
    assert abs(found.double().norm() / truth.norm() - 1) < 1e-6


@pytest.mark.parametrize("t", [64, 65, 197])
def test_sums_in_short_steps(t: int) -> None:
    a, g = pair(3, t, 16, 32, torch.bfloat16)
    assert tiles.sum_tile(a, g).k == (64 if t == 64 else 32)
    c = torch.tensor([0.3, 0.0, 1 + 2**-9], device=DEVICE)
    truth = weighted(linear_gradients(a, g), c)
    a[1] = float("nan")
    for parts in (1, 2, None):
        check_close(linear_clipped_sum(a, g, c, parts=parts), truth, truth.float())


@pytest.mark.parametrize("t", [33, 64, 100, 129])
def test_sums_of_long_samples_are_taken_in_chunks(t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipped, "CHUNK", 32)
    a, g = pair(4, t, 24, 16, torch.bfloat16)
    c = torch.tensor([0.5, 0.0, 1.0, 0.3], device=DEVICE)
    a[1, -1] = float("inf")  # dropped
    truth = weighted(linear_gradients(a[c != 0], g[c != 0]), c[c != 0])
    check_close(linear_clipped_sum(a, g, c), truth, truth.float())


def test_what_a_chunk_adds_up_is_not_lost_beside_the_chunks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipped, "CHUNK", 32)
    a, g = (torch.zeros(1, 64, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    a[0, 0], g[0, 0] = 2**12, 2**12
    a[0, [32, 48]], g[0, [32, 48]] = 1, 1  # in steps of their own: one by one they are rounded away
    found = linear_clipped_sum(a, g, torch.ones(1, device=DEVICE), tile=SUM_TILE)
    assert (found == 2**24 + 2).all()


def test_sums_over_nothing() -> None:
    for shape in ((0, 5, 3, 4), (2, 0, 3, 4), (0, 40, 3, 4)):
        a, g = pair(*shape, torch.bfloat16)
        c = torch.ones(shape[0], device=DEVICE)
        assert torch.equal(linear_clipped_sum(a, g, c), torch.zeros(4, 3, device=DEVICE))
        assert torch.equal(
            linear_clipped_sum(a, g, c, torch.ones(4, 3, device=DEVICE)), torch.ones(4, 3, device=DEVICE)
        )
        assert linear_per_sample(a, g).shape == (shape[0], 4, 3)
    a, g = pair(2, 40, 20, 18, torch.bfloat16)
    a[:] = float("nan")
    dropped = linear_clipped_sum(a, g, torch.zeros(2, device=DEVICE), tile=SUM_TILE)
    assert torch.equal(dropped, torch.zeros(18, 20, device=DEVICE))


def test_sum_of_prescaled_rows() -> None:
    a, g = pair(3, 20, 9, 8, torch.bfloat16)
    c = torch.tensor([0.5, 0.0, 0.25], device=DEVICE)  # exact in bfloat16
    truth = weighted(linear_gradients(a, g), c)
    a[1] = float("nan")
    check_close(clipped.clipped_sum_prescaled(a, g, c), truth, truth)


def test_narrow_rows_are_filled_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "PAD_BYTES", 2 * 40 * (21 + 16 + 17 + 16) * 2)  # two samples
    a, g = pair(5, 40, 21, 17, torch.bfloat16)
    truth = linear_gradients(a, g)
    for method in ("gram", "direct"):
        check_norms(linear_norm_sq(a, g, method), truth, plain_norms(a, g))
    c = torch.tensor([0.3, 0.0, 1.7, 0.01, 0.5], device=DEVICE)
    out = torch.ones(17, 21, device=DEVICE)
    found = linear_clipped_sum(a, g, c)
    assert found.shape == (17, 21) and found.is_contiguous()
    check_close(found, weighted(truth, c), weighted(truth, c))
    check_close(linear_clipped_sum(a, g, c, out), weighted(truth, c) + 1, weighted(truth, c) + 1)
    assert common.aligned(numbers(2, 16, 32)) and not common.aligned(numbers(2, 16, 33)[..., 1:])


def test_complex_numbers_are_left_to_pytorch() -> None:
    a, g = torch.complex(*pair(2, 5, 4, 4, torch.float32)), torch.complex(*pair(2, 5, 4, 4, torch.float32)).conj()
    truth = linear_per_sample(a, g)
    torch.testing.assert_close(truth, g.mT @ a)
    torch.testing.assert_close(linear_norm_sq(a, g), truth.abs().square().sum((1, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_bound_the_rounding_of_few_positions_too(dtype: torch.dtype) -> None:
    """All but one of the terms cancel: what the gram route adds for them is less than sums of them may be off."""
    a, g = torch.ones(1, 511, 32, dtype=dtype, device=DEVICE), torch.ones(1, 511, 32, dtype=dtype, device=DEVICE)
    g[:, 256:] = -1
    units = bounds.units_of_products(a, g)
    found, bound = linear_norm_sq_and_bound(a, g, "gram", units, bounds.TOLERANCE)
    truth = torch.tensor(32.0, dtype=torch.float64, device=DEVICE)
    assert bound is not None and bound > 20 * bounds.TOLERANCE * truth
    assert found.sqrt() >= truth + bound - bounds.TOLERANCE * truth
