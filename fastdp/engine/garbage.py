"""Python's garbage collector, while a pass is on.

A forward makes many small objects, which all live until its backward. The collector would look at them again and again,
and after some steps at all objects of the process: a fifth of the time of a step whose kernels are small. So while a
pass is on it waits for many more of them. (It is not switched off, as a forward may make garbage without end.)
"""

from __future__ import annotations

import gc
import threading

MANY = 50_000  # objects more than were there


class Collector:
    """Made to wait by passes, of which several threads may have one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes = 0
        self._before: tuple[int, int, int] | None = None

    def begin(self) -> None:
        """A pass begins."""
        with self._lock:
            self._passes += 1
            if self._passes == 1 and 0 < (now := gc.get_threshold())[0] < MANY:
                self._before = now
                gc.set_threshold(MANY, *now[1:])

    def end(self) -> None:
        """A pass ends."""
        with self._lock:
            self._passes = max(0, self._passes - 1)
            if self._passes == 0 and self._before is not None:
                if gc.get_threshold()[0] == MANY:  # unless somebody else has set another one
                    gc.set_threshold(*self._before)
                self._before = None


COLLECTOR = Collector()
