"""Clip factors of squared norms in one launch, on a GPU without nvcc: as `fastdp.ops.clip_factors` says."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdp.ops.clip import SMALL, check
from fastdp.ops.common import GAMMA, KINDS, MARGIN

from .noise import double_of, halves

LARGEST = tl.constexpr(3.4028234663852886e38)
TINY = tl.constexpr(2.0**-126)


@triton.jit(
    do_not_specialize=["B", "limit_high", "limit_low", "gamma_high", "gamma_low", "enlarge_high", "enlarge_low"]
)
def clip_kernel(p_norm_sq, p_out, B, limit_high, limit_low, gamma_high, gamma_low, enlarge_high, enlarge_low,
                KIND: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A block of samples. KIND: the place in KINDS; SMALLEST: below it a square may be rounding, -1 if none is."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    squares = tl.load(p_norm_sq + o, mask=o < B, other=0.0).to(tl.float64)
    limit, gamma = double_of(limit_high, limit_low), double_of(gamma_high, gamma_low)
    norm = tl.sqrt(squares) * double_of(enlarge_high, enlarge_low)
    if KIND == 0:
        factor = tl.minimum(limit / norm, 1.0)
    elif KIND == 1:
        factor = tl.where(norm <= limit, 1.0, 0.0).to(tl.float64)
    else:
        factor = limit / (norm + gamma)
    keep = (norm == norm) & (norm < float("inf")) & (factor >= TINY) & (squares > SMALLEST)
    tl.store(p_out + o, tl.where(keep, tl.minimum(factor, LARGEST), 0.0).to(tl.float32), mask=o < B)


def clip_factors(norm_sq: Tensor, max_grad_norm: float, kind: str = "local", gamma: float = GAMMA) -> Tensor:
    """Factors [B] float32 of squared norms [B]."""
    check(norm_sq, max_grad_norm, kind, gamma)
    out = torch.empty(norm_sq.shape, dtype=torch.float32, device=norm_sq.device)
    smallest = SMALL[norm_sq.dtype] if kind == "automatic" and gamma == 0 else -1.0
    if out.numel():
        with torch.cuda.device_of(norm_sq):
            clip_kernel[(triton.cdiv(out.numel(), 128),)](
                norm_sq.contiguous(), out, out.numel(), *halves(max_grad_norm), *halves(gamma), *halves(1 + MARGIN),
                KIND=KINDS.index(kind), SMALLEST=smallest, BLOCK=128, num_warps=4,
            )  # fmt: skip
    return out
