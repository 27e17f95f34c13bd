"""Files that outlive a crash: files that are written whole, and append-only logs, each line with a checksum and on the
disk before its writer goes on.

A line is JSON behind its checksum. A last line without its end was never synced, so nothing has followed from it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: two processes at once are not noticed there
    fcntl = None  # type: ignore[assignment]


def lock(file: int) -> bool:
    """Lock an open file against other processes. False if one of them has locked it; where there are no locks, as on
    some network folders, True."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            return problem.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def line_of(content: Mapping[str, Any]) -> bytes:
    """A line that says this."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def content_of(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is damaged."""
    check, _, text = line.partition(b" ")
    try:
        if int(check, 16) != zlib.crc32(text):
            return None
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def append(file: int, line: bytes) -> None:
    """Write a line and sync it; raises OSError, and then the line may be there without its end."""
    if os.write(file, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file)


def whole_lines(file: int, path: Path) -> list[bytes]:
    """The lines of an open file; what a process that died has left of another is cut off."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(file, len(whole))
        os.fsync(file)
    return whole.splitlines()


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file of this mode (less the umask): whole and on the disk, or not at all. Raises OSError."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.unlink(missing_ok=True)  # of a process that was killed; its mode may be another
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.absolute().parent)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Renames and new names in a folder reach the disk."""
    if os.name == "nt":  # where folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network folders cannot
            raise
    finally:
        os.close(descriptor)
