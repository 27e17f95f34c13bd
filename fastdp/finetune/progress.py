"""Metrics of a run while it trains: metrics.csv, TensorBoard if it is installed, and a bar on a terminal."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .files import PRIVATE, SaveError, write

FIRST = ("step", "epsilon", "loss", "samples", "seconds")


class Progress:
    """Rows of metrics, by step, so that a repeated step has one row. Nothing written here is needed to resume.

    figure: the name by which a row is known to hold an evaluation. steps: of the whole run, for the bar.
    """

    def __init__(self, folder: Path, epsilon: float, resume: bool, figure: str = "", steps: int = 0) -> None:
        self.path, self.epsilon, self.figure = folder / "metrics.csv", epsilon, figure
        self.rows = read_metrics(self.path) if resume else {}
        self.bar = tqdm(total=steps, file=sys.stdout, disable=None, leave=False, unit="step")  # None: on terminals
        self.board: Any = None
        self.begin_board = True  # at the first figure: a run that is refused leaves the folder as it was

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.bar.clear()
        print(text, flush=True)

    def evaluated(self, values: dict[str, Any]) -> None:
        """Figures after a step: one line, and into the table."""
        self._keep(values)
        self.say(f"  step {values['step']}: epsilon {values['epsilon']:.2f}, {in_words(values)}")

    def step(self, values: dict[str, Any]) -> None:
        """A step was made."""
        self._keep(values)
        self.bar.n = values["step"]
        loss = f"{values['loss']:.4f}" if values["samples"] else "-"
        self.bar.set_postfix_str(f"loss {loss}, epsilon {values['epsilon']:.2f} of {self.epsilon:g}")

    def _keep(self, values: dict[str, Any]) -> None:
        step = int(values["step"])
        self.rows.setdefault(step, {}).update(values)
        if self.begin_board:
            self.board, self.begin_board = _board(self.path.parent / "tensorboard"), False
        if self.board is None:
            return
        try:
            for name, value in values.items():
                if name != "step":
                    self.board.add_scalar(name, value, step)
        except OSError as problem:
            self.board = None
            self.say(f"  TensorBoard's file cannot be written ({problem.strerror}): the run goes on without it")

    def write(self) -> None:
        """Write metrics.csv. Raises SaveError."""
        names = list(dict.fromkeys([*FIRST, *(name for row in self.rows.values() for name in row)]))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for step in sorted(self.rows):
            writer.writerow({name: f"{value:.8g}" for name, value in self.rows[step].items()})
        write(self.path, text.getvalue(), PRIVATE)

    def pause(self) -> None:
        """Write what there is. If the disk refuses, say so: the run does not need it."""
        try:
            self.write()
        except SaveError as problem:
            self.say(f"  {problem}. The run goes on")

    def close(self) -> None:
        """Write for the last time. Raises SaveError."""
        self.bar.close()
        self.write()
        if self.board is not None:
            with contextlib.suppress(OSError):
                self.board.close()


def in_words(metrics: dict[str, Any]) -> str:
    """ "accuracy 0.871, nll 0.312, ece 0.021"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name not in ("step", "epsilon"))


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """{step: row} of a metrics.csv; nothing if there is none, or it cannot be read."""
    rows: dict[int, dict[str, float]] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, csv.Error), open(path, newline="") as file:
        for row in csv.DictReader(file):
            found = {name: float(value) for name, value in row.items() if value}
            rows[int(found["step"])] = found
    return rows


def _board(folder: Path) -> Any:
    """TensorBoard's writer, or None if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    folder.mkdir(mode=0o700, exist_ok=True)
    return SummaryWriter(str(folder))
