"""The cross term of a tied table by Triton's kernel, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastdp import ops

from .by_triton import launches, serve_by_triton
from .kernels_truth import DEVICE, DTYPES, numbers, poisoned

pytest.importorskip("triton")
from fastdp.kernels import embedding
from fastdp.kernels.common import Tile

SMALL = Tile(16, 16, 16, 4, 2)
ROUNDING = 2 * 2.0**-24


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def data(b: int, k: int, t: int, d: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = torch.arange(b * k, device=DEVICE).view(b, k) * 7 % v
    return (ids, numbers(b, k, d, dtype=dtype), numbers(b, t, d, dtype=dtype, seed=1),
            numbers(b, t, v, dtype=dtype, seed=2))  # fmt: skip


def truth(ids: Tensor, e: Tensor, h: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """From both gradients of the table, written out."""
    cross, spread = [], []
    for b in range(ids.size(0)):
        table = torch.zeros(g.size(2), e.size(2), dtype=torch.float64, device=e.device)
        table.index_add_(0, ids[b], e[b].double())
        cross.append((table * (g[b].double().mT @ h[b].double())).sum())
        sizes = (g[b].double().abs() * h[b].double().norm(dim=1)[:, None]).sum(0)[ids[b]]
        spread.append((sizes * e[b].double().norm(dim=1)).sum())
    return torch.stack(cross), torch.stack(spread)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [SMALL, None])
@pytest.mark.parametrize(
    ("k", "t", "d", "v"), [(1, 1, 5, 3), (16, 16, 16, 97), (15, 17, 33, 51), (33, 32, 48, 1), (70, 9, 16, 97)]
)
def test_cross_terms(k: int, t: int, d: int, v: int, tile: Tile | None, dtype: torch.dtype) -> None:
    given = data(2, k, t, d, v, dtype)
    found, spread = embedding.cross_term_and_spread(*given, tile=tile)
    want, size = truth(*given)
    assert found.dtype == spread.dtype == torch.float64
    torch.testing.assert_close(spread, size, rtol=1e-12, atol=0)
    assert bool(((found - want).abs() <= ROUNDING * size).all()), ((found - want) / size).tolist()
    again = embedding.cross_term_and_spread(*given, tile=tile)
    assert torch.equal(again[0], found) and torch.equal(again[1], spread)


def test_long_products_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "CHUNK", 32)
    given = data(2, 20, 18, 69, 40, torch.bfloat16)
    found, (want, size) = embedding.cross_term_and_spread(*given, tile=SMALL)[0], truth(*given)
    assert bool(((found - want).abs() <= ROUNDING * size).all())


def test_any_strides_and_types() -> None:
    ids, e, h, g = data(3, 20, 18, 24, 40, torch.float32)
    e, h, g = e.transpose(0, 1).contiguous().transpose(0, 1), h.mT.contiguous().mT, g.mT.contiguous().mT.bfloat16()
    ids = ids.mT.contiguous().mT.int()
    for given in ((ids, e, h, g), (ids, e[..., ::2], h[..., ::2], g), (ids, e.half(), h, g)):
        found, spread = embedding.cross_term_and_spread(*given, tile=SMALL)
        want, size = truth(given[0].long(), *given[1:])
        assert bool(((found - want).abs() <= ROUNDING * size).all())
        torch.testing.assert_close(spread, size, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_products_of_small_and_large_numbers_are_not_lost(scale: float) -> None:
    ids, e, h, g = data(2, 20, 18, 24, 40, torch.float32)
    given = ids, e, h, g * scale
    found, spread = embedding.cross_term_and_spread(*given)
    want, size = truth(*given)
    assert bool(((found - want).abs() <= ROUNDING * size).all()) and bool(spread.isfinite().all())


def test_a_bad_number_stays_in_its_sample_and_logits_of_other_words_are_not_read() -> None:
    ids, e, h, g = data(3, 20, 18, 24, 400, torch.bfloat16)
    before = embedding.cross_term_and_spread(ids, e, h, g)
    rest = torch.ones(400, dtype=torch.bool, device=DEVICE)
    rest[ids.flatten()] = False
    g[..., rest] = math.nan
    h[1, 3, 5] = math.inf
    after = embedding.cross_term_and_spread(ids, e, h, g)
    for one, other in zip(before, after, strict=True):
        assert not other[1].isfinite() and torch.equal(one[[0, 2]], other[[0, 2]])


def test_what_is_not_there_or_does_not_fit() -> None:
    ids, e, h, g = data(2, 5, 6, 8, 10, torch.float32)
    for one in (embedding.cross_term_and_spread(ids[:, :0], e[:, :0], h, g),
                embedding.cross_term_and_spread(ids, e, h[:, :0], g[:, :0])):  # fmt: skip
        assert all(values.tolist() == [0, 0] for values in one)
    ids[1, 2] = 10
    found, _ = embedding.cross_term_and_spread(ids, e, h, g)
    assert found.isfinite().tolist() == [True, False], "a word outside the table has no gradient to guess"
    with pytest.raises(ValueError, match="expected ids"):
        embedding.cross_term_and_spread(ids[:, :4], e, h, g)
    with pytest.raises(ValueError, match="differ in samples or columns"):
        embedding.cross_term_and_spread(ids, e[..., :4], h, g)


@pytest.mark.skipif(DEVICE == "cuda", reason="runs in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = data(2, 20, 18, 24, 41, dtype)
    plain = ops.tied_cross_term(*given)
    serve_by_triton(monkeypatch)
    with launches() as found:
        served = ops.tied_cross_term(*given)
    assert found["cross_kernel"] == 1 and served.dtype == plain.dtype
    torch.testing.assert_close(served, plain, rtol=1e-5, atol=1e-4)
    wide = [x.double() if x.is_floating_point() else x for x in given]
    with launches() as found:
        ops.tied_cross_term(*wide)
    assert not found, "float64 is left to plain PyTorch"
