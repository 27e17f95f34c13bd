"""Per-layer clipping in a process group."""

from __future__ import annotations

from typing import Any

from torch import nn

from ....ops.clip import clip_factors
from ..grad_sample import samples
from .ddpoptimizer import DistributedDPOptimizer
from .perlayeroptimizer import DPPerLayerOptimizer
from .sums import norm_sq, sums


def _clip_and_accumulate_parameter(p: nn.Parameter, max_grad_norm: float) -> None:
    """Clip the per-sample gradients of one parameter, and add their sum to `p.summed_grad`."""
    held: Any = p
    part = [(p, samples.peek(p))]
    with samples.outside():
        total = sums(part, clip_factors(norm_sq(part), float(max_grad_norm)))[id(p)]
    held.summed_grad = total if held.summed_grad is None else held.summed_grad + total


class SimpleDistributedPerLayerOptimizer(DPPerLayerOptimizer, DistributedDPOptimizer):
    """DPPerLayerOptimizer in a process group; errors of `DistributedDPOptimizer`."""


class DistributedPerLayerOptimizer(SimpleDistributedPerLayerOptimizer):
    """Opacus clips within its data-parallel hooks here; fastdp has none."""
