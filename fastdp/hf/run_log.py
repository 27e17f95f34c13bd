"""The log of a run: one line for each noised step, on the disk before the noise of that step is drawn.

The first line states the plan. A line follows for each generation of keys, with the environment it began in, and one
for each step, with a keyed digest of its sums. Nobody has seen a release that is not in the log, whatever happens to
the process, so its count of steps is never too low. A last line without its end was never synced, and is cut off. A
damaged line elsewhere counts as a step.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import AccountingError, StepError
from ..utils.append_log import append, content_of, line_of, lock, sync_folder, whole_lines


class Entry(NamedTuple):
    """A noised step: the keyed digest of its sums, and the physical batch size it was computed with."""

    digest: str
    physical: int | None


class RunLog:
    """A log in a file that is locked against other processes, or a copy of it in memory (`path` None).

    steps: {(generation, step): entry}. environments: {generation: what its steps' bits depend on}. damaged: lines that
    cannot be read, each counted as a step. run: a name that no other run has.
    """

    def __init__(self, path: Path | None, plan: dict[str, Any]) -> None:
        """Open it, or begin it. Raises AccountingError if it is of another plan, in use, or damaged at its head."""
        self.path = path
        self.steps: dict[tuple[int, int], Entry] = {}
        self.environments: dict[int, dict[str, Any]] = {}
        self.damaged, self.run = 0, secrets.token_hex(16)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if not lock(self._file):
                raise AccountingError(
                    f"another process is training with {path}: wait for it, stop it, or take another folder"
                )
            self._read(path, plan)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def count(self) -> int:
        """The number of noised steps ever made."""
        return len(self.steps) + self.damaged

    @property
    def generation(self) -> int:
        """The newest generation of keys; -1 before the first."""
        return max([*self.environments, *(generation for generation, _ in self.steps)], default=-1)

    def begin(self, generation: int, environment: dict[str, Any]) -> None:
        """Note that a generation of keys begins."""
        self._append({"generation": generation, "environment": environment})
        self.environments[generation] = environment

    def add(self, generation: int, step: int, entry: Entry) -> None:
        """Note a step that is about to be made. If this raises StepError, it must not be made."""
        self._append({"g": generation, "step": step, **entry._asdict()})
        self.steps[generation, step] = entry

    def repeatable(self, generation: int, step: int) -> int:
        """How many steps of this generation follow from this one on without a gap, to its end; else 0."""
        known = sorted(s for g, s in self.steps if g == generation and s >= step)
        return len(known) if known == list(range(step, step + len(known))) else 0

    def close(self) -> None:
        if self.path is not None:
            os.close(self._file)

    def _append(self, content: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            append(self._file, line_of(content))
        except OSError as problem:
            raise StepError(
                f"the step could not be written to {self.path} ({problem.strerror}), so it was not made: what was "
                "saved before is untouched. Free some space there, and resume"
            ) from problem

    def _read(self, path: Path, plan: dict[str, Any]) -> None:
        lines = whole_lines(self._file, path)
        if not lines:
            append(self._file, line_of({"version": 2, "run": self.run, "plan": plan}))
            sync_folder(path.absolute().parent)
            return
        head = content_of(lines[0])
        if head is None or head.get("version") != 2:
            raise AccountingError(
                f"the first line of {path} is damaged, or of another version of fastdp: what the run's steps cost "
                "cannot be stated any more. Begin anew in another folder, and count what this run was planned to spend"
            )
        old, new = head["plan"], json.loads(json.dumps(plan))
        changes = [f"{name} {old.get(name)} -> {new.get(name)}" for name in old | new if old.get(name) != new.get(name)]
        if changes:
            raise AccountingError(
                f"the run in {path.parent} was begun with another plan ({', '.join(changes)}): resume with the "
                "options it was begun with, or begin anew in another folder"
            )
        self.run = str(head["run"])
        for found in map(content_of, lines[1:]):
            if found is not None and "environment" in found:
                self.environments[int(found["generation"])] = found["environment"]
            elif found is not None and "digest" in found:
                self.steps[int(found["g"]), int(found["step"])] = Entry(found["digest"], found["physical"])
            else:
                self.damaged += 1
