"""Clip factors from norms: what each sample's gradient is multiplied by."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("local", "global", "automatic")
GAMMA = 0.01
# A norm may come out too small by rounding; factors are computed for a norm larger by this share, so that no
# contribution exceeds the clipping norm. Float32 accumulation errs by about 1e-7 to 1e-6 here.
MARGIN = 4e-6


def clip_factors(norm_sq: Tensor, max_grad_norm: float, kind: str = "local", gamma: float = GAMMA) -> Tensor:
    """Factors c with c * norm <= max_grad_norm, [B] float32, 0 where the norm is not finite.

    local: min(1, R / n) (Abadi et al. 2016); global: 1[n <= R], 0 or 1 (Bu et al., Convergence and
    calibration of DP deep learning); automatic: R / (n + gamma) (Bu et al. 2023, arXiv 2206.07136).
    Raises ValueError on an unknown kind.
    """
    norm = norm_sq.sqrt() * (1 + MARGIN)
    if kind == "local":
        factors = (max_grad_norm / norm).clamp(max=1.0)
    elif kind == "global":
        factors = (norm <= max_grad_norm).to(norm.dtype)
    elif kind == "automatic":
        factors = max_grad_norm / (norm + gamma)
    else:
        raise ValueError(f"clipping must be one of {', '.join(KINDS)} or a callable, not {kind!r}")
    keep = torch.isfinite(norm)
    if kind == "automatic" and gamma == 0:
        keep &= norm > 0
    return torch.where(keep, factors, torch.zeros_like(factors))
