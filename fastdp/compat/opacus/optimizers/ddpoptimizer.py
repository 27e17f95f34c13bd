"""DPOptimizer in a process group: of one process so far."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ..distributed import check_alone
from .optimizer import DPOptimizer


class DistributedDPOptimizer(DPOptimizer):
    """As DPOptimizer. Raises ValueError outside of a process group, NotImplementedError in one of several processes."""

    def __init__(self, optimizer: Optimizer, **kwargs: Any) -> None:
        self.world_size = check_alone()
        self.rank = torch.distributed.get_rank()
        super().__init__(optimizer, **kwargs)

    def reduce_gradients(self) -> None:
        """Nothing: there is one process."""
