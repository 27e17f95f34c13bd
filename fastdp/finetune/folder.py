"""The folder --out: whether a run can begin or go on in it, found out before anything is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from .files import PRIVATE, new_file
from .plan import FinetuneError

OPTIONS = "options.json"  # what the run was begun with, and when
# may differ when a run is resumed: they change neither the guarantee nor what is learnt
_FREE = ("resume", "dry_run", "out", "device", "max_physical_batch_size", "checkpoint_every", "graphed",
         "model", "data", "eval", "responsible")  # fmt: skip


def is_begun(out: Path) -> bool:
    """Whether a run has begun in the folder."""
    with contextlib.suppress(OSError):  # no name that the system takes, or a folder that may not be read
        return (out / "journal.jsonl").exists() or (out / OPTIONS).exists()
    return False


def begin_folder(options: Namespace) -> None:
    """Make the folder, and keep the options and the time in it."""
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / OPTIONS).exists():
        kept = {"begun": now(), **_stated(options)}
        with new_file(options.out / OPTIONS, PRIVATE) as file:
            file.write((json.dumps(kept, indent=2) + "\n").encode())


def begun_at(out: Path) -> str:
    """When the run began, in UTC; "" where the folder does not say."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return str(json.loads((out / OPTIONS).read_text()).get("begun", ""))
    return ""


def ended_at(out: Path) -> str:
    """When the last step was journalled, in UTC: outputs may be written again later."""
    with contextlib.suppress(OSError):
        return _utc((out / "journal.jsonl").stat().st_mtime)
    return now()


def now() -> str:
    """The time in UTC, to the second."""
    return _utc(time.time())


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _stated(options: Namespace) -> dict[str, Any]:
    """Options as they are kept in the folder and compared when the run is resumed."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
            if name not in ("command", "resume", "dry_run", "out")}  # fmt: skip


def check_out(options: Namespace) -> None:
    """--out is new, empty, or the run that --resume goes on with, and may be written. Raises FinetuneError."""
    out: Path = options.out
    try:
        str(out.absolute()).encode()
    except UnicodeEncodeError:
        raise FinetuneError(
            f"--out {out}: its path has bytes that are no UTF-8, where tokenizers cannot be saved: give another folder"
        ) from None
    try:
        _check_state(options, out)
    except OSError as problem:
        raise FinetuneError(f"--out {out} cannot be used ({problem.strerror}): give another folder") from None
    _check_writable(out, probe=not options.dry_run)


def _check_state(options: Namespace, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise FinetuneError(f"--out {out} is a file: give a folder")
    if not options.resume:
        if is_begun(out):
            raise FinetuneError(
                f"{out} holds a run already: go on with it by --resume, or give another --out. (A second run on the "
                "same data spends a second budget.)"
            )
        if out.exists() and any(out.iterdir()):
            raise FinetuneError(f"{out} is not empty: give another --out")
        return
    if not is_begun(out):
        raise FinetuneError(f"there is no run in {out} to resume: check --out, or leave --resume out")
    try:
        before = json.loads((out / OPTIONS).read_text())
    except (OSError, ValueError):
        return  # the journal compares the plan, and the keys' file the data
    now = _stated(options)
    changed = [name for name in now if name not in _FREE and name in before  # a flag may be newer than the run
               and before[name] != json.loads(json.dumps(now[name]))]  # fmt: skip
    if changed:
        lines = "\n".join(f"  --{name.replace('_', '-')}: was {_shown(before[name])}, now {_shown(now[name])}"
                          for name in changed)  # fmt: skip
        raise FinetuneError(
            f"the run in {out} was begun with other options:\n{lines}\nResume it with the same ones, or begin "
            "another run in another --out"
        )


def _check_writable(out: Path, probe: bool) -> None:
    """Both the folder and the one around it, which holds the run's keys, may be written. Raises FinetuneError.

    probe: try it by a file that is deleted at once, as permissions do not tell all (a disk that is mounted to be read).
    """
    whole = out.absolute()
    places = [whole] if whole.exists() else []
    above = whole.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    for place in [*places, above]:
        what = f"--out {out}" if place == whole else f"--out {out}: {place}, where the folder or its keys would lie,"
        if not place.is_dir():
            raise FinetuneError(f"{what} is a file: give a folder elsewhere")
        try:
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(0, "you have no permission")
            if probe:
                with tempfile.NamedTemporaryFile(dir=place, prefix=".fastdp-"):
                    pass
        except OSError as problem:
            raise FinetuneError(
                f"{what} cannot be written ({problem.strerror}): give another --out, or change the permissions"
            ) from None


def _shown(value: Any) -> str:
    return (
        "not given" if value is None else ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    )
