"""What happens while it trains: a line on the terminal, metrics.csv, TensorBoard where it is installed."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from pathlib import Path
from typing import Any, TextIO

from ..utils.progress_bar import Bar
from .checkpoint import PRIVATE, SaveError, new_file
from .evaluation import in_words

FIRST = ("step", "epsilon", "loss", "samples", "seconds")


class Progress:
    """The `log` of a Job. Rows of metrics are kept by step, so that a step that is repeated stands once.

    Nothing that is written here is needed to resume.
    """

    def __init__(self, folder: Path, epsilon: float, resume: bool, stream: TextIO | None = None) -> None:
        self.path, self.epsilon = folder / "metrics.csv", epsilon
        self.stream = stream or sys.stdout
        self.bar: Bar | None = None
        self.rows: dict[int, dict[str, float]] = read_metrics(self.path) if resume else {}
        self.board: Any = None
        self.begin_board = True  # at the first figure: a run that is refused leaves the folder as it was

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            self._step(values)
        elif kind == "evaluate":
            self.evaluated(values)
        elif kind == "checkpoint":
            self.pause()
        elif kind == "note":
            self.say(str(values["text"]))

    def say(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        print(text, file=self.stream, flush=True)

    def evaluated(self, values: dict[str, Any]) -> None:
        """Metrics after a step: one line, and into the table."""
        self._keep(values)
        self.say(f"  step {values['step']}: epsilon {values['epsilon']:.2f}, {in_words(values)}")

    def _step(self, values: dict[str, Any]) -> None:
        self._keep({name: values[name] for name in FIRST if name in values} | {
            name: value for name, value in values.items() if name in ("lr", "nonfinite")})  # fmt: skip
        if not self.stream.isatty():
            return
        if self.bar is None:
            self.bar = Bar(int(values["steps"]), self.stream)
        loss = f"{values['loss']:.4f}" if values.get("samples", 1) else "-"
        self.bar.at(int(values["step"]), f"loss {loss}  epsilon {values['epsilon']:.2f} of {self.epsilon:g}")

    def _clear(self) -> None:
        if self.bar is not None:
            self.bar.clear()

    def _keep(self, values: dict[str, Any]) -> None:
        step = int(values["step"])
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self.rows.setdefault(step, {}).update(numbers)
        if self.begin_board:
            self.board, self.begin_board = _board(self.path.parent / "tensorboard"), False
        if self.board is None:
            return
        try:
            for name, value in numbers.items():
                if name != "step":
                    self.board.add_scalar(name, value, step)
        except OSError as problem:
            self.board = None
            self.say(f"  TensorBoard's file cannot be written ({problem.strerror}): the run goes on without it")

    def write(self) -> None:
        """metrics.csv, as a whole. Raises SaveError."""
        self._clear()
        names = list(dict.fromkeys([*FIRST, *(name for row in self.rows.values() for name in row)]))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for step in sorted(self.rows):
            writer.writerow({name: f"{value:.8g}" for name, value in self.rows[step].items()})
        with new_file(self.path, PRIVATE) as file:
            file.write(text.getvalue().encode())

    def pause(self) -> None:
        """Write what there is; where the disk refuses, say so, as the run does not need it."""
        try:
            self.write()
        except SaveError as problem:
            self.say(f"  {problem}. The run goes on")

    def close(self) -> None:
        """Write for the last time. Raises SaveError."""
        self._clear()
        self.write()
        if self.board is not None:
            with contextlib.suppress(OSError):
                self.board.close()


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """{step: row} of a metrics.csv; nothing where there is none, or none that can be read."""
    rows: dict[int, dict[str, float]] = {}
    try:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                found = {name: float(value) for name, value in row.items() if value}
                rows[int(found["step"])] = found
    except (OSError, ValueError, KeyError, csv.Error):
        return rows
    return rows


def _board(folder: Path) -> Any:
    """TensorBoard's writer, or None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    folder.mkdir(mode=0o700, exist_ok=True)
    return SummaryWriter(str(folder))
