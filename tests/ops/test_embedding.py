"""Look-ups: norms, clipped sums and the tied cross term of every backend, against one sample at a time in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdp.ops import cuda, embedding, embedding_clipped_sum, embedding_norm_sq, embedding_per_sample, tied_cross_term

from .backends import TRITON, asked, assert_equal_bits, assert_sums, random, sum_of

pytestmark = pytest.mark.slow  # `make test-all` runs it

# samples, positions, columns, rows of the table
SHAPES = [(4, 7, 3, 2), (3, 1, 1, 5), (2, 37, 16, 11), (2, 90, 20, 1), (3, 4, 300, 400), (0, 3, 4, 5), (2, 0, 4, 5),
          (3, 4, 0, 5)]  # fmt: skip
LARGE = [(5, 64, 257, 40), (1, 300, 33, 4)]
CROSS_ROUNDING = 2 * 2.0**-24  # of the sum of the sizes of all products


def data(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    batch, k, d, rows = shape
    ids = torch.randint(0, rows, (batch, k), generator=torch.Generator().manual_seed(k))
    return ids, random(batch, k, d, dtype=dtype)


def truth(ids: Tensor, g: Tensor, rows: int, padding_idx: int | None) -> Tensor:
    """Table gradients by autograd in float64, a sample at a time: [B, rows, d]."""
    found = []
    for some, grad in zip(ids, g.double(), strict=True):
        table = torch.zeros(rows, g.size(-1), dtype=torch.float64, requires_grad=True)
        found.append(torch.autograd.grad(F.embedding(some, table, padding_idx), table, grad)[0])
    return torch.stack(found) if found else torch.zeros(0, rows, g.size(-1), dtype=torch.float64)


@pytest.mark.parametrize("padding_idx", [None, 0])
@asked(SHAPES, LARGE, tiled=SHAPES[:4])
def test_norms_and_sums_are_those_of_autograd(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, padding_idx: int | None
) -> None:
    ids, g = data(shape, dtype)
    g = g.mT.contiguous().mT  # rows that are strided
    exact = truth(ids, g, shape[3], padding_idx)
    tolerance = 4e-6 if backend == "reference" and dtype != torch.float64 else 1e-7  # it squares in float32
    norms = embedding_norm_sq(ids, g, padding_idx, dtype=torch.float64)
    torch.testing.assert_close(norms, exact.square().sum((1, 2)), rtol=tolerance, atol=0)
    assert embedding_norm_sq(ids, g, padding_idx).dtype == sum_of(dtype)
    assert_sums(embedding_per_sample(ids, g, shape[3], padding_idx), exact)
    c = torch.linspace(0.1, 1.7, shape[0])
    c[1:2] = 0
    total = torch.einsum("b,bvd->vd", c.double(), exact)
    g[1:2] = math.nan  # of a dropped sample
    found = embedding_clipped_sum(ids, g, c, shape[3], padding_idx)
    assert found.dtype == sum_of(dtype)
    torch.testing.assert_close(found.double(), total, rtol=1e-6, atol=5e-6)
    for out in (torch.ones_like(found), torch.ones_like(found.mT).mT):
        assert embedding_clipped_sum(ids, g, c, shape[3], padding_idx, out=out) is out
        torch.testing.assert_close(out.double(), total + 1, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("backend", TRITON[:1], indirect=True)
def test_one_id_over_many_programs(backend: str) -> None:
    """Padding that is trained: the program of its first position goes through it."""
    ids = torch.zeros(2, 150, dtype=torch.int64)
    ids[:, 140:] = torch.arange(10) + 3
    g, c = random(2, 150, 5), torch.tensor([1.0, 0.5])
    exact = torch.einsum("b,bvd->vd", c.double(), truth(ids, g, 20, None))
    assert_sums(embedding_clipped_sum(ids, g, c, 20), exact)


def test_norms_are_not_too_small(backend: str) -> None:
    ids, g = data((2, 200, 30, 3))
    g = g + 3  # sums of many terms of one sign
    exact = truth(ids, g, 3, None).square().sum((1, 2))
    assert ((embedding_norm_sq(ids, g, dtype=torch.float64) / exact - 1).abs() < 4e-6).all()


def test_a_bad_sample_stays_alone(backend: str) -> None:
    ids, g = data((4, 9, 20, 6))
    clean = embedding_norm_sq(ids, g)
    g[2, 3] = math.nan
    norms = embedding_norm_sq(ids, g)
    assert norms.isfinite().tolist() == [True, True, False, True] and torch.equal(norms[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("bad", [-1, 6, 2**40])
def test_ids_outside_the_table_are_named(bad: int) -> None:
    ids, g = data((2, 5, 3, 6))
    ids[1, 2] = bad
    out = torch.ones(6, 3)
    for call in (
        lambda: embedding_clipped_sum(ids, g, torch.ones(2), 6),
        lambda: embedding_clipped_sum(ids, g, torch.ones(2), 6, out=out),
        lambda: embedding_per_sample(ids, g, 6),
    ):
        with pytest.raises(IndexError, match=str(bad)):
            call()
    assert torch.equal(out, torch.ones(6, 3))


def test_refusals(backend: str) -> None:
    ids, g = data((2, 5, 3, 6))
    c, out = torch.ones(2), torch.ones(6, 3)
    calls: list[Callable[[], object]] = [
        lambda: embedding_norm_sq(ids, g, -1),
        lambda: embedding_per_sample(ids, g, 6, -1),
        lambda: embedding_clipped_sum(ids, g, c, 6, -1),
        lambda: embedding_clipped_sum(ids, g, c, 6, -1, out=out),
        lambda: torch.ops.fastdp.embedding_norm_sq.default(ids, g, -1),
        lambda: cuda.embedding_norm_sq(ids, g, -1),
        lambda: cuda.embedding_clipped_sum(ids, g, c, 6, -1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="num_embeddings [+] padding_idx"):
            call()
    assert torch.equal(out, torch.ones(6, 3))
    with pytest.raises(ValueError):
        embedding_norm_sq(ids, g[:, :4])
    with pytest.raises(ValueError):
        embedding_clipped_sum(ids, g, torch.ones(3), 6)


def test_layouts_and_id_types(backend: str) -> None:
    ids, g = data((4, 6, 8, 5))
    c, spread = torch.rand(4), ids.t().contiguous().t()
    norms, total = embedding_norm_sq(ids, g), embedding_clipped_sum(ids, g, c, 5)
    assert torch.equal(embedding_norm_sq(spread.int(), g), norms)
    assert torch.equal(embedding_norm_sq(ids.view(4, 2, 3), g.view(4, 2, 3, 8)), norms)
    torch.testing.assert_close(
        embedding_clipped_sum(spread, g.transpose(0, 1).contiguous().transpose(0, 1), c, 5), total
    )


def test_threads_change_no_bit() -> None:
    ids, g = data((7, 130, 517, 50))
    c = torch.rand(7)
    assert_equal_bits(lambda: [embedding_norm_sq(ids, g), embedding_clipped_sum(ids, g, c, 50)], (1, 2, 3, 7))


# ---------------------------------------------------------------------- a table that is also the head


def head(b: int, k: int, t: int, d: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    ids = torch.arange(b * k).view(b, k) * 7 % v
    return (
        ids,
        random(b, k, d, dtype=dtype),
        random(b, t, d, dtype=dtype, seed=1),
        random(b, t, v, dtype=dtype, seed=2),
    )


def assert_cross(given: tuple[Tensor, ...]) -> None:
    """The cross term, and what its rounding is told from, of both gradients of the table written out."""
    ids, e, h, g = given
    ids = ids.long()
    rows = truth(ids, e, g.size(2), None)
    want = (rows * (g.double().mT @ h.double())).sum((1, 2))
    sizes = torch.einsum("btv,bt->bv", g.double().abs(), h.double().norm(dim=2)).gather(1, ids)
    size = (sizes * e.double().norm(dim=2)).sum(1)
    found, spread = embedding.cross_term_and_spread(*given)
    assert found.dtype == spread.dtype == torch.float64
    torch.testing.assert_close(spread, size, rtol=1e-6, atol=0)
    assert bool(((found - want).abs() <= 2 * CROSS_ROUNDING * size).all()), ((found - want) / size).tolist()


@asked([(16, 16, 16, 97), (1, 1, 5, 3), (15, 17, 33, 51), (33, 32, 48, 1), (40, 9, 69, 41)])
def test_cross_terms(backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend in TRITON[1:]:
        monkeypatch.setattr("fastdp.kernels.embedding.CHUNK", 32)  # long products are summed in chunks
    given = head(2, *shape, dtype)
    assert_cross(given)
    found = embedding.cross_term_and_spread(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, embedding.cross_term_and_spread(*given), strict=True))
    assert tied_cross_term(*given).dtype == sum_of(dtype)


def test_cross_terms_of_any_strides_types_and_scales(backend: str) -> None:
    ids, e, h, g = head(3, 20, 18, 24, 40)
    turned = (e.transpose(0, 1).contiguous().transpose(0, 1), h.mT.contiguous().mT)
    for given in ((ids, *turned, g.mT.contiguous().mT), (ids, e[..., ::2], h[..., ::2], g),
                  (ids, e, h, g * 1e-25), (ids, e, h, g * 1e25)):  # fmt: skip
        assert_cross(given)


def test_cross_terms_of_a_bad_number_and_of_words_that_nobody_looks_up(backend: str) -> None:
    ids, e, h, g = head(3, 20, 18, 24, 400, torch.bfloat16)
    before = embedding.cross_term_and_spread(ids, e, h, g)
    rest = torch.ones(400, dtype=torch.bool)
    rest[ids.flatten()] = False
    g[..., rest] = math.nan
    h[1, 3, 5] = math.inf
    for one, other in zip(before, embedding.cross_term_and_spread(ids, e, h, g), strict=True):
        assert not other[1].isfinite() and torch.equal(one[[0, 2]], other[[0, 2]])
    for one in (embedding.cross_term_and_spread(ids[:, :0], e[:, :0], h, g),
                embedding.cross_term_and_spread(ids, e, h[:, :0], g[:, :0])):  # fmt: skip
        assert all(values.tolist() == [0, 0, 0] for values in one)
