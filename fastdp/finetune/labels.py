"""What a cell says: a class, a number, a set of labels, words and their tags. Nothing is repaired."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..utils.formatting import listed
from .plan import FinetuneError
from .tables import Table

_MOST_CLASSES = 1000


def missing(value: Any) -> bool:
    """Whether a cell is empty."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or (
        isinstance(value, str) and not value.strip()
    )  # fmt: skip


def of_characters(text: str, what: str) -> str:
    """The text. Raises ValueError on half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"the {what} holds half a surrogate pair, which is no character")
    return text


def class_name(value: Any) -> str:
    """The name of a label as any file may write it: 1, 1.0, "1" and "1.0" are one class, as are true and "true".

    Raises ValueError on what is no class: nothing, NaN, a fraction, a list.
    """
    if missing(value) or (isinstance(value, str) and value.strip().lower() == "nan"):
        raise ValueError("no label")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if not value.is_integer():  # also an infinity
            raise ValueError(f"the label {value:g} is a fraction: a class is a name or a whole number{_REGRESSION}")
        return str(int(value))
    if isinstance(value, str):
        text = of_characters(value.strip(), "label")
        if re.fullmatch(r"[+-]?\d+\.0*", text):
            return str(int(text.split(".")[0]))
        if re.fullmatch(r"[+-]?\d*\.\d+", text):
            raise ValueError(f"the label {text} is a fraction: a class is a name or a whole number{_REGRESSION}")
        return {"True": "true", "False": "false"}.get(text, text)
    if isinstance(value, int):
        return str(value)
    raise ValueError(f"the label is of type {type(value).__name__}, expected a name or a whole number")


_REGRESSION = " (--task regression takes numbers)"


def number(value: Any) -> float:
    """A finite number. Raises ValueError."""
    if missing(value) or (isinstance(value, str) and value.strip().lower() == "nan"):
        raise ValueError("no label")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"the label is of type {type(value).__name__}, expected a number")
    try:
        found = float(value)
    except ValueError:
        raise ValueError(f"the label {str(value)[:40]!r} is no number") from None
    if not math.isfinite(found):
        raise ValueError(f"the label {value} is not finite")
    return found


def label_set(value: Any) -> tuple[str, ...]:
    """The labels of a record: a list, or a text that is one in JSON or has , ; or | between its labels."""
    if isinstance(value, list):
        return tuple(dict.fromkeys(class_name(each) for each in value))
    if missing(value):
        raise ValueError("no labels ([] stands for a record that has none)")
    if isinstance(value, str) and value.strip().startswith("["):
        return label_set(_listed(value))
    parts = re.split(r"[,;|]", value) if isinstance(value, str) else [value]
    return tuple(dict.fromkeys(class_name(part) for part in parts))


def yes(value: Any, column: str) -> bool:
    """Whether a column of yes or no says yes."""
    name = {"true": "1", "false": "0", "yes": "1", "no": "0"}.get(class_name(value).lower(), class_name(value))
    if name not in ("0", "1"):
        raise ValueError(f"{column} is {name[:40]!r}, expected 0 or 1")
    return name == "1"


def words_of(value: Any, what: str) -> tuple[str, ...]:
    """Words, or their tags: a list, a JSON list, or a text with blanks between."""
    if missing(value):
        raise ValueError(f"no {what}")
    if isinstance(value, str):
        value = _listed(value) if value.strip().startswith("[") and value.strip().endswith("]") else value.split()
    if not isinstance(value, list) or not value:
        raise ValueError(f"the {what} are {value!r:.40}, expected a list or a text with blanks between")
    if what == "tags":
        return tuple(class_name(each) for each in value)
    wrong = next((each for each in value if not isinstance(each, str) or not each.strip()), None)
    if wrong is not None or any(each is None for each in value):
        raise ValueError(f"one of the {what} is {wrong!r:.40}, expected a word")
    return tuple(of_characters(each, "word") for each in value)


def _listed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:40]!r} begins like a list, but is none in JSON") from None


# ---------------------------------------------------------------------- the set of names


def label_names(
    table: Table, labels: Sequence[Iterable[str]], given: Sequence[str] | None, known: Mapping[str, int] | None,
    task: str,
) -> tuple[list[str], bool]:  # fmt: skip
    """The labels in order of their numbers, and whether they are public (not read off the data). Raises FinetuneError.

    labels: of each record.
    """
    if given is not None:
        try:
            named = [class_name(name) for name in given]
        except ValueError as problem:
            raise FinetuneError(f"--labels: {problem}") from None
        if len(set(named)) < len(named) or len(named) < 2:
            raise FinetuneError(f"--labels needs two or more different labels, not {','.join(given)}")
        return named, True
    counts = Counter(name for each in labels for name in each)
    if known and set(counts) <= set(known) and sorted(known.values()) == list(range(len(known))):
        return sorted(known, key=lambda name: known[name]), True
    most = min(_MOST_CLASSES, max(len(labels) // 2, 2)) if task == "classify" else _MOST_CLASSES
    if len(counts) > most and task == "images":
        raise FinetuneError(f"{table.path} has {len(counts)} folders, each a class: is it the right folder?")
    if len(counts) > most:
        numbers = " If it holds numbers: --task regression" if all(_whole(name) for name in counts) else ""
        raise FinetuneError(
            f"the label column of {table.path} has {len(counts)} different values in {len(labels)} rows, such as "
            f"{listed(list(counts), 3)}: is it the right one (--label-column)?{numbers}"
        )
    if task in ("multi-label", "tokens") and len(counts) < 2:
        raise FinetuneError(
            f"{table.path} has {listed(list(counts)) or 'no label'} only, and --task {task} needs two labels or more"
        )
    return sorted(counts, key=lambda name: (0, int(name), "") if _whole(name) else (1, 0, name)), False


def _whole(name: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", name) is not None
