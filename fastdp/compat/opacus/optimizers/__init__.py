"""opacus.optimizers on fastdp's engine."""

from __future__ import annotations

from .adaclipoptimizer import AdaClipDPOptimizer
from .ddpoptimizer import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
)
from .fsdpoptimizer_fast_gradient_clipping import FSDPOptimizerFastGradientClipping
from .optimizer import DPOptimizer
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from .perlayeroptimizer import DPPerLayerOptimizer

__all__ = [
    "AdaClipDPOptimizer",
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "DistributedDPOptimizer",
    "DistributedDPOptimizerFastGradientClipping",
    "FSDPOptimizerFastGradientClipping",
    "SimpleDistributedPerLayerOptimizer",
    "get_optimizer_class",
]

_CLASSES: dict[tuple[str, bool, str], type[DPOptimizer]] = {
    ("flat", False, ""): DPOptimizer,
    ("flat", True, ""): DistributedDPOptimizer,
    ("per_layer", False, ""): DPPerLayerOptimizer,
    ("per_layer", True, ""): SimpleDistributedPerLayerOptimizer,
    ("adaptive", False, ""): AdaClipDPOptimizer,
    ("flat", False, "ghost"): DPOptimizerFastGradientClipping,
    ("flat", True, "ghost"): DistributedDPOptimizerFastGradientClipping,
    ("flat", True, "ghost_fsdp"): FSDPOptimizerFastGradientClipping,
}


def get_optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str | None = None) -> type[DPOptimizer]:
    """The optimizer of a clipping ("flat", "per_layer", "adaptive") and a mode. Raises ValueError if there is none."""
    mode = grad_sample_mode if grad_sample_mode in ("ghost", "ghost_fsdp") else ""
    found = _CLASSES.get((clipping, distributed, mode))
    if found is None:
        raise ValueError(
            f"Unsupported combination of parameters. Clipping: {clipping}, distributed: {distributed}, "
            f"grad_sample_mode: {grad_sample_mode}"
        )
    return found
