"""Counts the bytes that uses hold, shared memory once, and detects writes to it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def versions(tensors: Iterable[Tensor]) -> int:
    """The versions of tensors, added up."""
    try:
        return sum([t._version for t in tensors])
    except RuntimeError:  # inference tensors have none
        return sum([t._version for t in tensors if not t.is_inference()])


class HeldBytes:
    """Tensors that are held until the end of a backward, by the memory in which they lie.

    The projections of a query, a key and a value hold one input, and a bias at a single position the output gradient
    that its weight holds.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._regions: set[tuple[int, int, int]] = set()  # storage, offset in it, numbers

    def adds(self, tensors: Iterable[Tensor]) -> int:
        """How many bytes more it would be to hold these too."""
        return sum({key: size for key, size in map(_region, tensors) if key not in self._regions}.values())

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Hold these, too. Returns the bytes that they add."""
        found = {key: size for key, size in map(_region, tensors) if key not in self._regions}
        self._regions.update(found)
        added = sum(found.values())
        self.bytes += added
        return added


def _region(tensor: Tensor) -> tuple[tuple[int, int, int], int]:
    """Where a tensor lies, and its bytes: of an expanded one, those of its storage.

    A storage is known by its address, which no other has for as long as this one is held.
    """
    storage = tensor.untyped_storage()
    return (storage._cdata, int(tensor.storage_offset()), tensor.numel()), min(tensor.nbytes, storage.nbytes())
