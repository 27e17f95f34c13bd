"""Logits of tokens turned into the gradients of their cross-entropy, in place: each row is read twice and written once.

The products around it are cuBLAS's. With the log-sum-exps at hand (of logits that are computed again) a row is read
once. No number of a row meets another row. The running maximum: Milakov and Gimelshein 2018, arXiv 1805.02867.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import kernel

BLOCK = 2048


@triton.jit
def _tanh(x):
    """tanh, to the rounding of float32 for small numbers, too."""
    t = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - t) / (1.0 + t)
    large = tl.where(x < 0, -large, large)
    square = x * x
    small = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.2, small, large)


@triton.jit
def _scores(z, scale, cap, SOFTCAP: tl.constexpr):
    """Scores of logits, and their slope."""
    z = z * scale
    slope = scale + z * 0.0
    if SOFTCAP:
        t = _tanh(z / cap)
        slope = scale * (1.0 - t * t)
        z = cap * t
    return z, slope


@kernel
def head_loss_kernel(
    p_z, p_label, p_lse, p_at, p_mean, V, low, words, stride, scale, cap, smoothing, z_loss,
    KNOWN: tl.constexpr, WRITE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: logits [V] of words [low, low + V)."""
    row = tl.program_id(0).to(tl.int64)
    p_z += row * stride
    o_v = tl.arange(0, BLOCK)
    label = tl.load(p_label + row) - low
    if KNOWN:
        lse = tl.load(p_lse + row)
    else:
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        added = tl.zeros([BLOCK], tl.float32)
        at = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            o = start + o_v
            z = tl.load(p_z + o, mask=o < V, other=0.0)
            s, _ = _scores(z, scale, cap, SOFTCAP)
            added += tl.where(o < V, s, 0.0)
            at += tl.where(o == label, s, 0.0)
            s = tl.where(o < V, s, -float("inf"))
            higher = tl.maximum(top, s)
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - safe) + tl.exp(s - safe)
            top = higher
        most = tl.max(top, 0)
        safe = tl.where(most == -float("inf"), 0.0, most)
        lse = safe + tl.log(tl.sum(total * tl.exp(top - safe), 0))
        tl.store(p_lse + row, lse)
        tl.store(p_at + row, tl.sum(at, 0))
        tl.store(p_mean + row, tl.sum(added, 0) / words)
    if WRITE:
        factor = 1.0 + 2.0 * z_loss * lse
        for start in range(0, V, BLOCK):
            o = start + o_v
            z = tl.load(p_z + o, mask=o < V, other=0.0)
            s, slope = _scores(z, scale, cap, SOFTCAP)
            g = tl.exp(s - lse) * factor - smoothing / words - tl.where(o == label, 1.0 - smoothing, 0.0)
            tl.store(p_z + o, g * slope, mask=o < V)


def gradient_(
    z: Tensor, labels: Tensor, low: int, words: int, scale: float = 1.0, softcap: float | None = None,
    smoothing: float = 0.0, z_loss: float = 0.0, lse: Tensor | None = None, write: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Turn logits into the gradients of each token's loss by them, in place.

    Args:
        z: float32 [N, V], the logits of words [low, low + V) of `words`, contiguous.
        labels: int64 [N].
        scale, softcap, smoothing, z_loss: as for `fastdp.losses.linear_cross_entropy`.
        lse: log-sum-exps [N], if they are known; else they are computed, of the words at hand.
        write: whether to write gradients, or leave the logits.

    Returns:
        Log-sum-exps, the scores of the labels, and the means of scores over all words: [N] each. The last two are not
        written if lse is given.
    """
    found = [z.new_empty(z.size(0)) for _ in range(3)]
    if lse is not None:
        found[0] = lse.contiguous()
    if z.numel():
        with torch.cuda.device_of(z):
            head_loss_kernel[(z.size(0),)](
                z, labels.contiguous(), *found, z.size(1), low, words, z.stride(0), float(scale), float(softcap or 1.0),
                float(smoothing), float(z_loss), KNOWN=lse is not None, WRITE=write, SOFTCAP=softcap is not None,
                BLOCK=min(BLOCK, max(16, triton.next_power_of_2(z.size(1)))), num_warps=8,
            )  # fmt: skip
    return found[0], found[1], found[2]
