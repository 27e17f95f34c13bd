"""Per-sample gradients of an affine map of normalised values: weight sum_t g_t xhat_t, bias sum_t g_t.

xhat = (x - mean) * rstd with each sample's own statistics; all are so small ([B, d]) that they are kept. One pass
over x and g; sums in double on the CPU. Formula: the chain rule on out = xhat * weight + bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import extension
from .common import DTYPES, accumulate, sum_type
from .registry import cpp, define, native, triton


def _rows(x: Tensor, g: Tensor, *statistics: Tensor) -> list[Tensor]:
    """x, g [B,T,d] or [B,d] as [B,T,d], and statistics [B,T], [B,T,1] (or [B], [B,1]) as [B,T]."""
    if x.shape != g.shape or x.dim() not in (2, 3):
        raise ValueError(f"expected x and g [B,T,d], or [B,d]; got {tuple(x.shape)} and {tuple(g.shape)}")
    rows = tuple(x.shape[:-1])
    if any(tuple(s.shape) not in (rows, (*rows, 1)) or s.is_complex() for s in statistics):
        raise ValueError(f"expected a real statistic for each row, {rows}; got {[tuple(s.shape) for s in statistics]}")
    x, g = (v.unsqueeze(1) if v.dim() == 2 else v for v in (x, g))
    return [x, g, *(s.reshape(x.shape[:2]).to(sum_type(x)) for s in statistics)]


def _grouped(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, num_groups: int) -> list[Tensor]:
    if x.shape != g.shape or x.dim() < 2 or num_groups < 1 or x.size(1) % num_groups:
        raise ValueError(f"expected x and g [B,C,*], C a multiple of {num_groups}; got {x.shape} and {g.shape}")
    shape = (x.size(0), num_groups)
    sizes = [[size for size in each if size != 1] for each in (shape, mean.shape, rstd.shape)]
    if sizes[1:] != sizes[:1] * 2 or mean.is_complex() or rstd.is_complex():
        raise ValueError(f"expected real mean and rstd {shape}; got {tuple(mean.shape)} and {tuple(rstd.shape)}")
    kind = sum_type(x)
    positions = x[0, 0].numel() if x.size(0) * x.size(1) else 0
    return [v.reshape(*x.shape[:2], positions) for v in (x, g)] + [s.reshape(shape).to(kind) for s in (mean, rstd)]


def _layer(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    x, g, mean, rstd = _rows(accumulate(x), accumulate(g), mean, rstd)
    xhat = (x - mean.unsqueeze(2)) * rstd.unsqueeze(2)
    return (g * xhat).sum(1), g.sum(1)


def _rms(x: Tensor, g: Tensor, rstd: Tensor) -> Tensor:
    x, g, rstd = _rows(accumulate(x), accumulate(g), rstd)
    return (g * (x * rstd.unsqueeze(2))).sum(1)


def _group(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    x, g, mean, rstd = _grouped(accumulate(x), accumulate(g), mean, rstd, num_groups)
    each = x.size(1) // num_groups
    mean, rstd = (s.repeat_interleave(each, 1).unsqueeze(2) for s in (mean, rstd))
    return (g * ((x - mean) * rstd)).sum(2), g.sum(2)


# ---------------------------------------------------------------------- C++


def _native_rows(x: Tensor, g: Tensor, mean: Tensor | None, rstd: Tensor, want_bias: bool) -> tuple[Tensor, Tensor]:
    statistics = [s for s in (mean, rstd) if s is not None]
    rows, kind = x.shape[:2], sum_type(x)
    if x.dim() != 3 or g.shape != x.shape or any(s.shape != rows or s.dtype != kind for s in statistics):
        x, g, *statistics = _rows(x, g, *statistics)
    x, g, *statistics = (v if v.is_contiguous() else v.contiguous() for v in (x, g, *statistics))
    weight = torch.empty(x.size(0), x.size(2), dtype=kind)
    bias = torch.empty_like(weight) if want_bias else weight
    module: Any = native()
    module.norm_affine(x.data_ptr(), g.data_ptr(), DTYPES[x.dtype], 0 if mean is None else statistics[0].data_ptr(),
                       statistics[-1].data_ptr(), *x.shape, weight.data_ptr(), bias.data_ptr() if want_bias else 0,
                       torch.get_num_threads())  # fmt: skip
    return weight, bias


def _native_layer(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype not in DTYPES or g.dtype != x.dtype:
        return _layer(x, g, mean, rstd)
    return _native_rows(x, g, mean, rstd, True)


def _native_rms(x: Tensor, g: Tensor, rstd: Tensor) -> Tensor:
    if x.dtype not in DTYPES or g.dtype != x.dtype:
        return _rms(x, g, rstd)
    return _native_rows(x, g, None, rstd, False)[0]


def _native_group(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    if x.dtype not in DTYPES or g.dtype != x.dtype:
        return _group(x, g, mean, rstd, num_groups)
    x, g, mean, rstd = (v.contiguous() for v in _grouped(x, g, mean, rstd, num_groups))
    weight = torch.empty(x.shape[:2], dtype=sum_type(x))
    bias = torch.empty_like(weight)
    module: Any = native()
    module.group_affine(x.data_ptr(), g.data_ptr(), DTYPES[x.dtype], mean.data_ptr(), rstd.data_ptr(), *x.shape,
                        num_groups, weight.data_ptr(), bias.data_ptr(), torch.get_num_threads())  # fmt: skip
    return weight, bias


# ---------------------------------------------------------------------- operators


def _like(x: Tensor, last: int) -> Tensor:
    return x.new_empty(x.size(0), x.size(last), dtype=sum_type(x))


_layer_op = define(
    "norm_affine_per_sample(Tensor x, Tensor g, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
    _layer,
    lambda x, g, mean, rstd: (_like(x, -1), _like(x, -1)),
    CPU=cpp(_native_layer), CUDA=triton("norm", "norm_affine_per_sample"),
)  # fmt: skip
_rms_op = define(
    "rms_affine_per_sample(Tensor x, Tensor g, Tensor rstd) -> Tensor",
    _rms,
    lambda x, g, rstd: _like(x, -1),
    CPU=cpp(_native_rms), CUDA=triton("norm", "rms_affine_per_sample"),
)  # fmt: skip
_group_op = define(
    "group_affine_per_sample(Tensor x, Tensor g, Tensor mean, Tensor rstd, int num_groups) -> (Tensor, Tensor)",
    _group,
    lambda x, g, mean, rstd, num_groups: (_like(x, 1), _like(x, 1)),
    CPU=cpp(_native_group), CUDA=triton("norm", "group_affine_per_sample"),
)  # fmt: skip


def norm_affine_per_sample(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm: the gradients of weight and bias, [B,d] float32 each (float64 for float64 x).

    Args:
        x: inputs, [B,T,d] or [B,d].
        g: output gradients, shaped like x.
        mean: the means of the rows, [B,T] or [B,T,1].
        rstd: the reciprocal standard deviations of the rows, shaped like mean.

    Raises:
        ValueError: if a shape is wrong.
    """
    return _layer_op(x, g, mean, rstd)  # type: ignore[no-any-return]


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) of each row of x [B,T,d]: [B,T] in the type of sums."""
    if (kernels := extension.on_device("norm", x)) is not None:
        return kernels.rms_rstd(x, eps)  # type: ignore[no-any-return]
    sizes = torch.linalg.vector_norm(x, dim=2, dtype=sum_type(x))
    return sizes.square().div_(x.size(2)).add_(eps).rsqrt_()


def rms_affine_per_sample(x: Tensor, g: Tensor, rstd: Tensor) -> Tensor:
    """RMS norm: the gradient of the weight, [B,d].

    The arguments are those of `norm_affine_per_sample`, with rstd = 1 / root mean square.
    """
    return _rms_op(x, g, rstd)  # type: ignore[no-any-return]


def group_affine_per_sample(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Group norm: x, g [B,C,*]; mean, rstd [B,num_groups] -> the gradients of weight and bias, [B,C] each.

    Instance norm has num_groups = C. Raises ValueError if a shape is wrong.
    """
    return _group_op(x, g, mean, rstd, num_groups)  # type: ignore[no-any-return]
