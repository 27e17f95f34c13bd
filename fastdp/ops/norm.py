"""Per-sample gradients of an affine map of normalised values: weight sum_t g_t xhat_t, bias sum_t g_t."""

from __future__ import annotations

from torch import Tensor

from .common import accumulate


def norm_affine_per_sample(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm: x, g [B,T,d]; mean, rstd [B,T] or [B,T,1] -> weight's and bias's gradients, [B,d] each."""
    x, g = accumulate(x), accumulate(g)
    mean, rstd = (m if m.dim() == x.dim() else m.unsqueeze(-1) for m in (mean, rstd))
    xhat = (x - mean) * rstd
    return (g * xhat).sum(1), g.sum(1)
