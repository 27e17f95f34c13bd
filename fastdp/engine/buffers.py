"""Memory of the clipped sums, kept from step to step on the CPU.

Sums are formed at the end of backward and dropped after the step; the allocator hands the memory back to the system
each time, and faulting the pages in again costs (MEASURED) about a tenth of the clipped sums of a GPT or BERT. At
the end of backward the sums are there anyway; before it they are held in addition (all of a BERT's peak: 1.23x).
"""

from __future__ import annotations

import functools
import sys

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
        self._asked: set[int] = set()  # parameters whose sums can be written into a given block

    def take(self, parameter: Tensor) -> Tensor | None:
        """A float32 block of the parameter's shape to overwrite, or None."""
        self._asked.add(id(parameter))
        kept = self._kept.pop(id(parameter), None)
        if kept is None or kept.shape != parameter.shape or kept.device != parameter.device or not _only_ours(kept):
            return None
        return kept

    def give(self, sums: dict[int, Tensor]) -> None:
        """The step is made: keep the blocks for the next one."""
        for key, total in sums.items():
            if (
                key in self._asked
                and total.numel() >= WORTH
                and total.device.type == "cpu"
                and total.dtype == torch.float32
                and total.is_contiguous()
                and total.untyped_storage().nbytes() == 4 * total.numel()
            ):
                self._kept[key] = total
        self._asked.clear()


def _observers(block: Tensor) -> tuple[int, int]:
    """How many tensors share the memory, and how many hold the storage object, counted as this torch counts them."""
    storage = block.untyped_storage()  # one object for all who hold it
    return _use_count(storage._cdata), sys.getrefcount(storage)  # type: ignore[misc]


@functools.cache
def _alone() -> tuple[int, int] | None:
    """The counts of a block that nobody else sees; None where they would not show an observer."""
    if _use_count is None:
        return None
    block = torch.empty(1)
    _observers(block)
    alone = _observers(block)
    view = block.detach()
    shown = _observers(block)[0] > alone[0]
    del view
    storage = block.untyped_storage()
    shown = shown and _observers(block)[1] > alone[1]
    del storage
    return alone if shown and _observers(block) == alone else None


def _only_ours(block: Tensor) -> bool:
    """Whether nobody else sees the memory: no other tensor, and nobody who holds the storage object itself."""
    alone = _alone()
    return alone is not None and _observers(block) == alone


def add(total: dict[int, Tensor], more: dict[int, Tensor]) -> None:
    """Add tensors by key."""
    for key, value in more.items():
        total[key] = total[key].add_(value) if key in total else value
