"""opacus.distributed: one process so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def check_alone() -> int:
    """The size of the process group, 1. Raises ValueError without one, NotImplementedError where it is larger."""
    size = torch.distributed.get_world_size()
    if size > 1:
        raise NotImplementedError(
            f"the process group has {size} processes: fastdp does not train data-parallel yet. Run one process, with "
            "BatchMemoryManager for batches that do not fit."
        )
    return size


class OfOneProcess:
    """What an optimizer in a process group adds to DPOptimizer.

    Raises ValueError outside of a process group, NotImplementedError in one of several processes.
    """

    def __init__(self, optimizer: Optimizer, **kwargs: Any) -> None:
        self.world_size = check_alone()
        self.rank = torch.distributed.get_rank()
        super().__init__(optimizer, **kwargs)  # type: ignore[call-arg]

    def reduce_gradients(self) -> None:
        """Nothing: there is one process."""


def average_gradients(model: nn.Module) -> None:
    """Average `.grad` of the trainable parameters over the processes."""
    size = torch.distributed.get_world_size()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.SUM)
            parameter.grad /= size


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """A model whose copies begin with the weights of process 0; for now in a group of one process."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_alone()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
