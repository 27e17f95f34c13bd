"""From a table to records: which columns, which labels, who is held out, whose a record is."""

from __future__ import annotations

import hashlib
import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..training.words import listed
from .job import FinetuneError
from .tables import Bad, Table, read_table, refuse_bad

_TEXTS = ("text", "sentence", "content", "review", "document", "body", "message")
_LABELS = ("label", "labels", "class", "target", "category")
_MOST_CLASSES = 1000


@dataclass
class Records:
    """Texts (pairs of them, if `pairs`), labels as numbers (classify), keys of persons (group_by)."""

    texts: list[str]
    pairs: list[str] | None = None
    labels: list[int] | None = None
    groups: list[str] | None = None
    digest: str = ""  # of all that is in it, in order

    def __len__(self) -> int:
        return len(self.texts)


@dataclass
class Data:
    """What there is to train on and to evaluate on, and the words that say so."""

    train: Records
    held_out: Records | None
    names: list[str] | None  # of the labels; None for lm
    said: list[str] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)  # {"text": ..., "label": ...}
    public_labels: bool = False  # given by --labels, not read off the data


@dataclass
class _Columns:
    text: int
    pair: int | None
    label: int | None
    group: int | None


def load_data(options: Namespace, known: Mapping[str, int] | None = None) -> Data:
    """Read DATA and --eval as the options say.

    known: {label: number} of a model that classifies already: used where it has every label that is found.
    Raises FinetuneError.
    """
    how = {name: getattr(options, name) for name in ("delimiter", "quote", "columns", "encoding")}
    table = read_table(options.data, options.format, **how)
    if not table.rows:
        refuse_bad(table, table.bad, -1)
    columns = _choose(table, options)
    data = Data(Records([]), None, None)
    data.columns = {
        what: table.columns[at]
        for what in ("text", "pair", "label", "group")
        if (at := getattr(columns, what)) is not None
    }
    rows, bad = _cells(table, columns)
    if options.task == "classify":
        data.names, data.public_labels = _label_names(table, rows, options.labels, known)
    found, more = _records(rows, data.names)
    data.said += _said(refuse_bad(table, [*table.bad, *bad, *more], options.skip_bad_rows))
    if not len(found):
        raise FinetuneError(f"{table.path} has no row that can be used")
    fraction = options.eval_fraction if options.eval_fraction is not None else (0.0 if options.eval else 0.1)
    data.train, data.held_out = _split(found, fraction)
    if options.eval is not None:
        alike = options.eval.suffix == options.data.suffix
        how = how if alike else {"encoding": options.encoding}
        other = read_table(options.eval, options.format if alike else None, **how)
        rows, bad = _cells(other, _choose(other, options, data.columns))
        held_out, more = _records(rows, data.names)
        data.said += _said(refuse_bad(other, [*other.bad, *bad, *more], options.skip_bad_rows))
        data.held_out = held_out
    if data.held_out is not None and not len(data.held_out):
        data.held_out = None
    _check(table, data, options)
    return data


def _said(text: str) -> list[str]:
    return [text] if text else []


# ---------------------------------------------------------------------- columns


def _choose(table: Table, options: Namespace, as_before: Mapping[str, str] | None = None) -> _Columns:
    """Where the text, the label and the person stand; as_before: the names that training took."""
    names = as_before or {}

    def at(what: str, given: str | None) -> int | None:
        given = names.get(what, given)
        flag = {"text": "--text-column", "pair": "--pair-column", "label": "--label-column", "group": "--group-by"}
        return None if given is None else table.position(given, flag[what])

    group, pair = at("group", options.group_by), at("pair", options.pair_column)
    text, label = at("text", options.text_column), at("label", options.label_column)
    taken = {group, pair, text, label} - {None}
    if text is None:  # a usual name first: what is left beside it may be the label
        usual = [i for i, name in enumerate(table.columns) if name.lower() in _TEXTS and i not in taken]
        if len(usual) == 1:
            text = usual[0]
            taken.add(text)
    if options.task == "classify" and label is None:
        label = _guess(table, _LABELS, taken, "--label-column")
        taken.add(label)
    if text is None:
        text = _guess(table, _TEXTS, taken, "--text-column")
    if options.task != "classify":
        label = None
    if text == label or (pair is not None and pair in (text, label)):
        raise FinetuneError(f"the column {table.columns[text]!r} is given twice: text, pair and label differ")
    return _Columns(text, pair, label, group)


def _guess(table: Table, usual: Sequence[str], taken: set[Any], flag: str) -> int:
    """The only column with a usual name, else the only one left."""
    left = [i for i in range(len(table.columns)) if i not in taken]
    for candidates in ([i for i in left if table.columns[i].lower() in usual], left):
        if len(candidates) == 1:
            table.position(table.columns[candidates[0]], flag)  # refuses a name that stands twice
            return candidates[0]
    names = ",".join(f"column{i + 1}" for i in range(len(table.columns))) if len(table.columns) != 2 else "text,label"
    hint = f"\nIf the first line is a record and no header: --columns {names}" if table.kind in ("csv", "tsv") else ""
    raise FinetuneError(f"which column of {table.path}? Give {flag}. It has: {listed(table.columns)}{hint}")


# ---------------------------------------------------------------------- cells


@dataclass
class _Row:
    line: int
    text: str
    pair: str
    label: str
    group: str


def _cells(table: Table, columns: _Columns) -> tuple[list[_Row], list[Bad]]:
    rows, bad = [], []
    for line, cells in zip(table.lines, table.rows, strict=True):
        try:
            rows.append(_Row(
                line, _text(cells[columns.text], "text"),
                "" if columns.pair is None else _text(cells[columns.pair], "second text"),
                "" if columns.label is None else class_name(cells[columns.label]),
                "" if columns.group is None else _group(cells[columns.group]),
            ))  # fmt: skip
        except ValueError as problem:
            bad.append(Bad(line, str(problem)))
    return rows, bad


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value)) or (
        isinstance(value, str) and not value.strip()
    )  # fmt: skip


def _text(value: Any, what: str) -> str:
    if _missing(value):
        raise ValueError(f"no {what}")
    if not isinstance(value, str):
        raise ValueError(f"the {what} is of type {type(value).__name__}, expected a string")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"the {what} holds half a surrogate pair, which is no character")
    return value


def _group(value: Any) -> str:
    if _missing(value):
        raise ValueError("nothing says whose the record is (--group-by)")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def class_name(value: Any) -> str:
    """The name of a label as any file may write it: 1, 1.0, "1" and "1.0" are one class, as are true and "true".

    Raises ValueError on what is no class: nothing, NaN, a fraction, a list.
    """
    if _missing(value) or (isinstance(value, str) and value.strip().lower() == "nan"):
        raise ValueError("no label")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if not value.is_integer():  # also an infinity
            raise ValueError(f"the label {value:g} is a fraction: a class is a name or a whole number")
        return str(int(value))
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"[+-]?\d+\.0*", text):
            return str(int(text.split(".")[0]))
        if re.fullmatch(r"[+-]?\d*\.\d+", text):
            raise ValueError(f"the label {text} is a fraction: a class is a name or a whole number")
        return {"True": "true", "False": "false"}.get(text, text)
    if isinstance(value, int):
        return str(value)
    raise ValueError(f"the label is of type {type(value).__name__}, expected a name or a whole number")


def _label_names(
    table: Table, rows: Sequence[_Row], given: Sequence[str] | None, known: Mapping[str, int] | None
) -> tuple[list[str], bool]:
    """The labels in order of their numbers, and whether they are public (not read off the data)."""
    if given is not None:
        try:
            named = [class_name(name) for name in given]
        except ValueError as problem:
            raise FinetuneError(f"--labels: {problem}") from None
        if len(set(named)) < len(named) or len(named) < 2:
            raise FinetuneError(f"--labels needs two or more different labels, not {','.join(given)}")
        return named, True
    counts = Counter(row.label for row in rows)
    if known and set(counts) <= set(known) and sorted(known.values()) == list(range(len(known))):
        return sorted(known, key=lambda name: known[name]), True
    if len(counts) > min(_MOST_CLASSES, max(len(rows) // 2, 2)):
        raise FinetuneError(
            f"the label column of {table.path} has {len(counts)} different values in {len(rows)} rows, such as "
            f"{listed(list(counts), 3)}: is it the right one (--label-column)?"
        )
    return sorted(counts, key=lambda name: (0, int(name), "") if _whole(name) else (1, 0, name)), False


def _whole(name: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", name) is not None


def _records(rows: Sequence[_Row], names: Sequence[str] | None) -> tuple[Records, list[Bad]]:
    """The rows whose label is among the names; the rest are bad."""
    numbers = {name: number for number, name in enumerate(names or ())}
    bad = [Bad(row.line, f"the label {row.label[:40]!r} is none of {listed(list(numbers), 5)}")
           for row in rows if names and row.label not in numbers]  # fmt: skip
    good = [row for row in rows if not names or row.label in numbers]
    records = Records(
        [row.text for row in good],
        [row.pair for row in good] if any(row.pair for row in good) else None,
        [numbers[row.label] for row in good] if names else None,
        [row.group for row in good] if any(row.group for row in good) else None,
    )
    return _with_digest(records), bad


# ---------------------------------------------------------------------- who trains


def _split(records: Records, fraction: float) -> tuple[Records, Records | None]:
    """Hold out a share by a hash of each record's text (of its person's key).

    So whether a record is held out depends on nothing but itself: one record more or less in the file moves no other,
    which the guarantee of training needs; and no text, and no person, is on both sides.
    """
    if fraction == 0:
        return records, None
    keys = records.groups if records.groups is not None else records.texts
    out = [int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < fraction * 2**64 for key in keys]
    return select(records, [i for i, held in enumerate(out) if not held]), select(
        records, [i for i, held in enumerate(out) if held]
    )


def select(records: Records, which: Sequence[int]) -> Records:
    """The records of these numbers, in this order."""

    def of(values: list[Any] | None) -> list[Any] | None:
        return None if values is None else [values[i] for i in which]

    texts = [records.texts[i] for i in which]
    return _with_digest(Records(texts, of(records.pairs), of(records.labels), of(records.groups)))


def _with_digest(records: Records) -> Records:
    digest = hashlib.sha256()
    for values in (records.texts, records.pairs, records.labels, records.groups):
        for value in values or ():
            coded = str(value).encode()
            digest.update(b"%d:" % len(coded) + coded)
        digest.update(b";")
    records.digest = digest.hexdigest()
    return records


def _check(table: Table, data: Data, options: Namespace) -> None:
    if not len(data.train):
        raise FinetuneError(f"no record of {table.path} is left to train on: give --eval-fraction 0")
    if data.names is not None and len(set(data.train.labels or ())) < 2:
        only = data.names[(data.train.labels or [0])[0]]
        raise FinetuneError(
            f"all {len(data.train)} records to train on have the label {only!r}: there is nothing to tell apart"
        )
    if len(data.train) < 2:
        raise FinetuneError("one record is too few: training needs two at least, and makes sense with hundreds")
    units = len(set(data.train.groups)) if data.train.groups is not None else len(data.train)
    if options.batch_size is not None and options.batch_size > units:
        of = "persons" if data.train.groups is not None else "records"
        raise FinetuneError(f"--batch-size {options.batch_size}, but there are {units} {of} to train on")
