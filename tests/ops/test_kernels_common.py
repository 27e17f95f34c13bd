"""What matrix units cut off of sums of 16-bit numbers, emulated: norms are enlarged by as much, and by little more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from fastdp.kernels import common

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


def _norms(dtype: torch.dtype, count: int, one_sign: bool) -> tuple[float, float]:
    """By the matrix unit, and exactly: of a gradient of 400 elements, each a sum of `count` products."""
    generator = torch.Generator().manual_seed(count)
    sides = [torch.randn(400, count, generator=generator), torch.randn(400, count, generator=generator) * 0.01]
    a, g = ((x.abs() if one_sign else x).to(dtype) for x in sides)
    products = (a.double() * g.double()).numpy()
    found = by_matrix_unit(products, common.chunk_of(a))
    return float(np.linalg.norm(found)), float(np.linalg.norm(products.sum(1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [16, 64, 512, 1024, 4096, 8192])
@pytest.mark.parametrize("one_sign", [True, False])
def test_norms_are_enlarged_by_what_is_cut_off(dtype: torch.dtype, count: int, one_sign: bool) -> None:
    found, truth = _norms(dtype, count, one_sign)
    assert found < truth
    share = 2 * common.truncation(count, torch.empty(0, dtype=dtype))  # of the squared norm, as `finish` adds it
    enlarged = found * (1 + share) ** 0.5
    assert -3e-7 * truth <= enlarged - truth <= 5e-6 * truth, enlarged / truth - 1


def test_float16_loses_more_than_bfloat16() -> None:
    """The share of bfloat16 alone leaves its norms too small, by what ten tests on an H100 saw: 2.3e-6 to 4e-6."""
    products = (torch.rand(400, 1024, generator=torch.Generator().manual_seed(0)) + 0.5).half().double()
    others = (torch.rand(400, 1024, generator=torch.Generator().manual_seed(1)) + 0.5).half().double()
    exact = (products * others).numpy()
    found = np.linalg.norm(by_matrix_unit(exact, 1024)) / np.linalg.norm(exact.sum(1))
    share = 2 * common.truncation(1024, torch.empty(0, dtype=torch.bfloat16))
    assert -6e-6 < found * (1 + share) ** 0.5 - 1 < -2e-6


def test_float32_loses_nothing() -> None:
    assert common.truncation(4096, torch.empty(0)) == 0.0
