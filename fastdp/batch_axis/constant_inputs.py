"""Remembers arguments that are of no sample: masks of T x T, tables, position ids.

An argument with as many rows as the batch has samples is taken for data. With Poisson sampling the batch sooner or
later has as many samples as a text has tokens. A mask is told apart by its numbers: the same ones were given before, to
a batch of another size.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 1 << 22  # elements of an argument that is remembered


class ConstantInputs:
    """The latest of each place among a model's arguments."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Tensor, int]] = {}  # the numbers, in the memory they came in; its version

    def note(self, place: int, tensor: Tensor) -> None:
        """An argument was given to a batch of another size than it has rows, and is taken for no samples'."""
        if tensor.numel() <= MOST and not tensor.is_inference() and tensor.layout == torch.strided:
            with torch._C.DisableTorchFunction():
                self._given[place] = tensor.detach(), tensor._version

    def has(self, place: int, tensor: Tensor) -> bool:
        """Whether the same numbers were given in this place before."""
        known, version = self._given.get(place, (None, 0))
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype or known._version != version:
            return False
        return known.device == tensor.device and torch.equal(known, tensor)
