"""Which column of a table is the text, the label, the person: as the options say, or the only one that it can be."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.formatting import listed
from .plan import FinetuneError
from .tables import Table
from .tasks import TASKS, one_answer


@dataclass
class Columns:
    """Positions in a row. several: columns of yes or no, each a label of its own (multi-label)."""

    text: int
    pair: int | None = None
    label: int | None = None
    group: int | None = None
    rejected: int | None = None
    several: tuple[int, ...] = ()

    def names(self, table: Table) -> dict[str, str]:
        """{what: the column's name}, to say it and to read another table alike."""
        found = {
            what: table.columns[at]
            for what in ("text", "pair", "label", "rejected", "group")
            if (at := getattr(self, what)) is not None
        }
        return found | ({"label": ",".join(table.columns[at] for at in self.several)} if self.several else {})


def choose(table: Table, options: Namespace, as_before: Mapping[str, str] | None = None) -> Columns:
    """Where everything stands; as_before: the names that training took. Raises FinetuneError."""
    names, task = as_before or {}, TASKS[options.task]
    flags = {"text": "--text-column", "pair": "--pair-column", "label": task.flag, "group": "--group-by",
             "rejected": "--rejected-column"}  # fmt: skip
    if options.task == "preference":
        flags["text"] = "--prompt-column"
    of = {what: getattr(options, flag[2:].replace("-", "_"), None) for what, flag in flags.items()}
    if of["pair"] is not None and not one_answer(options.task):
        raise FinetuneError(f"--pair-column does not go with --task {options.task}")

    def at(what: str) -> int | None:
        name = names.get(what, of[what])
        return None if name is None else table.position(name, flags[what])

    several: tuple[int, ...] = ()
    stated = names.get("label", of["label"])
    if options.task == "multi-label" and stated and stated not in table.columns and "," in stated:
        several = tuple(table.position(name.strip(), flags["label"]) for name in stated.split(","))
    group, pair, text = at("group"), at("pair"), at("text")
    label = at("label") if task.labels and not several else None
    taken: set[Any] = {group, pair, text, label, *several} - {None}
    rejected = None
    if options.task == "preference":
        rejected = at("rejected")
        if rejected is None:
            rejected = _guess(table, ("rejected",), taken, flags["rejected"])
        taken.add(rejected)
    if text is None:  # a usual name first: what is left beside it may be the label
        usual = [i for i, name in enumerate(table.columns) if _plain(name) in task.texts and i not in taken]
        if len(usual) == 1:
            text = usual[0]
            taken.add(text)
    if task.labels and label is None and not several:
        label = _guess(table, task.labels, taken, flags["label"])
        taken.add(label)
    if text is None:
        text = _guess(table, task.texts, taken, flags["text"])
    given = [at for at in (text, pair, label, rejected, *several) if at is not None]
    twice = next((at for at in given if given.count(at) > 1), None)
    if twice is not None:
        what = "prompt, chosen and rejected" if options.task == "preference" else "text, pair and label"
        raise FinetuneError(f"the column {table.columns[twice]!r} is given twice: {what} differ")
    return Columns(text, pair, label, group, rejected, several)


def _plain(name: str) -> str:
    """ "Review-Text " -> "review_text"."""
    return re.sub(r"[\s\-.]+", "_", name.strip().lower())


def _guess(table: Table, usual: Sequence[str], taken: set[Any], flag: str) -> int:
    """The only column with a usual name, else the only one left."""
    left = [i for i in range(len(table.columns)) if i not in taken]
    for candidates in ([i for i in left if _plain(table.columns[i]) in usual], left):
        if len(candidates) == 1:
            table.position(table.columns[candidates[0]], flag)  # refuses a name that stands twice
            return candidates[0]
    names = ",".join(f"column{i + 1}" for i in range(len(table.columns))) if len(table.columns) != 2 else "text,label"
    hint = f"\nIf the first line is a record and no header: --columns {names}" if table.kind in ("csv", "tsv") else ""
    raise FinetuneError(f"which column of {table.path}? Give {flag}. It has: {listed(table.columns)}{hint}")
