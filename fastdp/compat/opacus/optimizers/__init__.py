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

_CLASSES: dict[tuple[str, bool], type[DPOptimizer]] = {
    ("flat", False): DPOptimizer,
    ("flat", True): DistributedDPOptimizer,
    ("per_layer", False): DPPerLayerOptimizer,
    ("per_layer", True): SimpleDistributedPerLayerOptimizer,
    ("adaptive", False): AdaClipDPOptimizer,
}
_GHOST: dict[tuple[str, str, bool], type[DPOptimizer]] = {
    ("ghost", "flat", False): DPOptimizerFastGradientClipping,
    ("ghost", "flat", True): DistributedDPOptimizerFastGradientClipping,
    ("ghost_fsdp", "flat", True): FSDPOptimizerFastGradientClipping,
}


def get_optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str | None = None) -> type[DPOptimizer]:
    """The optimizer of a clipping ("flat", "per_layer", "adaptive") and a mode. Raises ValueError if there is none."""
    said = f"Clipping: {clipping}, distributed: {distributed}, grad_sample_mode: {grad_sample_mode}"
    if grad_sample_mode in ("ghost", "ghost_fsdp"):
        found = _GHOST.get((grad_sample_mode, clipping, distributed))
        if found is None:
            raise ValueError(f"Unsupported combination of parameters. {said}")
        return found
    if (clipping, distributed) == ("per_layer", True) and grad_sample_mode not in ("hooks", "ew"):
        raise ValueError(f"Unexpected grad_sample_mode: {grad_sample_mode}")
    found = _CLASSES.get((clipping, distributed))
    if found is None:
        raise ValueError(f"Unexpected optimizer parameters. {said}")
    return found
