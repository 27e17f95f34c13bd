"""The names of torch that are not public and that this room uses, with what happens where a torch lacks them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def collectives_so_far(group: Any) -> int | None:
    """How many collectives this process has begun in a process group; None if this torch, or backend, does not say."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def wrapper_around(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running, if it holds this model.

    A torch that does not say leaves the wrapper unknown: it then raises an error of its own in its second forward, as
    no gradient came for its sums.
    """
    found = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if found is None or not any(module is model for module in found.module.modules()):
        return None
    return found  # type: ignore[no-any-return]
