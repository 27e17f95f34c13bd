"""Uses of equal shape that one device kernel handles together, by their addresses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops import extension
from ..ops.rows import square_sums_of_many, weighted_sums_of_many


class GroupedKernels:
    """Uses of equal shape, each of a parameter of its own, that kernels find by their addresses: whatever their size,
    for nothing is copied."""

    operand: Tensor  # of the first
    route: str

    def norm_sq(self) -> Tensor:
        """Squared norms, one use after the other."""
        raise NotImplementedError

    def sums_abreast(self, factors: Tensor, last: bool = False) -> list[Tensor]:
        """The clipped sum of each. factors: [B], or those of each use, [count, B]. last: nothing more is asked for, and
        the data goes, one launch's after the other."""
        raise NotImplementedError


class StoredGroupedKernels(GroupedKernels):
    """Stored gradients of equal shape, [B, ...] each."""

    def __init__(self, operand: Tensor, stacks: list[Tensor], route: str) -> None:
        self.operand, self.route, self._stacks = operand, route, stacks

    def norm_sq(self) -> Tensor:
        return square_sums_of_many(self._stacks).flatten()

    def sums_abreast(self, factors: Tensor, last: bool = False) -> list[Tensor]:
        return weighted_sums_of_many(self._stacks, factors, last)


def stored_alike(grads: Tensor) -> Any:
    """What stored gradients of one launch have in common; None: no kernel finds them."""
    if grads.numel() == 0 or extension.on_device("many", grads) is None:
        return None
    return StoredGroupedKernels, grads.shape, grads.dtype, grads.device
