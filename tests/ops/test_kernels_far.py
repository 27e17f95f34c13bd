"""Numbers more than 2^31 elements apart, in a file with holes: offsets of 32 bits would end up elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from .kernels_truth import check_close, check_norms, linear_gradients, numbers, weighted

pytest.importorskip("triton")
from fastdp.kernels import clipped, conv, linear, many, rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_device.py has the test for a GPU")
FAR = 2**28  # 11 columns so far apart are 2^31.4 elements
B, T, I, O = 2, 20, 18, 11  # noqa: E741


@pytest.fixture
def far(tmp_path: Path):
    """Copies of tensors, with one of their dimensions FAR apart."""
    made = []

    def spread(x: Tensor, dim: int) -> Tensor:
        near = [size for d, size in enumerate(x.shape) if d != dim]
        strides = list(torch.empty(near, device="meta").stride())
        strides.insert(dim, FAR)
        size = (x.size(dim) - 1) * FAR + x.numel()
        whole = torch.from_file(str(tmp_path / str(len(made))), shared=True, size=size, dtype=x.dtype)
        made.append(whole)
        return whole.as_strided(x.shape, strides).copy_(x)

    return spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 2])
def test_products(dim: int, dtype: torch.dtype, far) -> None:
    """Rows or columns apart, as those of a convolution of 1 x 1 on an image of 2^28 pixels."""
    a, g = numbers(B, T, I, dtype=dtype), numbers(B, T, O, dtype=dtype, seed=1)
    truth, c = linear_gradients(a, g), torch.tensor([0.5, 2.0])
    x, y = far(a, dim), far(g, dim)
    for method in ("gram", "direct"):
        norms, bound = linear._norms(x, y, method, torch.float64, linear.Tile(16, 16, 16, 4, 2), (1.0, 1e9))
        check_norms(norms, truth, truth.float().flatten(1).square().sum(1))
        sizes = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
        torch.testing.assert_close(bound, sizes, rtol=1e-4, atol=0)
    tile = linear.Tile(16, 16, 16, 4, 2)
    total = torch.empty(O, I)
    clipped._launch(x, y, c, total, False, tile, 1)
    check_close(total, weighted(truth, c), weighted(truth, c).float())
    check_close(linear.linear_per_sample(x, y, tile=tile), truth, truth.float())


@pytest.mark.parametrize("t", [1, 40])
def test_sums_into_far_memory(t: int, far) -> None:
    a, g = numbers(B, t, O, dtype=torch.bfloat16), numbers(B, t, I, dtype=torch.bfloat16, seed=1)
    out, c = far(torch.zeros(I, O), 1), torch.tensor([0.5, 2.0])
    for parts in (1, 2):
        clipped.linear_clipped_sum(a, g, c, out, tile=linear.Tile(16, 16, 16, 4, 2), parts=parts)
    truth = 2 * weighted(linear_gradients(a, g), c)
    check_close(out, truth, truth.float())


def test_one_position(far) -> None:
    a, g = numbers(B, I), numbers(B, O, seed=1)
    truth = linear_gradients(a, g)
    found = linear.linear_norm_sq(far(a, 1), far(g, 1))
    check_norms(found, truth, truth.float().flatten(1).square().sum(1))


def test_stored_rows(far) -> None:
    x, c = numbers(3, 12), torch.tensor([0.5, 2.0, 1.0])
    for dim in (0, 1):
        y = far(x, dim)
        torch.testing.assert_close(rows.square_sum(y), x.double().square().sum(1), rtol=1e-12, atol=0)
        torch.testing.assert_close(rows.weighted_sum(y, c), c @ x, rtol=1e-5, atol=1e-5)


def test_layers_far_apart(far) -> None:
    """Addresses are of 64 bits anyway; rows within a layer are far apart, too."""
    pairs = [(far(numbers(B, T, 16, seed=n), 1), far(numbers(B, T, 16, seed=n + 5), 1)) for n in range(2)]
    found = many.linear_norm_sq(pairs, "gram", 1e-6, 5e-5)
    for row, (x, y) in zip(found, pairs, strict=True):
        truth = linear_gradients(x, y)
        check_norms(row, truth, truth.float().flatten(1).square().sum(1))


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("method", ["gram", "direct"])
def test_convolutions(method: str, dim: int, far) -> None:
    x, g = numbers(1, 10, 10, 10), numbers(1, 3, 10, 10, seed=1)
    weight = torch.zeros(3, 10, 3, 3)
    truth = torch.ops.aten.convolution_backward(
        g.double(), x.double(), weight.double(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1].unsqueeze(0)
    found = conv.conv_norm_sq(far(x, dim), g, 3, 1, 1, 1, 1, method)
    check_norms(found, truth, truth.float().flatten(1).square().sum(1))
