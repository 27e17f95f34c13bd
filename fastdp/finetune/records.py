"""From a table to records: what each cell says, which labels there are, who is held out, whose a record is.

A record is a dict: "text" (of images "path", and "text" is the hash of the file), "pair", "label", "group". A row that
cannot be used is refused, or skipped by --skip-bad-rows; nothing is repaired or dropped in silence.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..utils.formatting import listed
from .plan import FinetuneError
from .tables import choose, read_table
from .tasks import TASKS

_MOST_CLASSES = 1000
Record = dict[str, Any]


@dataclass
class Data:
    """What there is to train on and to evaluate on. names: of the labels; public: stated, not read off the data."""

    train: list[Record]
    held_out: list[Record]
    names: list[str] | None = None
    public: bool = False
    columns: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[str] | None:
        """The person of each record to train on."""
        return [each["group"] for each in self.train] if "group" in self.columns else None


def load_data(options: Namespace, known: Mapping[str, int] | None = None) -> Data:
    """Read DATA and --eval as the options say. Raises FinetuneError.

    known: {label: number} of a model that classifies already: used where it has every label that is found.
    """
    table = read_table(options.data, options)
    columns = choose(table.column_names, options.data, options)
    data = Data([], [], columns=columns)
    several = isinstance(columns.get("label"), list)
    if options.labels is not None and (several or not TASKS[options.task].names):
        why = "several columns, whose names are the labels" if several else f"--task {options.task}"
        raise FinetuneError(f"--labels does not go with {why}")
    rows, said = usable(table, lambda row: record_of(row, columns, options), options.data, options)
    data.said += said
    if several:
        data.names, data.public = columns["label"], True
    elif TASKS[options.task].names:
        data.names, data.public = label_names([_names(row["label"], options.task) for row in rows], options, known)
    found = numbered(rows, data, options.data, options)
    data.train, data.held_out = split(found, fraction_of(options))
    if options.eval is not None:
        other = read_table(options.eval, options, options.eval.suffix == options.data.suffix)
        missing = [name for name in columns.values() if isinstance(name, str) and name not in other.column_names]
        if missing:
            raise FinetuneError(f"{options.eval} has no column {missing[0]!r}. It has: {listed(other.column_names)}")
        rows, said = usable(other, lambda row: record_of(row, columns, options), options.eval, options)
        data.said += said
        data.held_out = numbered(rows, data, options.eval, options)
    check(data, options)
    return data


def usable(rows: Iterable[Any], make: Any, path: Path, options: Namespace) -> tuple[list[Any], list[str]]:
    """(make(row) of each row, what to say of those left out); raises FinetuneError on more than --skip-bad-rows."""
    good, bad, number = [], [], 0
    for number, row in enumerate(rows, 1):
        try:
            good.append(make(row))
        except ValueError as problem:
            bad.append(f"  {'image' if options.task == 'images' else 'row'} {number}: {problem}")
    if not bad:
        return good, []
    text = "\n".join(bad[:10]) + (f"\n  and {len(bad) - 10} more" if len(bad) > 10 else "")
    said = f"{len(bad)} of {number} rows of {path} cannot be used"
    if len(bad) > options.skip_bad_rows:
        remedy = "Are these the columns that are meant, and is it the right --task?" if not good else (
            f"Correct them, or leave them out: --skip-bad-rows {len(bad)}"
        )  # fmt: skip
        raise FinetuneError(f"{said}:\n{text}\n{remedy}")
    return good, [f"{said} and are left out:\n{text}"]


def numbered(rows: list[Record], data: Data, path: Path, options: Namespace) -> list[Record]:
    """The records with numbers in place of the names of their labels."""
    if data.names is None:
        return rows
    numbers = {name: number for number, name in enumerate(data.names)}

    def number(row: Record) -> Record:
        other = [name for name in _names(row["label"], options.task) if name not in numbers]
        if other:
            raise ValueError(f"the label {other[0][:40]!r} is none of {listed(list(numbers), 5)}")
        label = row["label"]
        if options.task == "tokens":
            return row | {"label": [numbers[tag] for tag in label]}
        return row | {
            "label": [float(n in label) for n in numbers] if options.task == "multi-label" else numbers[label]
        }

    found, said = usable(rows, number, path, options)
    data.said += said
    return found


# ---------------------------------------------------------------------- cells


def record_of(row: Mapping[str, Any], columns: Mapping[str, Any], options: Namespace) -> Record:
    """The record that a row says. Raises ValueError."""
    found: Record = {}
    text = row[columns["text"]]
    found["text"] = words_of(text, "words") if options.task == "tokens" else text_of(text, "text")
    if "pair" in columns:
        found["pair"] = text_of(row[columns["pair"]], "second text")
    if "label" in columns and TASKS[options.task].labels:
        found["label"] = _label(row, columns, options, found["text"])
    if "group" in columns:
        group = row[columns["group"]]
        if missing(group):
            raise ValueError("nothing says whose the record is (--group-by)")
        found["group"] = str(int(group) if isinstance(group, float) and group.is_integer() else group).strip()
    return found


def _label(row: Mapping[str, Any], columns: Mapping[str, Any], options: Namespace, text: Any) -> Any:
    column = columns["label"]
    if isinstance(column, list):
        return [name for name in column if yes(row[name], name)]
    cell = row[column]
    if options.task == "regression":
        return number(cell, options.label_range)
    if options.task == "multi-label":
        return label_set(cell)
    if options.task == "tokens":
        tags = [class_name(each) for each in words_of(cell, "tags")]
        if len(tags) != len(text):
            raise ValueError(f"{len(text)} words, but {len(tags)} tags")
        return tags
    if options.task == "seq2seq":
        return text_of(cell, "target")
    if options.task == "preference":
        chosen, rejected = text_of(cell, "chosen answer"), text_of(row[columns["rejected"]], "rejected answer")
        if chosen == rejected:
            raise ValueError("the chosen and the rejected answer are the same")
        return [chosen, rejected]
    return class_name(cell)


def missing(value: Any) -> bool:
    """Whether a cell is empty."""
    return value is None or value != value or (isinstance(value, str) and value.strip().lower() in ("", "nan"))


def text_of(value: Any, what: str) -> str:
    """A text. Raises ValueError."""
    if value is None or value == "" or isinstance(value, str) and not value.strip():
        raise ValueError(f"no {what}")
    if not isinstance(value, str):
        raise ValueError(f"the {what} is of type {type(value).__name__}, expected a string")
    return value


def class_name(value: Any) -> str:
    """The name of a label as any file may write it: 1, 1.0, "1" and "1.0" are one class, as are true and "True"."""
    if missing(value):
        raise ValueError("no label")
    if isinstance(value, list | dict):
        raise ValueError(f"the label is of type {type(value).__name__}, expected a name or a whole number")
    text = re.sub(r"^([+-]?\d+)\.0*$", r"\1", str(value).strip())
    return text.lower() if text in ("True", "False") else text


def number(value: Any, limits: tuple[float, float] | None) -> float:
    """A finite number, from -1 to 1 where a range is stated. Raises ValueError."""
    if missing(value):
        raise ValueError("no label")
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"the label {str(value)[:40]!r} is no number") from None
    if not math.isfinite(found):
        raise ValueError(f"the label {value} is not finite")
    if limits is None:
        return found
    low, high = limits
    if not low <= found <= high:
        raise ValueError(f"the label {found:g} is outside --label-range {low:g},{high:g}")
    return (found - (low + high) / 2) / ((high - low) / 2)


def label_set(value: Any) -> list[str]:
    """The labels of a record: a list, or a text that is one in JSON or has , ; or | between its labels."""
    if isinstance(value, str) and value.strip().startswith("["):
        value = _json_list(value)
    if isinstance(value, list):
        return [class_name(each) for each in value]
    if missing(value):
        raise ValueError("no labels ([] stands for a record that has none)")
    return [class_name(part) for part in re.split(r"[,;|]", str(value))]


def yes(value: Any, column: str) -> bool:
    """Whether a column of yes or no says yes."""
    name = class_name(value)
    if name.lower() not in ("0", "1", "true", "false", "yes", "no"):
        raise ValueError(f"{column} is {name[:40]!r}, expected 0 or 1")
    return name.lower() in ("1", "true", "yes")


def words_of(value: Any, what: str) -> list[Any]:
    """Words, or their tags: a list, a JSON list, or a text with blanks between."""
    if isinstance(value, str):
        value = _json_list(value) if value.strip().startswith("[") and value.strip().endswith("]") else value.split()
    if not value:
        raise ValueError(f"no {what}")
    if not isinstance(value, list):
        raise ValueError(f"the {what} are {value!r:.40}, expected a list or a text with blanks between")
    if what == "words":
        for word in value:
            text_of(word, "word")
    return value


def _json_list(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:40]!r} begins like a list, but is none in JSON") from None


def _names(label: Any, task: str) -> list[str]:
    """The names of labels that a record has."""
    return label if task in ("tokens", "multi-label") else [label]


# ---------------------------------------------------------------------- the set of labels, and who trains


def label_names(
    labels: Sequence[Sequence[str]], options: Namespace, known: Mapping[str, int] | None
) -> tuple[list[str], bool]:
    """The labels in order of their numbers, and whether they are public (not read off the data). Raises FinetuneError.

    labels: of each record.
    """
    if options.labels is not None:
        named = [class_name(name) for name in options.labels]
        if len(set(named)) < len(named) or len(named) < 2:
            raise FinetuneError(f"--labels needs two or more different labels, not {','.join(named)}")
        return named, True
    found = {name for each in labels for name in each}
    if known and found <= set(known) and sorted(known.values()) == list(range(len(known))):
        return sorted(known, key=lambda name: known[name]), True
    most = min(_MOST_CLASSES, max(len(labels) // 2, 2)) if options.task == "classify" else _MOST_CLASSES
    if len(found) > most:
        raise FinetuneError(
            f"the labels of {options.data} have {len(found)} different values in {len(labels)} rows, such as "
            f"{listed(sorted(found), 3)}: is it the right column (--label-column)? --task regression takes numbers"
        )
    if len(found) < 2:
        raise FinetuneError(f"{options.data} has the label {listed(sorted(found)) or '(none)'} only: two are needed")
    return sorted(found, key=lambda name: (0, int(name), "") if _whole(name) else (1, 0, name)), False


def _whole(name: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", name) is not None


def fraction_of(options: Namespace) -> float:
    """The share of DATA that is held out."""
    if options.eval_fraction is not None:
        return float(options.eval_fraction)
    return 0.0 if options.eval else 0.1


def split(records: list[Record], fraction: float) -> tuple[list[Record], list[Record]]:
    """Hold out a share by a hash of each record's text (of its person's key).

    So whether a record is held out depends on nothing but itself: one record more or less in the file moves no other,
    which the guarantee of training needs (a random split, as datasets', moves many); and no text, and no person, is on
    both sides.
    """
    sides: tuple[list[Record], list[Record]] = ([], [])
    for record in records:
        key = hashlib.sha256(str(record.get("group", record["text"])).encode()).digest()
        sides[int.from_bytes(key[:8], "big") < fraction * 2**64].append(record)
    return sides


def check(data: Data, options: Namespace) -> None:
    """That there is enough to train on. Raises FinetuneError."""
    if len(data.train) < 2:
        raise FinetuneError(
            f"{len(data.train)} records of {options.data} are left to train on (--eval-fraction): training needs two "
            "at least, and makes sense with hundreds"
        )
    labels = [each["label"] for each in data.train if "label" in each]
    if options.task == "tokens":
        labels = [[tag] for each in labels for tag in each]
    if labels and options.task not in ("seq2seq", "preference") and all(label == labels[0] for label in labels):
        raise FinetuneError(f"all {len(data.train)} records to train on have the same label: there is nothing to learn")
    units = len(set(data.groups)) if data.groups is not None else len(data.train)
    if options.batch_size is not None and options.batch_size > units:
        of = "persons" if data.groups is not None else "records"
        raise FinetuneError(f"--batch-size {options.batch_size}, but there are {units} {of} to train on")
