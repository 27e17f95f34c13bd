"""Affine parameters of layer, RMS and group norm: per-sample gradients against autograd in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdp.ops import group_affine_per_sample, norm_affine_per_sample, rms_affine_per_sample

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROWS = [(3, 1, 1), (2, 5, 7), (4, 37, 300), (1, 200, 513), (0, 3, 4), (2, 0, 4)]
CHANNELS = [(3, 4, 1), (2, 6, 35), (2, 12, 16, 17), (1, 4, 600), (0, 4, 3)]


def data(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return (2 * x + 5).to(dtype), g.to(dtype)


def truth(norm: Callable[..., Tensor], x: Tensor, g: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias of each sample alone, [B, size]."""
    weights, biases = x.new_zeros(x.size(0), size).double(), x.new_zeros(x.size(0), size).double()
    for b in range(x.size(0)):
        parameters = [torch.zeros(size, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        out = norm(x[b : b + 1].double(), *parameters)
        weights[b], biases[b] = torch.autograd.grad(out, parameters, g[b : b + 1].double())
    return weights, biases


def assert_close(found: Tensor, exact: Tensor, terms: Tensor, kind: torch.dtype) -> None:
    """terms: the sum of the summands' absolute values; statistics are given in float32."""
    assert found.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    assert ((found.double() - exact).abs() <= (1e-12 if kind == torch.float64 else 1e-6) * terms + 1e-30).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_layer_norm(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, g = data(shape, dtype)
    d = shape[-1]
    wide = x.double()
    mean = wide.mean(-1)
    rstd = (wide.var(-1, unbiased=False) + 1e-5).rsqrt()
    exact = truth(lambda v, w, b: F.layer_norm(v, (d,), w, b), x, g, d)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    found = norm_affine_per_sample(x, g, mean.to(kind), rstd.to(kind).unsqueeze(-1))
    scale = (x.double().abs() + mean.abs().unsqueeze(-1)) * rstd.unsqueeze(-1)
    assert_close(found[0], exact[0], (g.double().abs() * scale).sum(1), dtype)
    assert_close(found[1], exact[1], g.double().abs().sum(1), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_rms_norm(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, g = data(shape, dtype)
    rstd = (x.double().square().mean(-1) + 1e-6).rsqrt()
    exact = (g.double() * x.double() * rstd.unsqueeze(-1)).sum(1)
    found = rms_affine_per_sample(x, g, rstd.to(torch.float64 if dtype == torch.float64 else torch.float32))
    assert_close(found, exact, (g.double() * x.double() * rstd.unsqueeze(-1)).abs().sum(1), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", CHANNELS)
@pytest.mark.parametrize("groups", [1, 2, None])
def test_group_norm(backend: str, groups: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, g = data(shape, dtype)
    channels = shape[1]
    groups = groups or channels
    wide = x.double().reshape(shape[0], groups, channels // groups * x[:1, :1].numel() if shape[0] else 1)
    mean, rstd = wide.mean(-1), (wide.var(-1, unbiased=False) + 1e-5).rsqrt()
    exact = truth(lambda v, w, b: torch.group_norm(v, groups, w, b), x, g, channels)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    found = group_affine_per_sample(x, g, mean.to(kind), rstd.to(kind), groups)
    each = channels // groups
    wide_mean, wide_rstd = (
        s.repeat_interleave(each, 1).view(*shape[:2], *[1] * (len(shape) - 2)) for s in (mean, rstd)
    )
    terms = (g.double().abs() * (x.double().abs() + wide_mean.abs()) * wide_rstd).flatten(2).sum(2)
    assert_close(found[0], exact[0], terms, dtype)
    assert_close(found[1], exact[1], g.double().abs().flatten(2).sum(2), dtype)


def test_a_nan_stays_in_its_sample_and_layouts_do_not_matter(backend: str) -> None:
    x, g = data((3, 6, 40), torch.float32)
    mean, rstd = x.mean(-1), x.std(-1)
    clean = norm_affine_per_sample(x, g, mean, rstd)
    turned = norm_affine_per_sample(x.mT.contiguous().mT, g.mT.contiguous().mT, mean.t().contiguous().t(), rstd)
    torch.testing.assert_close(clean, turned)
    x[1, 2, 3] = float("nan")
    assert torch.equal(norm_affine_per_sample(x, g, mean, rstd)[0][[0, 2]], clean[0][[0, 2]])
    with pytest.raises(ValueError):
        norm_affine_per_sample(x, g[:2], mean, rstd)
    with pytest.raises(ValueError):
        norm_affine_per_sample(x, g, mean[:, :3], rstd)
    with pytest.raises(ValueError):
        group_affine_per_sample(x, g, mean, rstd, 4)


def test_threads_change_no_bit() -> None:
    x, g = data((5, 60, 517), torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(norm_affine_per_sample(x, g, x.mean(-1), x.std(-1)))
            found[-1] += group_affine_per_sample(x, g, x.mean((1, 2)), x.std((1, 2)), 1)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


def test_operators_are_registered_soundly() -> None:
    x, g = data((2, 6, 8), torch.float32)
    torch.library.opcheck(torch.ops.fastdp.norm_affine_per_sample.default, (x, g, x.mean(-1), x.std(-1)))
    torch.library.opcheck(torch.ops.fastdp.rms_affine_per_sample.default, (x, g, x.std(-1)))
    statistics = (torch.zeros(2, 3), torch.ones(2, 3))
    torch.library.opcheck(torch.ops.fastdp.group_affine_per_sample.default, (x, g, *statistics, 3))
