"""Files that are whole or not there, with the mode that their content needs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..utils.append_log import write_whole
from .plan import FinetuneError

PUBLIC, PRIVATE = 0o666, 0o600  # modes: what may be given away, less the umask; what epsilon does not cover
NO_CHARACTER = "backslashreplace"  # how bytes of an argument that are not UTF-8 are written


class SaveError(FinetuneError):
    """A file could not be written; what was there before is untouched."""


def write(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Write a text: whole and on the disk, or not at all. Raises SaveError, with what to do about it."""
    try:
        write_whole(path, text.encode(errors=NO_CHARACTER), mode)
    except OSError as problem:
        raise SaveError(in_words(problem, path)) from problem


def in_words(problem: OSError, path: Path) -> str:
    """What a failed write means, and what to do."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left to write {path}: what was saved before is untouched. Free some space"
    return f"{path} could not be written ({problem.strerror or problem}). What was saved before is untouched"


@contextlib.contextmanager
def disk_problems(path: Path, again: str) -> Iterator[None]:
    """What other libraries raise about a disk becomes a SaveError, with what to do next."""
    from safetensors import SafetensorError

    try:
        yield
    except SaveError as problem:
        raise SaveError(f"{problem}. {again}") from problem
    except (OSError, RuntimeError, SafetensorError) as problem:  # torch and safetensors have errors of their own
        full = any(words in str(problem) for words in ("os error 28", "file write failed", "unexpected pos"))
        if not full and not isinstance(problem, OSError | SafetensorError):
            raise
        cause = problem if isinstance(problem, OSError) else OSError(errno.ENOSPC if full else errno.EIO, str(problem))
        raise SaveError(f"{in_words(cause, path)}. {again}") from problem


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` at the end of the block; its files get the umask's modes."""
    unfinished, mask = folder.with_name(folder.name + ".unfinished"), os.umask(0)
    os.umask(mask)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
        for path in unfinished.rglob("*"):
            path.chmod((0o777 if path.is_dir() else PUBLIC) & ~mask)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
