"""Measures the time of norms and sums: host clock on the CPU, events on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..ops.common import event_on


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
        self.device, self.sharers = device, sharers
        self.spans: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def __enter__(self) -> Clock:
        self._begin = _now(self.device)
        return self

    def __exit__(self, *problem: object) -> None:
        self.spans.append((self._begin, _now(self.device)))

    def milliseconds(self) -> float:
        """The sum of the spans so far, for one of the sharers."""
        spent = 0.0
        for begin, end in self.spans:
            if isinstance(end, float):
                spent += 1e3 * (end - begin)
            else:
                end.synchronize()
                spent += begin.elapsed_time(end)
        return spent / self.sharers


def _now(device: torch.device) -> Any:
    event = event_on(device, timed=True)
    return time.perf_counter() if event is None else event
