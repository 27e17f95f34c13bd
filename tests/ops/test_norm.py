"""Affine parameters of layer, RMS and group norm: per-sample gradients of every backend against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdp.ops import group_affine_per_sample, norm_affine_per_sample, rms_affine_per_sample
from fastdp.ops.norm import rms_rstd

from .backends import asked, assert_equal_bits, random, sum_of

ROWS = [(2, 5, 7), (3, 1, 1), (3, 37, 50), (2, 70, 130), (0, 3, 4), (2, 0, 4)]
CHANNELS = [(2, 6, 35), (3, 4, 1), (3, 12, 5, 31), (2, 70, 9, 9), (0, 4, 3)]


def data(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return (2 * random(*shape) + 5).to(device, dtype), random(*shape, dtype=dtype, seed=1).to(device)


def truth(norm: Callable[..., Tensor], x: Tensor, g: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias of each sample alone, [B, size]."""
    weights, biases = (x.new_zeros(x.size(0), size).double() for _ in range(2))
    for b in range(x.size(0) if x.numel() else 0):
        parameters = [torch.zeros(size, dtype=torch.float64, device=x.device, requires_grad=True) for _ in range(2)]
        out = norm(x[b : b + 1].double().contiguous(), *parameters)
        weights[b], biases[b] = torch.autograd.grad(out, parameters, g[b : b + 1].double().contiguous())
    return weights, biases


def assert_close(found: Tensor, exact: Tensor, terms: Tensor, dtype: torch.dtype) -> None:
    """terms: the sum of the summands' absolute values; statistics are given in float32."""
    assert found.dtype == sum_of(dtype)
    assert ((found.double() - exact).abs() <= (1e-12 if dtype == torch.float64 else 1e-6) * terms + 1e-30).all()


def check_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    x, g = data(shape, dtype, device)
    d, wide, sizes = shape[-1], x.double(), g.double().abs()
    mean, rstd = wide.mean(-1), (wide.var(-1, unbiased=False) + 1e-5).rsqrt()
    exact = truth(lambda v, w, b: F.layer_norm(v, (d,), w, b), x, g, d)
    found = norm_affine_per_sample(x, g, mean.to(sum_of(dtype)), rstd.to(sum_of(dtype)).unsqueeze(-1))
    scale = (wide.abs() + mean.abs().unsqueeze(-1)) * rstd.unsqueeze(-1)
    assert_close(found[0], exact[0], (sizes * scale).sum(1), dtype)
    assert_close(found[1], exact[1], sizes.sum(1), dtype)
    of_squares = (wide.square().mean(-1) + 1e-6).rsqrt()
    torch.testing.assert_close(rms_rstd(x, 1e-6).double(), of_squares, rtol=1e-6, atol=0)
    terms = g.double() * wide * of_squares.unsqueeze(-1)
    found = rms_affine_per_sample(x, g, of_squares.to(sum_of(dtype)))
    assert_close(found, terms.sum(1), terms.abs().sum(1), dtype)


def check_channels(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    x, g = data(shape, dtype, device)
    if len(shape) == 4:
        x, g = (y.to(memory_format=torch.channels_last) for y in (x, g))
    channels = shape[1]
    for groups in (1, 2, channels):
        wide = x.double().reshape(shape[0], groups, channels // groups * math.prod(shape[2:]))
        mean, rstd = wide.mean(-1).nan_to_num(), (wide.var(-1, unbiased=False) + 1e-5).rsqrt().nan_to_num()
        exact = truth(lambda v, w, b, n=groups: torch.group_norm(v, n, w, b), x, g, channels)
        found = group_affine_per_sample(x, g, mean.to(sum_of(dtype)), rstd.to(sum_of(dtype)), groups)
        each = [s.repeat_interleave(channels // groups, 1).view(*shape[:2], *[1] * (x.dim() - 2)) for s in (mean, rstd)]
        terms = (g.double().abs() * (x.double().abs() + each[0].abs()) * each[1]).flatten(2).sum(2)
        assert_close(found[0], exact[0], terms, dtype)
        assert_close(found[1], exact[1], g.double().abs().flatten(2).sum(2), dtype)
        x, g = x.contiguous(), g.contiguous()


@asked(ROWS, [(4, 37, 300), (1, 200, 513)])
def test_layer_and_rms_norm(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_rows(shape, dtype)


@asked(CHANNELS, [(1, 4, 600), (2, 12, 16, 17)])
def test_group_norm(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_channels(shape, dtype)


def test_strides_do_not_matter_and_a_bad_number_stays_in_its_sample(backend: str) -> None:
    x, g = data((3, 6, 40), torch.float32)
    mean, rstd = x.mean(-1), x.std(-1)
    of_groups = x.mean((1, 2)), x.std((1, 2))
    calls = (lambda: norm_affine_per_sample(x, g, mean, rstd), lambda: (rms_affine_per_sample(x, g, rstd),),
             lambda: group_affine_per_sample(x, g, *of_groups, 1))  # fmt: skip
    clean = [call() for call in calls]
    x, g, mean = x.mT.contiguous().mT, g.mT.contiguous().mT, mean.t().contiguous().t()
    for call, known in zip(calls, clean, strict=True):
        torch.testing.assert_close(call(), known)
    x[1, 2, 3] = math.nan
    for call, known in zip(calls, clean, strict=True):
        found = call()[0]
        assert not found[1].isfinite().all()
        torch.testing.assert_close(found[[0, 2]], known[0][[0, 2]])
    large = 1e30 * g  # whose squares float32 does not hold
    torch.testing.assert_close(rms_rstd(large, 1e-6), large.double().square().mean(2).rsqrt().float())
    assert rms_rstd(x[:0], 1e-6).shape == (0, 6)


def test_threads_change_no_bit() -> None:
    x, g = data((5, 60, 517), torch.float32)
    rows, groups = (x.mean(-1), x.std(-1)), (x.mean((1, 2)), x.std((1, 2)))
    run = lambda: [*norm_affine_per_sample(x, g, *rows), *group_affine_per_sample(x, g, *groups, 1)]
    assert_equal_bits(run, (1, 2, 3, 7))
