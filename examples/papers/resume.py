"""Runs that may be stopped at any time: a checkpoint of each, from which the same command goes on.

    options = resume.add(made, "the paper's 5 seeds, and all cases")  # --device --checkpoints --minutes --full
    kept = resume.Checkpoint(options, "local, R = 1, seed 0", {"lr": 0.15, ...})
    if kept.done: ...             # its rows were written before
    state = kept.load()           # None: begin
    kept.save({...})              # now and then; raises Stopped once --minutes are over
    kept.finish({...})            # after its rows are written

A checkpoint is of one run in one setting, which its file's name stands for: runs of other settings never take it up.
The keys of private sampling and noise are not in it. They are drawn anew, which costs no privacy: the steps before are
in the accountant's history, and that is part of the optimizer's state.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

BEGUN = time.monotonic()
State = dict[str, Any]


class Stopped(Exception):
    """The time that was given is over; the state is kept."""


def add(made: Any, full: str) -> None:
    """Give a parser the options that runs on a device need. full: what --full runs."""
    made.add_argument("--device", default="cpu", help="of torch, such as cuda; data and models lie there")
    made.add_argument("--checkpoints", type=Path, metavar="DIR", help="keep each run in this folder, go on with what "
                      "is there, and leave out what is done")  # fmt: skip
    made.add_argument("--minutes", type=float, help="with --checkpoints: stop after so long; the same command goes on")
    made.add_argument("--full", action="store_true", help=full)


def check(made: Any, options: Any) -> None:
    """Exit with a message on options that do not go together, or a device that there is not."""
    if options.minutes is not None and (options.checkpoints is None or not options.minutes > 0):
        made.error("--minutes must be positive, and needs --checkpoints DIR")
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:  # torch raises either, by its build
        made.error(f"--device {options.device}: {str(error).splitlines()[0]}")


class Checkpoint:
    """The file of one run.

    Args: options of `add`; name of the run; setting: all that its outcome depends on, of plain values.
    """

    def __init__(self, options: Any, name: str, setting: Mapping[str, Any]) -> None:
        folder = options.checkpoints
        mark = f"{zlib.crc32(repr(sorted(setting.items())).encode()):08x}"
        plain = re.sub(r"[^\w.=-]+", "_", name)
        self.path = None if folder is None else folder / f"{plain}_{mark}.pt"
        self._device = options.device
        self._until = float("inf") if options.minutes is None else BEGUN + 60 * options.minutes
        self._state: State | None = None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._state = torch.load(self.path, map_location=self._device, weights_only=True)

    @property
    def done(self) -> bool:
        """Whether the run ended, and its rows were written."""
        return self._state is not None and bool(self._state["done"])

    def load(self) -> State | None:
        """What `save` kept last, or None. Generators of this process are not touched."""
        return self._state

    def over(self) -> bool:
        """Whether the time that was given is."""
        return self.path is not None and time.monotonic() > self._until

    def save(self, state: State) -> None:
        """Keep plain values and tensors, all or nothing. Raises Stopped once the time is over."""
        self.keep(state)
        if self.over():
            raise Stopped

    def keep(self, state: State) -> None:
        """Like save, whatever the time."""
        self._write({**state, "done": False})

    def finish(self, state: State) -> None:
        """The run is over, and its rows are written: keep what other scripts may look at."""
        self._write({**state, "done": True})

    def _write(self, state: State) -> None:
        if self.path is not None:
            new = self.path.with_suffix(".new")
            torch.save(state, new)
            new.replace(self.path)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> State:
    """The states of both, and more."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def take_up(state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a state of `state_of` into both."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
