"""Time that a use's norms and sums took: by the host's clock on the CPU, by events on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """One call, by the device's own clock; waits for its end."""
    clock = Clock(device)
    with clock:
        run()
    return clock.milliseconds() / 1e3


class Clock:
    """Adds up spans: `with clock: ...`. Reading waits for the device.

    sharers: uses that are worked on together, of which each is told an equal part.
    """

    def __init__(self, device: torch.device, sharers: int = 1) -> None:
        self.on_device, self.sharers = device.type == "cuda", sharers
        self.spans: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def __enter__(self) -> Clock:
        if self.on_device:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        else:
            self._begin = time.perf_counter()
        return self

    def __exit__(self, *problem: object) -> None:
        if self.on_device:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self.spans.append((self._begin, end))
        else:
            self.spans.append((self._begin, time.perf_counter()))

    def milliseconds(self) -> float:
        """The sum of the spans so far, for one of the sharers."""
        if self.on_device:
            for _, end in self.spans:
                end.synchronize()
            return float(sum(begin.elapsed_time(end) for begin, end in self.spans)) / self.sharers
        return float(sum(1e3 * (end - begin) for begin, end in self.spans)) / self.sharers
