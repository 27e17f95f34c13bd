"""Memory of the clipped sums, kept from step to step on the CPU.

Sums are formed at the end of backward and dropped after the step; the allocator hands the memory back to the system
each time, and faulting the pages in again takes longer than the products that fill them (MEASURED: a fifth of all
clipped sums of a BERT). Nothing is held at the peak that would not be there anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORTH = 1 << 14  # elements: smaller blocks the allocator keeps itself
_use_count = getattr(torch._C, "_storage_Use_Count", None)


def alias(total: Tensor) -> Tensor:
    """The same memory as another tensor, whose life `Buffers` can see: what users get as `.grad`."""
    return total.detach()


class Buffers:
    """Blocks by parameter. One that anybody else still sees is left to them."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def take(self, parameter: Tensor) -> Tensor | None:
        """A float32 block of the parameter's shape to overwrite, or None."""
        kept = self._kept.pop(id(parameter), None)
        if kept is None or kept.shape != parameter.shape or not _only_ours(kept):
            return None
        return kept

    def give(self, sums: dict[int, Tensor]) -> None:
        """The step is made: keep the blocks for the next one."""
        for key, total in sums.items():
            whole = total.is_contiguous() and total.untyped_storage().nbytes() == 4 * total.numel()
            if total.device.type == "cpu" and total.dtype == torch.float32 and total.numel() >= WORTH and whole:
                self._kept[key] = total


def _only_ours(block: Tensor) -> bool:
    """Whether no other tensor shares the memory: this one, and the storage object that asks."""
    return _use_count is not None and _use_count(block.untyped_storage()._cdata) == 2
