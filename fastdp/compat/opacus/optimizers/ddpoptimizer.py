"""DPOptimizer in a process group: of one process so far."""

from __future__ import annotations

from ..distributed import OfOneProcess
from .optimizer import DPOptimizer


class DistributedDPOptimizer(OfOneProcess, DPOptimizer):
    """As DPOptimizer; errors of `OfOneProcess`."""
