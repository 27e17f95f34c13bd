"""Sums of squares of each sample's numbers, and the weighted sum of samples, against float64."""

import pytest
import torch
from torch import Tensor

from fastdp.ops.rows import BLOCK, square_sum, weighted_sum

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]
SHAPES = [(3,), (3, 1), (2, 7), (5, 3, 0), (0, 4), (1, BLOCK), (3, BLOCK - 1), (2, 3 * BLOCK + 5), (4, 6, 50, 9)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    kind = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=kind).to(dtype)


def squares(rows: Tensor) -> Tensor:
    """The truth [B], number by number."""
    return rows.to(torch.complex128).reshape(rows.size(0), rows[:1].numel()).abs().square().sum(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_square_sum(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = numbers(*shape, dtype=dtype)
    found = square_sum(rows)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, squares(rows), rtol=1e-7, atol=0)


@pytest.mark.parametrize("scale", [1e-25, 1e-16, 1e16, 1e25])
def test_squares_beyond_float32_neither_vanish_nor_overflow(backend: str, scale: float) -> None:
    rows = numbers(3, 2 * BLOCK + 7)
    rows[1] *= scale  # the others stay as they are
    rows[2, :BLOCK] *= scale
    torch.testing.assert_close(square_sum(rows), squares(rows), rtol=1e-7, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_stays_in_its_sample(backend: str, bad: float) -> None:
    rows = numbers(3, BLOCK + 3)
    clean = square_sum(rows)
    rows[1, -1] = bad
    found = square_sum(rows)
    assert not found[1].isfinite() and torch.equal(found[[0, 2]], clean[[0, 2]])


def test_strides_do_not_matter(backend: str) -> None:
    whole = numbers(6, 2 * BLOCK + 4)
    c = torch.tensor([0.5, 0.0, 2.0])
    for rows in (whole[:3, ::2], whole[::2], whole[:3].t().contiguous().t(), whole[:3, 7:], whole[:1].expand(3, -1)):
        torch.testing.assert_close(square_sum(rows), squares(rows), rtol=1e-6, atol=0)
        torch.testing.assert_close(weighted_sum(rows, c), weighted_sum(rows.contiguous(), c), rtol=1e-6, atol=1e-6)
    factors = torch.tensor([0.5, 9.0, 0.0, 9.0, 2.0, 9.0])[::2]
    torch.testing.assert_close(weighted_sum(whole[:3], factors), weighted_sum(whole[:3], factors.contiguous()))


@pytest.mark.parametrize("dtype", TYPES[:4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropped", [False, True])
def test_weighted_sum(backend: str, dropped: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, c = numbers(*shape, dtype=dtype), torch.linspace(0.1, 1.7, shape[0])
    if dropped:
        c[::2] = 0
    exact = torch.einsum("b,b...->...", c.double(), rows.double())
    terms = torch.einsum("b,b...->...", c.double(), rows.double().abs())
    found = weighted_sum(rows, c)
    assert found.shape == rows.shape[1:] and found.dtype == dtype
    unit = 1e-6 if dtype == torch.float64 else torch.finfo(dtype).eps  # c is of float32
    assert ((found.double() - exact).abs() <= 4 * unit * terms).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_dropped_samples_are_not_read_as_numbers(backend: str, bad: float) -> None:
    rows, c = numbers(4, 33, dtype=torch.float32), torch.tensor([0.5, 0.0, -0.0, 2.0])
    clean = weighted_sum(rows, c)
    rows[1], rows[2, 5] = bad, bad
    assert torch.equal(weighted_sum(rows, c), clean)
    assert torch.equal(weighted_sum(rows, torch.zeros(4)), torch.zeros(33))
    c[1] = 1.0
    assert not weighted_sum(rows, c).isfinite().any(), "one that counts is"


def test_shapes_that_do_not_fit_are_refused(backend: str) -> None:
    for rows, c in (
        (torch.ones(3, 4), torch.ones(4)),
        (torch.ones(3, 4), torch.ones(3, 1)),
        (torch.ones(()), torch.ones(())),
    ):
        with pytest.raises(ValueError, match="expected rows"):
            weighted_sum(rows, c)


def test_threads_change_no_bit() -> None:
    rows, c, before, found = numbers(5, 40 * BLOCK + 1), torch.rand(5), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((square_sum(rows), weighted_sum(rows, c)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


def test_operators_are_registered_soundly() -> None:
    torch.library.opcheck(torch.ops.fastdp.square_sum.default, (numbers(3, 5),))
    torch.library.opcheck(torch.ops.fastdp.weighted_sum.default, (numbers(3, 5), torch.rand(3)))
