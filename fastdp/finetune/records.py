"""From a table to records: which columns, which labels, who is held out, whose a record is."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..utils.formatting import listed
from .columns import Columns, choose
from .labels import class_name, label_names, label_set, missing, number, of_characters, words_of, yes
from .plan import FinetuneError
from .tables import Bad, Table, read_table, refuse_bad
from .tasks import TASKS


@dataclass
class Records:
    """Texts (pairs of them, if `pairs`), what is to be predicted, keys of persons (group_by).

    labels, by task: the number of a class (classify); a number; 0 or 1 for every label (multi-label); words and the
    numbers of their tags (tokens); a text (seq2seq); the chosen and the rejected answer (preference).
    """

    texts: list[str]
    pairs: list[str] | None = None
    labels: list[Any] | None = None
    groups: list[str] | None = None
    paths: list[str] | None = None  # of images, whose hashes the texts are
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
    files: dict[str, str] = field(default_factory=dict)  # {name: SHA-256 of the unpacked file} of what is trained on


def load_data(options: Namespace, known: Mapping[str, int] | None = None) -> Data:
    """Read DATA and --eval as the options say.

    known: {label: number} of a model that classifies already: used where it has every label that is found.
    Raises FinetuneError.
    """
    how = {name: getattr(options, name) for name in ("delimiter", "quote", "columns", "encoding")}
    table = read_table(options.data, options.format, **how)
    if not table.rows:
        refuse_bad(table, table.bad, -1)
    columns = choose(table, options)
    data = Data(Records([]), None, None)
    data.columns = columns.names(table)
    data.files = {options.data.name: table.digest}
    rows, bad = _cells(table, columns, options)
    refuse_bad(table, [*table.bad, *bad], options.skip_bad_rows)  # before what is left of them is judged
    if options.labels is not None and not TASKS[options.task].names:
        raise FinetuneError(f"--labels does not go with --task {options.task}")
    if columns.several and options.labels is not None:
        raise FinetuneError("--labels does not go with several columns in --label-column, whose names are the labels")
    if columns.several:  # their names are no secret: the command names them
        data.names, data.public_labels = data.columns["label"].split(","), True
    elif TASKS[options.task].names:
        every = [_names(row.label, options.task) for row in rows]
        data.names, data.public_labels = label_names(table, every, options.labels, known, options.task)
    found, more = _records(rows, data.names, options.task)
    data.said += _said(refuse_bad(table, [*table.bad, *bad, *more], options.skip_bad_rows))
    if not len(found):
        raise FinetuneError(f"{table.path} has no row that can be used")
    fraction = options.eval_fraction if options.eval_fraction is not None else (0.0 if options.eval else 0.1)
    data.train, data.held_out = split(found, fraction)
    if options.eval is not None:
        alike = options.eval.suffix == options.data.suffix
        how = how if alike else {"encoding": options.encoding}
        other = read_table(options.eval, options.format if alike else None, **how)
        rows, bad = _cells(other, choose(other, options, data.columns), options)
        held_out, more = _records(rows, data.names, options.task)
        data.said += _said(refuse_bad(other, [*other.bad, *bad, *more], options.skip_bad_rows))
        data.held_out = held_out
    if data.held_out is not None and not len(data.held_out):
        data.held_out = None
    check(data, options)
    return data


def _said(text: str) -> list[str]:
    return [text] if text else []


# ---------------------------------------------------------------------- cells


@dataclass
class _Row:
    line: int
    text: str
    pair: str
    label: Any
    group: str


def _cells(table: Table, columns: Columns, options: Namespace) -> tuple[list[_Row], list[Bad]]:
    rows, bad = [], []
    what = "prompt" if options.task == "preference" else "text"
    for line, cells in zip(table.lines, table.rows, strict=True):
        try:
            text = cells[columns.text]
            rows.append(_Row(
                line, " ".join(words_of(text, "words")) if options.task == "tokens" else _text(text, what),
                "" if columns.pair is None else _text(cells[columns.pair], "second text"),
                _label(cells, columns, options, table),
                "" if columns.group is None else _group(cells[columns.group]),
            ))  # fmt: skip
        except ValueError as problem:
            bad.append(Bad(line, str(problem)))
    return rows, bad


def _label(cells: Sequence[Any], columns: Columns, options: Namespace, table: Table) -> Any:
    """What is to be predicted, as the file says it. Raises ValueError."""
    if columns.several:
        return tuple(table.columns[at] for at in columns.several if yes(cells[at], table.columns[at]))
    if columns.label is None:
        return ""
    cell = cells[columns.label]
    if options.task == "regression":
        return _in_range(number(cell), options.label_range)
    if options.task == "multi-label":
        return label_set(cell)
    if options.task == "tokens":
        words, tags = words_of(cells[columns.text], "words"), words_of(cell, "tags")
        if len(words) != len(tags):
            raise ValueError(f"{len(words)} words, but {len(tags)} tags")
        return words, tags
    if options.task == "seq2seq":
        return _text(cell, "target")
    if columns.rejected is not None:
        pair = _text(cell, "chosen answer"), _text(cells[columns.rejected], "rejected answer")
        if pair[0] == pair[1]:
            raise ValueError("the chosen and the rejected answer are the same")
        return pair
    return class_name(cell)


def _in_range(value: float, limits: tuple[float, float] | None) -> float:
    """The number, from -1 to 1 where a range is stated. Raises ValueError."""
    if limits is None:
        return value
    low, high = limits
    if not low <= value <= high:
        raise ValueError(f"the label {value:g} is outside --label-range {low:g},{high:g}")
    return (value - (low + high) / 2) / ((high - low) / 2)


def _names(label: Any, task: str) -> Sequence[str]:
    """The names of labels that a record has."""
    return label[1] if task == "tokens" else label if task == "multi-label" else (label,)


def _numbered(label: Any, numbers: Mapping[str, int], task: str) -> Any:
    """The label in numbers."""
    if task == "tokens":
        return list(label[0]), [numbers[tag] for tag in label[1]]
    if task == "multi-label":
        return [float(name in label) for name in numbers]
    return numbers[label]


def _text(value: Any, what: str) -> str:
    if missing(value):
        raise ValueError(f"no {what}")
    if not isinstance(value, str):
        raise ValueError(f"the {what} is of type {type(value).__name__}, expected a string")
    return of_characters(value, what)


def _group(value: Any) -> str:
    if missing(value):
        raise ValueError("nothing says whose the record is (--group-by)")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return of_characters(str(value).strip(), "person")


def _records(rows: Sequence[_Row], names: Sequence[str] | None, task: str) -> tuple[Records, list[Bad]]:
    """The rows whose labels are among the names; the rest are bad."""
    numbers = {name: number for number, name in enumerate(names or ())}
    good, bad = [], []
    for row in rows:
        other = [name for name in _names(row.label, task) if name not in numbers] if names else []
        if other:
            bad.append(Bad(row.line, f"the label {other[0][:40]!r} is none of {listed(list(numbers), 5)}"))
        else:
            good.append(row)
    labels = [_numbered(row.label, numbers, task) if names else row.label for row in good]
    records = Records(
        [row.text for row in good],
        [row.pair for row in good] if any(row.pair for row in good) else None,
        labels if TASKS[task].labels else None,
        [row.group for row in good] if any(row.group for row in good) else None,
    )
    return with_digest(records), bad


# ---------------------------------------------------------------------- who trains


def split(records: Records, fraction: float) -> tuple[Records, Records | None]:
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
    return with_digest(Records(texts, of(records.pairs), of(records.labels), of(records.groups), of(records.paths)))


def with_digest(records: Records) -> Records:
    digest = hashlib.sha256()
    for values in (records.texts, records.pairs, records.labels, records.groups):
        for value in values or ():
            coded = str(value).encode()
            digest.update(b"%d:" % len(coded) + coded)
        digest.update(b";")
    records.digest = digest.hexdigest()
    return records


def check(data: Data, options: Namespace) -> None:
    """That there is enough to train on. Raises FinetuneError."""
    if not len(data.train):
        raise FinetuneError(f"no record of {options.data} is left to train on: give --eval-fraction 0")
    labels = data.train.labels or []
    if options.task in ("classify", "images") and data.names is not None and len(set(labels)) < 2:
        raise FinetuneError(
            f"all {len(data.train)} records to train on have the label {data.names[labels[0]]!r}: there is nothing to "
            "tell apart"
        )
    if options.task in ("regression", "multi-label") and all(label == labels[0] for label in labels):
        what = "number" if options.task == "regression" else "labels"
        raise FinetuneError(
            f"all {len(data.train)} records to train on have the same {what}: there is nothing to learn"
        )
    if options.task == "tokens" and len({tag for _, tags in labels for tag in tags}) < 2:
        raise FinetuneError(f"all words of the {len(data.train)} records to train on have the same tag")
    if len(data.train) < 2:
        raise FinetuneError("one record is too few: training needs two at least, and makes sense with hundreds")
    units = len(set(data.train.groups)) if data.train.groups is not None else len(data.train)
    if options.batch_size is not None and options.batch_size > units:
        of = "persons" if data.train.groups is not None else "records"
        raise FinetuneError(f"--batch-size {options.batch_size}, but there are {units} {of} to train on")
