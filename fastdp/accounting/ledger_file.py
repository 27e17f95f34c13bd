"""A ledger on the disk: every noised step is written and synced before its noise is added.

Whatever happens to the process, no release exists that is not in the file, so the count of steps is never too low. It
is too high by the step in hand if the process dies between the line and the update. Of several processes the first one
writes, before it agrees to the step, and no process updates its weights before all have agreed.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from ..distributed.world import World
from ..errors import AccountingError, StepError
from ..utils.append_log import append, content_of, line_of, lock, sync_folder, whole_lines
from .ledger import Ledger
from .participation import Block, block_of
from .runs import Run, lengthen, run_of
from .used_draws import IN_ORDER, Place, UsedDraws

_HEAD = {"fastdp": "ledger of noised steps", "format": 1}


class LedgerFile:
    """The file, open for appending and locked against other processes.

    runs: the steps that it held when it was opened, with their makers. blocks: by name, those of correlated noise, with
    the strategy's name; their marks are not in the file. drawn: the noise of these steps: (a mark of the key, number).
    draws: of Poisson loaders, that these steps were made on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it, or begin it.

        Raises AccountingError if it cannot be written, is in use, is no ledger, or has a damaged line.
        """
        self.path = Path(path)
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as problem:
            raise AccountingError(
                f"the ledger {self.path} cannot be opened ({problem.strerror}): give ledger= a file in a folder that "
                "exists and may be written"
            ) from None
        self.close = weakref.finalize(self, os.close, self._file)
        try:
            if not lock(self._file):
                raise AccountingError(
                    f"the ledger {self.path} is in use, by another process or by another optimizer of this one: "
                    "detach() that optimizer, or give each training a file of its own"
                )
            self.blocks: dict[str, tuple[str, Block]] = {}
            self.drawn, self.draws = set[tuple[str, int]](), UsedDraws()
            self.runs = self._read()
        except BaseException:
            self.close()
            raise

    def add(
        self, run: Run, block: tuple[str, Block] | None = None, drawn: tuple[str, int] | None = None,
        places: Sequence[Place] = (),
    ) -> None:  # fmt: skip
        """One step is about to be made. Raises StepError if it is not on the disk: then it must not be made.

        block: with correlated noise, the step's block as it is then, and before it the strategy's name. drawn: which
        noise is to be added, if its key may come back. places: of the loaders' draws that it is made on.
        """
        size = os.fstat(self._file).st_size
        try:
            noise = {} if block is None else {"noise": [block[0], block[1].plain]}
            key = {} if drawn is None else {"drawn": drawn}
            on = {"on": found} if (found := [place for place in places if not place[0].startswith(IN_ORDER)]) else {}
            append(self._file, line_of({**run._asdict(), **noise, **key, **on}))
        except OSError as problem:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise StepError(
                f"the step could not be written to the ledger {self.path} ({problem.strerror}), so it was not made, "
                "and its gradients are dropped: free some space there, and go on with the next batch"
            ) from None

    def _read(self) -> list[Run]:
        lines = whole_lines(self._file, self.path)
        if not lines:
            append(self._file, line_of(_HEAD))
            sync_folder(self.path.absolute().parent)
            return []
        head = content_of(lines[0])
        if head is None or head.get("fastdp") != _HEAD["fastdp"]:
            raise AccountingError(
                f"{self.path} is no ledger of fastdp, or its first line is damaged: nothing was written to it"
            )
        if head != _HEAD:
            raise AccountingError(
                f"the ledger {self.path} was written by another version of fastdp: go on with that one"
            )
        runs: list[Run] = []
        for number, line in enumerate(lines[1:], 2):
            try:
                said = content_of(line) or {}
                noise, drawn, on = said.pop("noise", None), said.pop("drawn", None), said.pop("on", ())
                run = Run(**said)
                run_of(*run[2:])
                for mark, number, step in on:
                    self.draws.add((str(mark), int(number), int(step)), run.kind)
                self.drawn.update([] if drawn is None else [(str(drawn[0]), int(drawn[1]))])
                if noise is not None:  # a step that failed is there twice, and counts
                    block = block_of(*noise[1])
                    _, before = self.blocks.get(block.name, ("", block._replace(steps=0)))
                    self.blocks[block.name] = str(noise[0]), block._replace(steps=max(block.steps, before.steps + 1))
            except (TypeError, ValueError, LookupError):
                raise AccountingError(
                    f"line {number} of the ledger {self.path} is damaged: what its step has cost is not known. Put a "
                    "copy of a line before it in its place if the settings were the same"
                ) from None
            lengthen(runs, run)
        return runs


def open_ledger(ledger: Ledger, path: str | os.PathLike[str] | None, world: World) -> None:
    """The steps of a ledger are written to this file, and what it holds is counted. None: to no file.

    Of several processes the first one opens it. Raises AccountingError.
    """
    if path is not None and world.rank == 0:
        ledger.write_to(LedgerFile(path))


def share_ledger(ledger: Ledger, world: World) -> None:
    """What the file of the first process holds is counted by all, which have agreed that there is one, and go by its
    name."""
    blocks = [(name, block.plain) for name, block in ledger.blocks]
    said = json.dumps([[tuple(run) for run in ledger.written], blocks, ledger.draws.state()]).encode()
    length = int.from_bytes(world.from_first(len(said).to_bytes(8, "little")), "little")
    found = json.loads(world.from_first(said if world.rank == 0 else bytes(length)))
    ledger.count([Run(*run) for run in found[0]], [(name, block_of(*block)) for name, block in found[1]])
    ledger.draws.take_up(UsedDraws(found[2]))
