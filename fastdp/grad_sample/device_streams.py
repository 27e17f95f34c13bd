"""Streams of a device: what a backward records is finished before norms and sums read it.

Autograd runs each node on the stream of its forward, and at the end of backward lets the caller's stream wait for the
streams of the leaves, where gradients are added up. Captured calls have no such leaf: what they leave (inputs, output
gradients, small gradients made of these) may still be computed when the norms are taken on the caller's stream. And
the caching allocator hands freed memory to the stream that it was made on, unless it is told who else reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .parameter_use import ParameterUse

_CUDA = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current(device: torch.device) -> Any:
    """The stream on which work on this device is queued now; None where a device has none, as the CPU."""
    if device.type == "cpu":
        return None
    ask = getattr(getattr(torch, device.type, None), "current_stream", None)
    return None if ask is None else ask(device)


def keep(inputs: Iterable[Tensor]) -> None:
    """Let the memory of a forward's inputs wait for the stream that it runs on.

    Uses read inputs until the clipped sum is taken, which is later than any backward does. A loader that copies batches
    on a stream of its own may have made sure only that the backward is done before it copies the next one.
    """
    for tensor in inputs:
        if (stream := current(tensor.device)) is not None:
            tensor.record_stream(stream)  # nothing, if the memory is of this stream


class Holding(Protocol):
    """Something that holds tensors."""

    def holds(self) -> Sequence[Tensor]: ...


class Streams:
    """The streams on which one backward recorded its uses."""

    def __init__(self) -> None:
        self._seen: dict[tuple[torch.device, Any], tuple[Any, list[Holding]]] = {}

    def note(self, held: Holding, device: torch.device) -> None:
        """What a use holds is recorded on the stream that is current on its device."""
        number = _number(device)
        if number is None:
            return
        if (device, number) not in self._seen:
            self._seen[device, number] = (current(device), [])
        self._seen[device, number][1].append(held)

    def one(self) -> bool:
        """Whether all uses so far are of the stream that is current now."""
        return all(number == _number(device) for device, number in self._seen)

    def replace(self, uses: Sequence[ParameterUse], made: Holding) -> None:
        """These uses are dropped; what was made of them on the current streams is held in their place."""
        gone = set(map(id, uses))
        for key, (stream, held) in self._seen.items():
            self._seen[key] = (stream, [each for each in held if id(each) not in gone] + [made])

    def join(self) -> None:
        """Let the streams that are current now wait for the others, and the memory of the uses wait for them."""
        for (device, number), (stream, uses) in self._seen.items():
            if number == _number(device):
                continue
            now = current(device)
            now.wait_stream(stream)
            for use in uses:
                for tensor in use.holds():
                    if tensor.device == device:
                        tensor.record_stream(now)
        self._seen = {}


def _number(device: torch.device) -> Any:
    """What tells the current stream from others, cheaply where torch has that; None where there are no streams."""
    if device.type == "cpu":
        return None
    return _CUDA(device.index or 0) if device.type == "cuda" and _CUDA is not None else current(device)
