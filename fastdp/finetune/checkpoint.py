"""Files that are whole or not there, and checkpoints made of them.

A checkpoint is two files: `step-00000120.pt` (torch.save of tensors and plain values) and `step-00000120.json` with
its SHA-256, written last. Each is written under another name in the same folder, synced, and renamed; the folder is
synced after. So at any moment a checkpoint is whole, or has no JSON file; and what does not fit its checksum is passed
over for the one before. The last two are kept, and an older one is deleted only when a newer one is in place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..utils.append_log import sync_folder
from .job import FinetuneError

KEPT = 2
PUBLIC, PRIVATE = 0o666, 0o600  # modes: what may be given away, less the umask; what epsilon does not cover
NO_CHARACTER = "backslashreplace"  # how bytes of a path or an argument that are no UTF-8 are written
UNFINISHED = ".unfinished"  # ending of a file that is being written


class SaveError(FinetuneError):
    """A file could not be written; what was there before is untouched."""


class _Hashed:
    """A file for torch.save: what is written is hashed on the way, and what fails is remembered."""

    def __init__(self, file: Any) -> None:
        self.file, self.hash, self.bytes = file, hashlib.sha256(), 0
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            view = memoryview(data)
            self.file.write(view)
        except OSError as problem:  # torch makes another error of it
            self.problem = problem
            raise
        self.hash.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Done at the end."""


@contextlib.contextmanager
def new_file(path: Path, mode: int = PUBLIC) -> Iterator[Any]:
    """A file to write to, which becomes `path` at the end of the block: whole and on the disk, or not at all.

    Raises SaveError, with what to do about it, where the disk or its permissions refuse.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    written = None
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)  # of a process that was killed; its mode may be another
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            written = _Hashed(file)
            yield written
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as problem:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        cause = written.problem if written is not None and written.problem is not None else problem
        if not isinstance(cause, OSError):
            raise
        raise SaveError(in_words(cause, path, written.bytes if written else 0)) from problem


def in_words(problem: OSError, path: Path, needed: int = 0) -> str:
    """What a failed write means and what to do."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free there"
        least = f" (more than {needed / 2**20:.1f} MiB)" if needed else ""
        return f"no space left to write {path}{least}{free}: what was saved before is untouched. Free some space"
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{path} may not be written ({problem.strerror}): what was saved before is untouched. Change the "
            f"permissions of {path.parent}, or run as its owner"
        )
    return f"{path} could not be written: {problem}. What was saved before is untouched"


# ---------------------------------------------------------------------- checkpoints


class Checkpoints:
    """The checkpoints of a run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the state after `step` steps; older ones than the last two are deleted. Raises SaveError."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # metrics and counts are in them
        except OSError as problem:
            raise SaveError(in_words(problem, self.folder)) from problem
        path = self.folder / f"step-{step:08d}.pt"
        manifest = path.with_suffix(".json")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(manifest)  # of a checkpoint of this step that did not fit its checksum, or of a former key
        with new_file(path, PRIVATE) as file:
            torch.save(state, file)
        about = {"step": step, "bytes": file.bytes, "sha256": file.hash.hexdigest()}
        with new_file(manifest, PRIVATE) as other:
            other.write(json.dumps(about).encode())
        self._drop_old(step)
        return path

    def load(self, note: Any = None) -> tuple[int, dict[str, Any]] | None:
        """(step, state) of the newest whole checkpoint; None without any. note: told of those passed over."""
        for step in self.steps():
            path = self.folder / f"step-{step:08d}.pt"
            try:
                about = json.loads(path.with_suffix(".json").read_text())
                with open(path, "rb") as file:
                    found = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
                    if found.hexdigest() != about["sha256"]:
                        raise ValueError("its checksum does not fit")
                    file.seek(0)
                    return step, torch.load(file, map_location="cpu", weights_only=True)
            except PermissionError as problem:
                raise FinetuneError(f"the checkpoint {path} may not be read ({problem.strerror})") from problem
            except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError) as problem:
                if note is not None:
                    note(f"checkpoint {path.name} is damaged ({str(problem)[:80]}): taking the one before")
        return None

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were finished, the newest first."""
        names = [p.stem.removeprefix("step-") for p in self.folder.glob("step-*.json")]
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def _drop_old(self, newest: int) -> None:
        """Keep the newest and the one before; whatever else lies here is of an older time, or was never finished."""
        kept = {f"step-{step:08d}" for step in [s for s in self.steps() if s <= newest][:KEPT]}
        for path in self.folder.glob("step-*"):
            if path.name.split(".")[0] not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()


def _digest(file: Any) -> Any:
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found
