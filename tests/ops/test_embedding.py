"""Look-ups: norms, clipped sums and the tied cross term against one sample at a time in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdp.ops import cuda, embedding_clipped_sum, embedding_norm_sq, embedding_per_sample, tied_cross_term

SHAPES = [
    (3, 1, 1, 5),
    (4, 7, 3, 2),
    (2, 37, 16, 11),
    (5, 64, 257, 40),
    (1, 300, 33, 4),
    (0, 3, 4, 5),
    (2, 0, 4, 5),
    (3, 4, 0, 5),
]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def data(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    batch, k, d, rows = shape
    generator = torch.Generator().manual_seed(k)
    ids = torch.randint(0, rows, (batch, k), generator=generator)
    return ids, torch.randn(batch, k, d, generator=generator, dtype=torch.float64).to(dtype)


def truth(ids: Tensor, g: Tensor, rows: int, padding_idx: int | None) -> Tensor:
    """Table gradients by autograd in float64, a sample at a time: [B, rows, d]."""
    found = []
    for some, grad in zip(ids, g.double(), strict=True):
        table = torch.zeros(rows, g.size(-1), dtype=torch.float64, requires_grad=True)
        out = F.embedding(some, table, padding_idx)
        found.append(torch.autograd.grad(out, table, grad)[0])
    return torch.stack(found) if found else torch.zeros(0, rows, g.size(-1), dtype=torch.float64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_norms_and_sums_are_those_of_autograd(
    backend: str, padding_idx: int | None, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    ids, g = data(shape, dtype)
    rows = truth(ids, g, shape[3], padding_idx)
    accuracy = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 2e-6}
    norms = embedding_norm_sq(ids, g, padding_idx, dtype=torch.float64)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-7 if backend == "native" else 4e-6  # float32 squares
    torch.testing.assert_close(norms, rows.square().sum((1, 2)), rtol=tolerance, atol=0)
    assert embedding_norm_sq(ids, g, padding_idx).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    found = embedding_per_sample(ids, g, shape[3], padding_idx)
    torch.testing.assert_close(found.double(), rows, **accuracy)
    c = torch.linspace(0.1, 1, shape[0]).to(found.dtype)
    expected = (c.double()[:, None, None] * rows).sum(0)
    total = embedding_clipped_sum(ids, g, c, shape[3], padding_idx)
    assert total.dtype == found.dtype
    torch.testing.assert_close(total.double(), expected, **accuracy)
    out = torch.ones_like(total)
    assert embedding_clipped_sum(ids, g, c, shape[3], padding_idx, out=out) is out
    torch.testing.assert_close(out.double(), expected + 1, **accuracy)


def test_norms_are_not_too_small(backend: str) -> None:
    ids, g = data((4, 200, 300, 3))
    g = g + 3  # sums of many terms of one sign
    exact = truth(ids, g, 3, None).square().sum((1, 2))
    assert ((embedding_norm_sq(ids, g, dtype=torch.float64) / exact - 1).abs() < 4e-6).all()


def test_dropped_samples_are_not_read_and_others_not_touched(backend: str) -> None:
    ids, g = data((4, 9, 20, 6))
    clean = embedding_clipped_sum(ids, g.index_fill(0, torch.tensor([2]), 0.0), torch.ones(4), 6)
    g[2, 3] = float("nan")
    norms = embedding_norm_sq(ids, g)
    assert norms.isfinite().tolist() == [True, True, False, True]
    assert torch.equal(embedding_clipped_sum(ids, g, torch.tensor([1.0, 1, 0, 1]), 6), clean)


@pytest.mark.parametrize("bad", [-1, 6, 2**40])
def test_ids_outside_the_table_are_named(backend: str, bad: int) -> None:
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


def test_negative_padding_is_refused(backend: str) -> None:
    ids, g = data((2, 5, 3, 6))
    ops, c, out = torch.ops.fastdp, torch.ones(2), torch.ones(6, 3)
    calls: list[Callable[[], object]] = [
        lambda: embedding_norm_sq(ids, g, -1),
        lambda: embedding_norm_sq(ids, g.double(), -1),
        lambda: embedding_per_sample(ids, g, 6, -1),
        lambda: embedding_clipped_sum(ids, g, c, 6, -1),
        lambda: embedding_clipped_sum(ids, g, c, 6, -1, out=out),
        lambda: ops.embedding_norm_sq.default(ids, g, -1),
        lambda: ops.embedding_clipped_sum.default(ids, g, c, 6, -1),
        lambda: cuda.embedding_norm_sq(ids, g, -1),
        lambda: cuda.embedding_clipped_sum(ids, g, c, 6, -1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="num_embeddings [+] padding_idx"):
            call()
    assert torch.equal(out, torch.ones(6, 3))


def test_layouts_and_id_types(backend: str) -> None:
    ids, g = data((4, 6, 8, 5))
    c = torch.rand(4)
    norms, total = embedding_norm_sq(ids, g), embedding_clipped_sum(ids, g, c, 5)
    turned, spread = g.mT.contiguous().mT, ids.t().contiguous().t()
    assert torch.equal(embedding_norm_sq(spread.int(), turned), norms)
    assert torch.equal(embedding_clipped_sum(spread, turned, c, 5), total)
    assert torch.equal(embedding_norm_sq(ids.view(4, 2, 3), g.view(4, 2, 3, 8)), norms)
    out = torch.zeros(8, 5).t()
    torch.testing.assert_close(embedding_clipped_sum(ids, g, c, 5, out=out), total)
    with pytest.raises(ValueError):
        embedding_norm_sq(ids, g[:, :5])
    with pytest.raises(ValueError):
        embedding_clipped_sum(ids, g, torch.ones(3), 5)


def test_threads_change_no_bit() -> None:
    ids, g = data((7, 130, 517, 50))
    before, c = torch.get_num_threads(), torch.rand(7)
    try:
        torch.set_num_threads(1)
        norms, total = embedding_norm_sq(ids, g), embedding_clipped_sum(ids, g, c, 50)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(embedding_norm_sq(ids, g), norms)
            assert torch.equal(embedding_clipped_sum(ids, g, c, 50), total)
    finally:
        torch.set_num_threads(before)


def test_cross_term_of_a_tied_table(backend: str) -> None:
    ids, e = data((3, 7, 5, 11))
    h, g = torch.randn(3, 4, 5), torch.randn(3, 4, 11)
    rows = truth(ids, e, 11, None)
    expected = (rows * (g.double().mT @ h.double())).sum((1, 2))
    torch.testing.assert_close(tied_cross_term(ids, e, h, g, dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)
    assert tied_cross_term(ids, e, h, g).dtype == torch.float32


def test_operators_are_registered_soundly() -> None:
    ids, g = data((2, 5, 3, 6))
    c, out = torch.rand(2), torch.zeros(6, 3)
    ops = torch.ops.fastdp
    torch.library.opcheck(ops.embedding_norm_sq.default, (ids, g, 1), {"dtype": torch.float64})
    torch.library.opcheck(ops.embedding_per_sample.default, (ids, g, 6))
    torch.library.opcheck(ops.embedding_clipped_sum.default, (ids, g, c, 6, 2))
    torch.library.opcheck(ops.embedding_clipped_sum.out, (ids, g, c, 6), {"out": out})
    torch.library.opcheck(ops.tied_cross_term.default, (ids, g, torch.rand(2, 4, 3), torch.rand(2, 4, 6)))
