"""The folder --out: whether a run can begin or go on in it, found out before anything is loaded."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from .files import write
from .plan import FinetuneError

OPTIONS = "options.json"  # what the run was begun with, and when
# may differ when a run is resumed: they change neither the guarantee nor what is learnt
_FREE = ("device", "max_physical_batch_size", "checkpoint_every", "graphed", "model", "data", "eval", "responsible")


def is_begun(out: Path) -> bool:
    """Whether a run has begun in the folder."""
    with contextlib.suppress(OSError):  # no name that the system takes, or a folder that may not be read
        return (out / "journal.jsonl").exists() or (out / OPTIONS).exists()
    return False


def begin_folder(options: Namespace) -> None:
    """Make the folder, and keep the options and the time in it."""
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / OPTIONS).exists():
        write(options.out / OPTIONS, json.dumps({"begun": utc(time.time()), **_stated(options)}, indent=2) + "\n")


def times(out: Path) -> tuple[str, str]:
    """When the run began, and when its last step was journalled: outputs may be written again later."""
    return str(_kept(out).get("begun", "")), utc((out / "journal.jsonl").stat().st_mtime)


def utc(seconds: float) -> str:
    """A time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _kept(out: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((out / OPTIONS).read_text()))
    return {}


def _stated(options: Namespace) -> dict[str, Any]:
    """Options as they are kept in the folder and compared when the run is resumed."""
    stated = {
        name: value for name, value in vars(options).items() if name not in ("command", "resume", "dry_run", "out")
    }
    return dict(json.loads(json.dumps(stated, default=str)))


def check_out(options: Namespace) -> None:
    """--out is new, empty, or the run that --resume goes on with, and may be written. Raises FinetuneError."""
    out: Path = options.out
    try:
        str(out.absolute()).encode()
        _check_state(options, out)
        above = out.absolute().parent
        while not above.exists():
            above = above.parent
        for place in [above, *([out] if out.exists() else [])] if not options.dry_run else []:
            with tempfile.NamedTemporaryFile(dir=place, prefix=".fastdp-"):  # as permissions do not tell all
                pass
    except UnicodeEncodeError:
        raise FinetuneError(f"--out {out}: its path has bytes that are no UTF-8: give another folder") from None
    except OSError as problem:
        raise FinetuneError(
            f"--out {out}, or the folder around it, where the run's keys lie, cannot be written ({problem.strerror}): "
            "give another --out, or change the permissions"
        ) from None


def _check_state(options: Namespace, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise FinetuneError(f"--out {out} is a file: give a folder")
    if not options.resume and is_begun(out):
        raise FinetuneError(
            f"{out} holds a run already: go on with it by --resume, or give another --out. (A second run on the "
            "same data spends a second budget.)"
        )
    if not options.resume and out.exists() and any(out.iterdir()):
        raise FinetuneError(f"{out} is not empty: give another --out")
    if options.resume and not is_begun(out):
        raise FinetuneError(f"there is no run in {out} to resume: check --out, or leave --resume out")
    before, now = _kept(out), _stated(options)  # what these do not say, the journal compares
    changed = [name for name in now if name not in _FREE and name in before and before[name] != now[name]]
    if changed:
        lines = "\n".join(f"  --{name.replace('_', '-')}: was {_shown(before[name])}, now {_shown(now[name])}"
                          for name in changed)  # fmt: skip
        raise FinetuneError(
            f"the run in {out} was begun with other options:\n{lines}\nResume it with the same ones, or begin "
            "another run in another --out"
        )


def _shown(value: Any) -> str:
    return "not given" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
