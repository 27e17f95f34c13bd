"""Look-ups: ids of any type and order, and the inner product with the head's gradient where the table is the head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastdp.ops import embedding, embedding_clipped_sum, embedding_norm_sq, tied_cross_term

from .backends import TRITON, asked, assert_sums, random, sum_of
from .table import lookup_data, lookup_gradients

pytestmark = pytest.mark.slow  # `make test-all` runs it

CROSS_ROUNDING = 2 * 2.0**-24  # of the sum of the sizes of all products


@pytest.mark.parametrize("backend", TRITON[:1], indirect=True)
def test_one_id_over_many_programs(backend: str) -> None:
    """Padding that is trained: the program of its first position goes through it."""
    ids = torch.zeros(2, 150, dtype=torch.int64)
    ids[:, 140:] = torch.arange(10) + 3
    g, c = random(2, 150, 5), torch.tensor([1.0, 0.5])
    exact = torch.einsum("b,bvd->vd", c.double(), lookup_gradients(ids, g, 20, None))
    assert_sums(embedding_clipped_sum(ids, g, c, 20), exact)


def test_layouts_and_types_of_ids(backend: str) -> None:
    ids, g, *_ = lookup_data((4, 6, 8, 5))
    c, spread = torch.rand(4), ids.t().contiguous().t()
    norms, total = embedding_norm_sq(ids, g), embedding_clipped_sum(ids, g, c, 5)
    assert torch.equal(embedding_norm_sq(spread.int(), g), norms)
    assert torch.equal(embedding_norm_sq(ids.view(4, 2, 3), g.view(4, 2, 3, 8)), norms)
    torch.testing.assert_close(embedding_clipped_sum(spread, g, c, 5), total)


# ---------------------------------------------------------------------- a table that is also the head


def head(b: int, k: int, t: int, d: int, v: int, dtype: torch.dtype = torch.float32,
         device: str = "cpu") -> tuple[Tensor, ...]:  # fmt: skip
    ids, shapes = torch.arange(b * k).view(b, k) * 7 % v, ((b, k, d), (b, t, d), (b, t, v))
    return ids.to(device), *(random(*s, dtype=dtype, seed=n).to(device) for n, s in enumerate(shapes))


def assert_cross(given: tuple[Tensor, ...]) -> None:
    """The cross term, and what its rounding is told from, of the logits' gradients that are looked up."""
    ids, e, h, g = given
    picked = g.double().gather(2, ids.long()[:, None, :].expand(-1, h.size(1), -1))  # [B, T, K]
    want = (torch.bmm(h.double(), e.double().mT) * picked).sum((1, 2))
    size = torch.einsum("btk,bt,bk->b", picked.abs(), h.double().norm(dim=2), e.double().norm(dim=2))
    found, spread = embedding.cross_term_and_spread(*given)
    assert found.dtype == spread.dtype == torch.float64
    torch.testing.assert_close(spread, size, rtol=1e-6, atol=0)
    assert bool(((found - want).abs() <= 2 * CROSS_ROUNDING * size).all()), ((found - want) / size).tolist()
    assert all(torch.equal(a, b) for a, b in zip((found, spread), embedding.cross_term_and_spread(*given), strict=True))


def test_the_cross_term_is_the_product_of_both_gradients() -> None:
    ids, e, h, g = head(2, 15, 17, 33, 51)
    rows = lookup_gradients(ids, e, 51, None)
    found = tied_cross_term(ids, e, h, g, dtype=torch.float64)
    torch.testing.assert_close(found, (rows * (g.double().mT @ h.double())).sum((1, 2)), rtol=1e-4, atol=1e-4)


@asked([(16, 16, 16, 97), (1, 1, 5, 3), (15, 17, 33, 51), (33, 32, 48, 1), (40, 9, 69, 41)])
def test_cross_terms(backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend in TRITON[1:]:
        monkeypatch.setattr("fastdp.kernels.embedding.CHUNK", 32)  # long products are summed in chunks
    given = head(2, *shape, dtype)
    assert_cross(given)
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
