"""The optimizer of mode "ghost" in a process group: of one process so far."""

from __future__ import annotations

from ..distributed import OfOneProcess
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


class DistributedDPOptimizerFastGradientClipping(OfOneProcess, DPOptimizerFastGradientClipping):
    """As DPOptimizerFastGradientClipping; errors of `OfOneProcess`."""
