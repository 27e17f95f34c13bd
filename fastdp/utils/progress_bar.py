"""A progress bar for commands: one line on a terminal, with what is done and the time that is left."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from .formatting import duration

WIDTH, LEAST = 24, 4  # of the bar, in characters; where there is no room for the least, there is none
EVERY = 0.1  # seconds between two drawings
SURE = 1.0  # seconds after which the time left is worth saying


class Bar:
    """A line that is drawn again and again; where no one watches (a file, a pipe), its last state alone.

    The time left is what the rest takes at the mean speed since the first call, pauses included.

    Args:
        total: what `at` counts up to, in any unit.
        stream: where the line is drawn (default: standard error, so that output stays clean).
    """

    def __init__(self, total: float, stream: TextIO | None = None) -> None:
        self.total, self.stream = total, stream or sys.stderr
        self.drawn = 0  # characters of the line that stands there
        self.last = float("-inf")  # when it was drawn
        self.first: tuple[float, float] | None = None  # when `at` was called first, and with what

    def at(self, done: float, text: str = "") -> None:
        """So much of the total is done. text: what is known now, such as the loss and the epsilon spent."""
        now, ends = time.monotonic(), done >= self.total
        self.first = self.first or (now, done)
        live = self.stream.isatty()
        if not ends and (not live or now - self.last < EVERY):
            return
        self.last = now
        share = f"{done:g}/{self.total:g}" if isinstance(self.total, int) else f"{100 * done / self.total:.0f} %"
        words, room = [share, text, "" if ends else self._left(now, done)], math.inf
        if live:
            room = max(shutil.get_terminal_size().columns - 1, 20)
            if len("  ".join(filter(None, words))) > room - 2:  # the time left says more than the losses
                words = [share, words[2]]
        line = "  ".join(filter(None, words))
        width = int(min(WIDTH, room - len(line) - 5))
        if width >= LEAST:
            filled = int(width * min(1.0, done / self.total)) if self.total else width
            line = f"[{'#' * filled}{'.' * (width - filled)}] {line}"
        line = f"  {line}"
        self._draw(line if room == math.inf else line[: int(room)])
        if ends:
            print(file=self.stream, flush=True)
            self.drawn = 0

    def part(self, begun: float, text: str) -> Callable[[float], None]:
        """`at` of a part of the work, which counts from 0."""
        return lambda done: self.at(begun + done, text)

    def clear(self) -> None:
        """Take the line away, so that another can be printed in its place."""
        if self.drawn:
            print("\r" + " " * self.drawn + "\r", end="", file=self.stream, flush=True)
            self.drawn = 0

    def _left(self, now: float, done: float) -> str:
        """ "12 min left", once that is known."""
        begun, at_first = self.first or (now, done)
        if done <= at_first or now - begun < SURE:
            return ""
        return f"{duration((self.total - done) * (now - begun) / (done - at_first))} left"

    def _draw(self, line: str) -> None:
        back = "\r" if self.stream.isatty() else ""
        print(back + line.ljust(self.drawn), end="", file=self.stream, flush=True)
        self.drawn = len(line)
