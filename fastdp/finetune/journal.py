"""The journal: every noised step, written and synced before its noise is drawn.

One line each, a checksum before it: first the plan, then what a generation of keys begins with, then its steps.
Whatever happens to the process, nobody has seen a release that is not in the journal; so its count of steps is never
too low. It may be too high by the step in hand, which either is repeated bit for bit or stays counted.

A last line without its end was never synced: its noise was not drawn, and it is cut off. A damaged line elsewhere is
counted as a step.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from ..utils.append_log import append, content_of, line_of, whole_lines
from .checkpoint import PRIVATE, SaveError, in_words, new_file
from .job import FinetuneError

try:
    import fcntl
except ImportError:  # not on Windows: two processes at once are not noticed there
    fcntl = None  # type: ignore[assignment]

VERSION = 1


class Entry(NamedTuple):
    """A noised step: the keyed digest of its sums, and the physical batch size it was computed with."""

    digest: str
    physical: int | None


class Journal:
    """The journal in a file, open for appending and locked against other processes.

    steps: {(generation, step): entry}; damaged: lines that cannot be read, each counted as a step.
    """

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        """Open it, or begin it with this plan. Raises FinetuneError where it is of another plan, in use, or damaged."""
        self.path = path
        self.steps: dict[tuple[int, int], Entry] = {}
        self.environments: dict[int, dict[str, Any]] = {}
        self.damaged = 0
        self.run = ""  # a name that no other run has
        self._folder = self._lock(path.parent)
        try:
            self._open(plan)
        except BaseException:
            self._unlock()
            raise

    def _open(self, plan: dict[str, Any]) -> None:
        path = self.path
        if not path.exists():
            with new_file(path, PRIVATE) as file:
                file.write(line_of({"version": VERSION, "run": secrets.token_hex(16), "plan": plan}))
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as problem:
            raise SaveError(in_words(problem, path)) from problem
        try:
            self._read(plan)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def count(self) -> int:
        """Noised steps ever made."""
        return len(self.steps) + self.damaged

    @property
    def generation(self) -> int:
        """The newest generation of keys; -1 before the first."""
        return max([*self.environments, *[g for g, _ in self.steps]], default=-1)

    def begin(self, generation: int, environment: dict[str, Any]) -> None:
        """A generation of keys begins."""
        self._append({"generation": generation, "environment": environment})
        self.environments[generation] = environment

    def add(self, generation: int, step: int, entry: Entry) -> None:
        """A noised step is about to be made: on the disk when this returns. Raises SaveError, and then it must not."""
        self._append({"g": generation, "step": step, "digest": entry.digest, "physical": entry.physical})
        self.steps[generation, step] = entry

    def repeatable(self, generation: int, step: int) -> int:
        """How many steps of this generation from this one on are known, without a gap and to its end; else 0."""
        known = [s for g, s in self.steps if g == generation and s >= step]
        return len(known) if sorted(known) == list(range(step, step + len(known))) else 0

    def close(self) -> None:
        os.close(self._file)
        self._unlock()

    # ------------------------------------------------------------------

    def _append(self, content: dict[str, Any]) -> None:
        line = line_of(content)
        try:
            append(self._file, line)
        except OSError as problem:
            raise SaveError(
                f"the step could not be journalled, so it was not made: {in_words(problem, self.path, len(line))}, and "
                "resume"
            ) from problem

    def _lock(self, folder: Path) -> int | None:
        """Nobody else trains in the folder while this is open (where the system has such locks)."""
        if fcntl is None:
            return None
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as problem:
            raise SaveError(in_words(problem, folder)) from problem
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in (errno.EAGAIN, errno.EACCES):  # a network folder without locks
                return descriptor
            os.close(descriptor)
            raise FinetuneError(
                f"another process is training in {folder}: wait for it, or stop it, or take another folder"
            ) from None
        return descriptor

    def _unlock(self) -> None:
        if self._folder is not None:
            os.close(self._folder)

    def _read(self, plan: dict[str, Any]) -> None:
        lines = whole_lines(self._file, self.path)
        head = content_of(lines[0]) if lines else None
        if head is None or "plan" not in head:
            raise FinetuneError(
                f"the first line of {self.path} is damaged: how much privacy the run's steps cost cannot be stated any "
                "more. Begin anew in another folder, and count what this run was planned to spend as spent"
            )
        if head.get("version") != VERSION:
            raise FinetuneError(f"{self.path} was written by another version of fastdp: resume with that one")
        self._compare(head["plan"], plan)
        self.run = str(head["run"])
        for line in lines[1:]:
            found = content_of(line)
            if found is not None and "environment" in found:
                self.environments[int(found["generation"])] = found["environment"]
            elif found is not None and "digest" in found:
                self.steps[int(found["g"]), int(found["step"])] = Entry(found["digest"], found["physical"])
            else:
                self.damaged += 1

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        new = json.loads(json.dumps(new))
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if names:
            changes = ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names)
            raise FinetuneError(
                f"the run in {self.path.parent} was begun with another plan ({changes}): resume with the options it "
                "was begun with, or begin anew in another folder"
            )
