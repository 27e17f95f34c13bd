"""The optimizer of mode "ghost" in a process group."""

from __future__ import annotations

from ..distributed import OfProcesses
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


class DistributedDPOptimizerFastGradientClipping(OfProcesses, DPOptimizerFastGradientClipping):
    """As DPOptimizerFastGradientClipping; errors of `OfProcesses`."""
