"""privacy.json: what a run has spent, beside its model and in each of its checkpoints. It holds no key."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..accounting import History as History
from ..accounting.runs import kind_of, run_of
from ..errors import AccountingError
from ..utils.formatting import at_most

NAME = "privacy.json"


class Spent(NamedTuple):
    """What privacy.json says: the noised steps, where the loader stands, and what the run was told."""

    history: History
    loader: dict[str, Any]
    options: dict[str, Any]

    @property
    def steps(self) -> int:
        return sum(run[2] for run in self.history)


def write(folder: str | Path, spent: Spent, epsilon: float | None) -> None:
    """Write it whole or not at all. epsilon None: not computed at this moment."""
    content = {
        "format": 1,
        "epsilon": None if epsilon is None or math.isinf(epsilon) else float(at_most(epsilon, 8)),
        **spent.options,
        "steps": spent.steps,
        "history": [list(run) for run in spent.history],
        "loader": {name: spent.loader[name] for name in ("pass", "step") if name in spent.loader},
    }
    path = Path(folder) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def read(folder: str | Path) -> Spent | None:
    """The file of a folder, or None where there is none. Raises AccountingError on a broken one."""
    path = Path(folder) / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        history = [run_of(*run) for run in content["history"]]
        loader = {name: int(content["loader"][name]) for name in ("pass", "step") if name in content["loader"]}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as problem:
        raise AccountingError(f"{path} cannot be read, so what was spent is not known: {problem!r}") from None
    known = ("format", "epsilon", "steps", "history", "loader")
    return Spent(history, loader, {name: value for name, value in content.items() if name not in known})


def continues(longer: History, shorter: History) -> bool:
    """Whether a run whose history is the shorter may have gone on to the longer."""
    if not shorter:
        return True
    place, last = len(shorter) - 1, shorter[-1]
    if longer[:place] != shorter[:place] or len(longer) <= place or kind_of(longer[place]) != kind_of(last):
        return False
    return longer[place][2] >= last[2]
