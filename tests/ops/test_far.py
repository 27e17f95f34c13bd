"""Numbers more than 2^31 elements apart, in a file with holes: offsets of 32 bits would end up elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastdp.ops import (
    conv_norm_sq,
    linear,
    linear_clipped_sum,
    linear_norm_sq,
    linear_per_sample,
    square_sum,
    weighted_sum,
)

from .backends import TRITON, assert_norms, assert_sums, random, weighted
from .test_conv import truth as conv_truth
from .test_linear import truth

# test_device.py has the test for a GPU
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", TRITON[1:], indirect=True)]
FAR = 2**28  # 11 columns so far apart are 2^31.4 elements
B, T, I, O = 2, 20, 18, 11  # noqa: E741


@pytest.fixture
def far(tmp_path: Path):
    """Copies of tensors, with one of their dimensions FAR apart."""
    made = []

    def spread(x: Tensor, dim: int) -> Tensor:
        strides = list(torch.empty([size for d, size in enumerate(x.shape) if d != dim], device="meta").stride())
        strides.insert(dim, FAR)
        size = (x.size(dim) - 1) * FAR + x.numel()
        whole = torch.from_file(str(tmp_path / str(len(made))), shared=True, size=size, dtype=x.dtype)
        made.append(whole)
        return whole.as_strided(x.shape, strides).copy_(x)

    return spread


@pytest.mark.parametrize("dim", [1, 2])
def test_products(backend: str, dim: int, far) -> None:
    """Rows or columns apart, as those of a convolution of 1 x 1 on an image of 2^28 pixels."""
    a, g, c = random(B, T, I), random(B, T, O, seed=1), torch.tensor([0.5, 2.0])
    exact, x, y = truth(a, g), far(a, dim), far(g, dim)
    for method in ("gram", "direct"):
        norms, bound = linear.norm_sq_and_bound(x, y, method)
        assert_norms(backend, norms, exact)
        torch.testing.assert_close(bound, linear.norm_sq_and_bound(a, g, method)[1], rtol=1e-4, atol=0)
    assert_sums(linear_per_sample(x, y), exact)
    assert_sums(linear_clipped_sum(x, y, c), weighted(exact, c))
    pairs = [(x, y), (far(a, dim), far(g, dim))]
    for row in linear.norm_sq_of_many(pairs, "gram"):
        assert_norms(backend, row, exact)


@pytest.mark.parametrize("t", [1, 40])
def test_sums_into_far_memory(backend: str, t: int, far) -> None:
    a, g = random(B, t, O, dtype=torch.bfloat16), random(B, t, I, dtype=torch.bfloat16, seed=1)
    out, c = far(torch.zeros(I, O), 1), torch.tensor([0.5, 2.0])
    linear_clipped_sum(a, g, c, out)
    assert_sums(out, weighted(truth(a, g), c))


def test_one_position_and_stored_rows(backend: str, far) -> None:
    a, g = random(B, I), random(B, O, seed=1)
    assert_norms(backend, linear_norm_sq(far(a, 1), far(g, 1)), truth(a[:, None], g[:, None]))
    x, c = random(3, 12), torch.tensor([0.5, 2.0, 1.0])
    for dim in (0, 1):
        y = far(x, dim)
        torch.testing.assert_close(square_sum(y), x.double().square().sum(1), rtol=1e-12, atol=0)
        torch.testing.assert_close(weighted_sum(y, c), c @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_convolutions(backend: str, dim: int, far) -> None:
    x, g = random(1, 10, 10, 10), random(1, 3, 10, 10, seed=1)
    exact = conv_truth(x, g, 3, 1, 1, 1, 1)
    for method in ("gram", "direct"):
        assert_norms(backend, conv_norm_sq(far(x, dim), g, 3, 1, 1, 1, 1, method), exact)
