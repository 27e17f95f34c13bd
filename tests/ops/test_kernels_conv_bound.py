"""Norms of convolutions with their bound, as a device takes them: the operators' own numbers, in fewer launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastdp.ops import bounds
from fastdp.ops import conv as conv_ops
from fastdp.ops.geometry import Geometry

from .by_triton import launches, serve_by_triton
from .kernels_truth import DEVICE, check_norms, conv_gradients, numbers, poisoned

pytest.importorskip("triton")

from fastdp.kernels import rows

PADDED = Geometry((6, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1, False, (0, 0))
POINTWISE = Geometry((6, 4, 1, 1), (1, 1), (0, 0), (1, 1), 1, False, (0, 0))
GROUPED = Geometry((6, 2, 3, 3), (2, 1), (0, 2), (1, 2), 2, False, (0, 0))


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        serve_by_triton(monkeypatch)
    with poisoned():
        yield


def sides(geometry: Geometry, dtype: torch.dtype, batch: int = 3) -> tuple[Tensor, Tensor]:
    """x [B,1,C,*] and g [B,1,O,*]."""
    x = numbers(batch, 1, 4, 6, 7, dtype=dtype)
    k, s, pad, d = geometry.weight[2:], geometry.stride, geometry.padding, geometry.dilation
    out = [(n + 2 * pad[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i, n in enumerate((6, 7))]
    return x, numbers(batch, 1, 6, *out, dtype=dtype, seed=1)


def truth_of(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    rest = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    return conv_gradients(x.squeeze(1), g.squeeze(1), geometry.weight, *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["auto", "gram", "direct"])
@pytest.mark.parametrize("geometry", [PADDED, POINTWISE, GROUPED], ids=["padded", "pointwise", "grouped"])
def test_norms_are_those_of_the_operator(geometry: Geometry, method: str, dtype: torch.dtype) -> None:
    x, g = sides(geometry, dtype)
    found = conv_ops.bounded_norm_sq(x, g, geometry, method)
    truth = truth_of(x, g, geometry)
    assert found.dtype == torch.float64
    check_norms(found, truth, truth.float().flatten(1).square().sum(1))


@pytest.mark.parametrize("method", ["gram", "direct"])
def test_norms_are_enlarged_where_terms_cancel(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant images and gradients whose sum is 0: what is left of the sum is rounding, which the norm must bound."""
    monkeypatch.setattr(rows, "PART", 1024)
    geometry = PADDED._replace(padding=(0, 0))
    x, g = sides(geometry, torch.float32)
    x[1] = 1000.0
    g[1] -= g[1].mean((2, 3), keepdim=True)
    g[1, ..., -1, -1] -= g[1].double().sum((2, 3)).float()
    truth = truth_of(x, g, geometry)
    bound = conv_ops.rounding(x, g, geometry)
    assert bound is not None and truth[1].norm() < 20 * bound[1]
    found = conv_ops.bounded_norm_sq(x, g, geometry, method).sqrt()
    exact = truth.flatten(1).norm(dim=1)
    share = 0.99 if method == "direct" else 0.5  # by gram the bound is of the patches' own sizes
    assert found[1] > exact[1] + share * bound[1]
    torch.testing.assert_close(found[[0, 2]], exact[[0, 2]], rtol=1e-5, atol=0)
    assert (found >= exact * (1 - 1e-6)).all()


@pytest.mark.parametrize("last", [False, True])
def test_the_bound_is_that_of_the_operators(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "TOLERANCE", 0.0)
    x, g = sides(PADDED, torch.bfloat16)
    if last:
        x, g = (t.squeeze(1).contiguous(memory_format=torch.channels_last).unsqueeze(1) for t in (x, g))
    found = conv_ops.bounded_norm_sq(x, g, PADDED, "direct")
    plain = conv_ops.norm_sq(x, g, PADDED, "direct")
    expected = bounds.enlarged(plain, conv_ops.rounding(x, g, PADDED))
    assert (expected > plain * (1 + 5e-6)).all()
    torch.testing.assert_close(found, expected, rtol=5e-7, atol=0)  # the kernel's cut-off products: 2e-7


def test_bad_numbers_and_empty_batches() -> None:
    for method in ("gram", "direct"):
        x, g = sides(PADDED, torch.bfloat16)
        before = conv_ops.bounded_norm_sq(x, g, PADDED, method)
        g[1, 0, 2, 3, 3] = float("inf")
        after = conv_ops.bounded_norm_sq(x, g, PADDED, method)
        assert not after[1].isfinite() and torch.equal(before[[0, 2]], after[[0, 2]])
        assert conv_ops.bounded_norm_sq(x[:0], g[:0], PADDED, method).shape == (0,)
    with pytest.raises(ValueError, match="method"):
        conv_ops.bounded_norm_sq(x, g, PADDED, "fast")


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are counted in the interpreter")
def test_few_launches() -> None:
    x, g = sides(PADDED, torch.bfloat16)
    with launches() as found:
        conv_ops.bounded_norm_sq(x, g, PADDED, "direct")
    assert found == {"conv_kernel": 1, "sides_kernel": 1, "enlarge_kernel": 1}
    with launches() as found:
        conv_ops.bounded_norm_sq(x, g, PADDED, "gram")
    assert found == {"conv_gram_kernel": 1, "finish_kernel": 1}
