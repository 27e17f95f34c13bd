"""A progress bar for commands: one line on a terminal, with what is done and the time that is left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

LINE = "  {percentage:3.0f} % |{bar:24}| {desc}  {remaining} left"


class Bar:
    """tqdm's bar; where no one watches (a file, a pipe), its last state alone.

    Args:
        total: what `at` counts up to, in any unit.
        stream: where the line is drawn (default: standard error, so that output stays clean).
    """

    def __init__(self, total: float, stream: TextIO | None = None) -> None:
        self.total, self.stream = total, stream or sys.stderr
        self._bar: tqdm[None] | None = None  # from the first call on: what was done before it took no time

    def at(self, done: float, text: str = "") -> None:
        """So much of the total is done. text: what is known now, such as the loss and the epsilon spent."""
        if not self.stream.isatty():
            if done >= self.total:
                print(f"  {done:g}/{self.total:g}  {text}".rstrip(), file=self.stream, flush=True)
            return
        if self._bar is None:
            self._bar = tqdm(
                desc=text, total=self.total, initial=done, file=self.stream, bar_format=LINE, dynamic_ncols=True
            )
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= self.total:
            self._bar.refresh()
            self._bar.close()
            self._bar = None

    def part(self, begun: float, text: str) -> Callable[[float], None]:
        """`at` of a part of the work, which counts from 0."""
        return lambda done: self.at(begun + done, text)

    def clear(self) -> None:
        """Take the line away, so that another can be printed in its place."""
        if self._bar is not None:
            self._bar.clear()
