"""Sums clipped sums over all processes, in buckets.

The buckets follow from the list of sums alone, which every process has for every trained parameter, whether its samples
used the parameter or not. So all processes make the same calls, in the same order, with the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 25 << 20  # bytes, as DistributedDataParallel's
ALIGNED = 16  # elements: the fused updates of a device read 16 bytes at once, and more


def riding(number: Tensor | int, with_: Tensor) -> Tensor:
    """A whole or half number, to travel in one message with a sum like this: exact below 2^23. Nothing waits for it."""
    kind = torch.float64 if with_.dtype == torch.float64 else torch.float32
    if isinstance(number, int):
        return with_.new_full((1,), number, dtype=kind)
    return number.view(1).to(with_.device, kind, copy=True)


class Reduction:
    """Sums of clipped gradients, float32 or float64, contiguous. They are overwritten."""

    def __init__(self, sums: Sequence[Tensor], bucket_bytes: int = BUCKET) -> None:
        self._shapes = [total.shape for total in sums]
        self._places: list[tuple[int, int, int]] = [(-1, 0, 0)] * len(sums)  # bucket, first element, elements
        self._flat: list[Tensor] = []
        open_: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        filled: dict[tuple[torch.dtype, torch.device], int] = {}
        for number, total in enumerate(sums):
            if total.nbytes >= bucket_bytes:  # large: summed where it lies
                self._places[number] = (len(self._flat), 0, total.numel())
                self._flat.append(total.view(-1))
                continue
            kind = (total.dtype, total.device)
            if filled.get(kind, 0) + total.nbytes > bucket_bytes:
                self._close(open_.pop(kind), sums)
                filled[kind] = 0
            open_.setdefault(kind, []).append(number)
            filled[kind] = filled.get(kind, 0) + total.nbytes
        for numbers in open_.values():
            self._close(numbers, sums)

    def _close(self, numbers: list[int], sums: Sequence[Tensor]) -> None:
        """Lay these sums into one bucket, each at a multiple of `ALIGNED` elements."""
        starts, size = [], 0
        for number in numbers:
            starts.append(size)
            size += -(-sums[number].numel() // ALIGNED) * ALIGNED
        flat = sums[numbers[0]].new_zeros(size)
        for number, start in zip(numbers, starts, strict=True):
            count = sums[number].numel()
            flat[start : start + count].copy_(sums[number].view(-1))
            self._places[number] = (len(self._flat), start, count)
        self._flat.append(flat)

    def run(self, group: Any) -> list[Tensor]:
        """Sum over the processes of a group; returns the sums as they were given, in shape."""
        works = [dist.all_reduce(flat, group=group, async_op=True) for flat in self._flat]
        for work in works:
            work.wait()
        return [
            self._flat[bucket][start : start + count].view(shape)
            for (bucket, start, count), shape in zip(self._places, self._shapes, strict=True)
        ]
