"""Sums of squares of each sample's numbers, and the weighted sum of samples: every backend against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastdp.ops.common import sum_type
from fastdp.ops.rows import BLOCK, square_sum, square_sums_of_many, weighted_sum, weighted_sums_of_many

from .backends import DTYPES, asked, assert_equal_bits, random

SHAPES = [(4, 3, 50, 9), (3,), (3, 1), (5, 3, 0), (0, 4), (1, BLOCK), (3, BLOCK - 1), (2, 3 * BLOCK + 5)]
MANY = [(3, 8), (2, 17, 61), (2, 40, 51)]


def squares(rows: Tensor) -> Tensor:
    """The truth [B], number by number."""
    return rows.to(torch.complex128).reshape(rows.size(0), rows[:1].numel()).abs().square().sum(1)


def total_of(rows: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("b,b...->...", c.double(), rows.double())


def check(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    rows = random(*shape, dtype=dtype).to(device)
    found = square_sum(rows)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, squares(rows), rtol=1e-7, atol=0)
    for dropped in (False, True):
        c = torch.linspace(0.1, 1.7, 2 * shape[0], device=device)[::2]  # with a stride
        if dropped:
            c[1:2] = 0
        exact, size = total_of(rows, c), total_of(rows.abs(), c)
        if dropped:
            rows[1:2] = math.nan
        total = weighted_sum(rows, c)
        assert total.shape == rows.shape[1:] and total.dtype == sum_type(rows)
        assert ((total.double() - exact).abs() <= 2e-6 * size).all()  # (c is of float32)


def check_many(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    """Several tensors of one shape, of which one lies otherwise."""
    stacks = [random(*shape, dtype=dtype, seed=n).to(device) * 2.0**n for n in range(4)]
    c = torch.linspace(0.1, 1.7, shape[0], device=device)
    c[1] = 0
    for lies in (stacks[3], stacks[3].transpose(0, -1).contiguous().transpose(0, -1)):
        stacks[3] = lies
        want = torch.stack([squares(s) for s in stacks])
        torch.testing.assert_close(square_sums_of_many(stacks), want, rtol=1e-6, atol=0)
        for own in (c, torch.stack([c * (n + 1) for n in range(4)])):  # the same factors, or those of each
            dropped = [s.clone() for s in stacks[:3]] + [stacks[3]]
            dropped[2][1] = math.nan
            sums = weighted_sums_of_many(dropped, own, drop=True)
            assert len({total.untyped_storage().data_ptr() for total in sums}) == 4, "memory of its own"
            for total, stack, factors in zip(sums, stacks, own.expand(4, -1), strict=True):
                limits = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4e-5}
                torch.testing.assert_close(total.double(), total_of(stack, factors), **limits)


@asked(SHAPES)
def test_sums(backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdp.kernels.rows.PART", 2048)  # of a program
    check(shape, dtype)


@asked(MANY, dtypes=DTYPES[:3])
def test_many_tensors_of_one_shape(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdp.kernels.rows.PART", 1024)
    check_many(shape, dtype)


def test_complex_numbers() -> None:
    for dtype in (torch.complex64, torch.complex128):
        rows = torch.complex(random(3, 7, dtype=torch.float64), random(3, 7, dtype=torch.float64, seed=1)).to(dtype)
        torch.testing.assert_close(square_sum(rows.conj()), squares(rows), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-16, 1e16, 1e25, 1e30])
def test_squares_beyond_float32_neither_vanish_nor_overflow(backend: str, scale: float) -> None:
    rows = random(3, 2 * BLOCK + 7)
    rows[1] *= scale  # the others stay as they are
    rows[2, :BLOCK] *= scale
    torch.testing.assert_close(square_sum(rows), squares(rows), rtol=1e-7, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_stays_in_its_sample(backend: str, bad: float) -> None:
    rows, c = random(3, BLOCK + 3), torch.tensor([0.5, -0.0, 2.0])
    clean, total = square_sum(rows), weighted_sum(rows, c)
    rows[1, -1] = bad
    found = square_sum(rows)
    assert not found[1].isfinite() and torch.equal(found[[0, 2]], clean[[0, 2]])
    assert torch.equal(weighted_sum(rows, c), total)
    c[1] = 1
    assert not weighted_sum(rows, c)[-1].isfinite(), "one that counts is read"


def test_rows_lie_as_they_lie(backend: str) -> None:
    """Neither transposed gradients nor expanded ones come out in another order."""
    x, c = random(3, 20, 31), torch.tensor([0.5, 0.0, 2.0])
    for y in (x.mT, x.mT.contiguous().mT, x[:, ::2], x[:1].expand(3, -1, -1), x.transpose(0, 1)[:3], x[:, 3:]):
        torch.testing.assert_close(square_sum(y), squares(y), rtol=1e-6, atol=0)
        torch.testing.assert_close(weighted_sum(y, c).double(), total_of(y, c), rtol=1e-5, atol=1e-5)


def test_threads_change_no_bit() -> None:
    rows, c = random(5, 40 * BLOCK + 1), torch.rand(5)
    assert_equal_bits(lambda: [square_sum(rows), weighted_sum(rows, c)])
