"""Raises the threshold of Python's garbage collector from a forward to the end of its backward.

A forward makes many small objects, which all live until its backward. The collector would look at them again and again,
and after some steps at all objects of the process: a fifth of the time of a step whose kernels are small. So until
they are gone it waits for many more of them. (It is not switched off, as a forward may make garbage without end.)
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

MANY = 50_000  # objects more than were there


class Collector:
    """Made to wait by engines, each from a forward to the end of its backward; several may, in several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # (an engine may be collected, and so end its wait, within any allocation)
        self._waiting: dict[int, Any] = {}  # weakly: those who let it wait
        self._before: tuple[int, int, int] | None = None

    def begin(self, who: object) -> None:
        """A forward begins."""
        number = id(who)
        with self._lock:
            if number not in self._waiting:
                self._waiting[number] = weakref.ref(who, lambda gone: self._end(number))
                if self._before is None and 0 < (now := gc.get_threshold())[0] < MANY:
                    self._before = now
                    gc.set_threshold(MANY, *now[1:])

    def end(self, who: object) -> None:
        """Its backward has ended, or there will be none."""
        self._end(id(who))

    def _end(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)
            if not self._waiting and self._before is not None:
                if gc.get_threshold()[0] == MANY:  # unless somebody else has set another one
                    gc.set_threshold(*self._before)
                self._before = None


COLLECTOR = Collector()
