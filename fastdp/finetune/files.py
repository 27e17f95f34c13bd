"""Files that are whole or not there, with the mode that their content needs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..utils.append_log import sync_folder
from .plan import FinetuneError

PUBLIC, PRIVATE = 0o666, 0o600  # modes: what may be given away, less the umask; what epsilon does not cover
NO_CHARACTER = "backslashreplace"  # how bytes of a path or an argument that are not UTF-8 are written
UNFINISHED = ".unfinished"


class SaveError(FinetuneError):
    """A file could not be written; what was there before is untouched."""


@contextlib.contextmanager
def new_file(path: Path, mode: int = PUBLIC) -> Iterator[Any]:
    """A file to write to, which becomes `path` at the end of the block: whole and on the disk, or not at all.

    Raises SaveError, with what to do about it, if the disk or its permissions refuse.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        unfinished.unlink(missing_ok=True)  # of a process that was killed; its mode may be another
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except OSError as problem:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise SaveError(in_words(problem, path)) from problem


def write(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Write a text. Raises SaveError."""
    with new_file(path, mode) as file:
        file.write(text.encode(errors=NO_CHARACTER))


def in_words(problem: OSError, path: Path) -> str:
    """What a failed write means, and what to do."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free there"
        return f"no space left to write {path}{free}: what was saved before is untouched. Free some space"
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{path} may not be written ({problem.strerror}): what was saved before is untouched. Change the "
            f"permissions of {path.parent}, or run as its owner"
        )
    return f"{path} could not be written: {problem}. What was saved before is untouched"


@contextlib.contextmanager
def disk_problems(path: Path, again: str) -> Iterator[None]:
    """What other libraries raise about a disk becomes a SaveError, with what to do next."""
    from safetensors import SafetensorError

    try:
        yield
    except SaveError as problem:
        raise SaveError(f"{problem}. {again}") from problem
    except (OSError, RuntimeError, SafetensorError) as problem:  # torch and safetensors have errors of their own
        text = str(problem)
        full = "os error 28" in text or "file write failed" in text or "unexpected pos" in text
        if not isinstance(problem, OSError) and not full and not isinstance(problem, SafetensorError):
            raise
        cause = problem if isinstance(problem, OSError) else OSError(errno.ENOSPC if full else errno.EIO, text)
        raise SaveError(f"{in_words(cause, path)}. {again}") from problem
