"""Clip factors from norms: what each sample's gradient is multiplied by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import GAMMA as GAMMA
from .common import KINDS as KINDS
from .common import MARGIN as MARGIN
from .noise import on_cuda
from .registry import define, triton

TINY = 2.0**-126  # float32's smallest normal number: a factor below it would be rounded by more than any margin
# Below it a squared norm of float32 may have lost what its parts were: gradients this small are not told from 0.
SMALL = {torch.float32: 2.0**-100, torch.float64: 0.0}


def check(norm_sq: Tensor, max_grad_norm: float, kind: str, gamma: float) -> None:
    """Raises ValueError or TypeError if something is out of range."""
    if kind not in KINDS:
        raise ValueError(f"clipping must be one of {', '.join(KINDS)} or a callable, not {kind!r}")
    if norm_sq.dtype not in SMALL:
        raise TypeError(f"squared norms are float32 or float64, not {norm_sq.dtype}")
    if not (0 < max_grad_norm < math.inf and 0 <= gamma < math.inf):
        raise ValueError(f"max_grad_norm must be positive and gamma not negative, not {max_grad_norm} and {gamma}")


def _factors(norm_sq: Tensor, max_grad_norm: float, kind: str = "local", gamma: float = GAMMA) -> Tensor:
    check(norm_sq, max_grad_norm, kind, gamma)
    norm = norm_sq.double().sqrt() * (1 + MARGIN)  # the rounding of all that follows is far inside the margin
    if kind == "local":
        factors = (max_grad_norm / norm).clamp(max=1.0)
    elif kind == "global":
        factors = (norm <= max_grad_norm).double()
    else:  # a factor that float32 cannot hold (of tiny norms) is as large as may be
        factors = (max_grad_norm / (norm + gamma)).clamp(max=torch.finfo(torch.float32).max)
    keep = factors >= TINY  # false of a norm that is infinite or no number
    if kind == "automatic" and gamma == 0:
        keep &= norm_sq > SMALL[norm_sq.dtype]
    return torch.where(keep, factors, 0.0).float()


_factors_op = define(
    "clip_factors(Tensor norm_sq, float max_grad_norm, str kind='local', float gamma=0.01) -> Tensor",
    _factors,
    lambda norm_sq, max_grad_norm, kind="local", gamma=GAMMA: norm_sq.new_empty(norm_sq.shape, dtype=torch.float32),
    CUDA=on_cuda("clip_factors", instead=triton("clip", "clip_factors")),
)


def clip_factors(norm_sq: Tensor, max_grad_norm: float, kind: str = "local", gamma: float = GAMMA) -> Tensor:
    """Factors c with c * norm <= max_grad_norm in exact arithmetic: [B] float32. They are 0 if the norm is not finite.

    Factors below float32's smallest normal number are 0. Under gamma = 0, so are those of zero gradients, and of
    float32 squares below 2^-100, which may be rounding.

    Args:
        norm_sq: squared norms [B], float32 or float64. n is their root, enlarged by the share MARGIN.
        max_grad_norm: the clipping norm R.
        kind: "local" for min(1, R / n) (Abadi et al. 2016, arXiv 1607.00133), "global" for 1[n <= R] (Bu et al. 2023,
            arXiv 2106.07830), or "automatic" for R / (n + gamma) (Bu et al. 2023, arXiv 2206.07136).
        gamma: the constant of automatic clipping, 0 or larger.

    Raises:
        ValueError: if the kind is unknown.
        TypeError: if norm_sq has another type.
    """
    return _factors_op(norm_sq, max_grad_norm, kind, gamma)  # type: ignore[no-any-return]
