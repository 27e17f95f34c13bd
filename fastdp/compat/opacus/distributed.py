"""Data-parallel training, whose steps are those of one process on all processes' batches."""

from __future__ import annotations

import torch
from opacus import distributed as theirs
from opacus.distributed import average_gradients
from torch import nn

__all__ = ["DifferentiallyPrivateDistributedDataParallel", "average_gradients"]


class DifferentiallyPrivateDistributedDataParallel(theirs.DifferentiallyPrivateDistributedDataParallel):  # type: ignore[misc]
    """A model whose copies begin with the weights and buffers of process 0. Raises ValueError without a group."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer.data, 0)
