"""The optimizers of whole models in a process group."""

from __future__ import annotations

from ..distributed import OfProcesses
from .optimizer import DPOptimizer
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from .perlayeroptimizer import DPPerLayerOptimizer


class DistributedDPOptimizer(OfProcesses, DPOptimizer):
    """As DPOptimizer; errors of `OfProcesses`."""


class DistributedDPOptimizerFastGradientClipping(OfProcesses, DPOptimizerFastGradientClipping):
    """As DPOptimizerFastGradientClipping; errors of `OfProcesses`."""


class SimpleDistributedPerLayerOptimizer(DPPerLayerOptimizer, DistributedDPOptimizer):
    """DPPerLayerOptimizer in a process group; errors of `OfProcesses`."""


class DistributedPerLayerOptimizer(SimpleDistributedPerLayerOptimizer):
    """The same: Opacus clips within its data-parallel hooks here, which fastdp does not have."""
