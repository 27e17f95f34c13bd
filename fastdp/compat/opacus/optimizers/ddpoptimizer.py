"""DPOptimizer in a process group."""

from __future__ import annotations

from ..distributed import OfProcesses
from .optimizer import DPOptimizer


class DistributedDPOptimizer(OfProcesses, DPOptimizer):
    """As DPOptimizer; errors of `OfProcesses`."""
