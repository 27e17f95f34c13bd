"""A file of records as a `datasets.Dataset`, and which of its columns is the text, the label, the person."""

from __future__ import annotations

import csv
import glob
import gzip
import re
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..utils.formatting import listed, nearest
from .options import FORMATS
from .plan import FinetuneError
from .tasks import TASKS, one_answer

_BY_SUFFIX = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet", ".pq": "parquet", ".txt": "txt", ".conll": "conll", ".iob": "conll", ".bio": "conll",
}  # fmt: skip
_BUILDERS = {"jsonl": "json", "parquet": "parquet", "txt": "text"}


def read_table(path: Path, options: Namespace, like_data: bool = True) -> Any:
    """Read a file of records into memory; like_data: by the options that describe DATA. Raises FinetuneError."""
    refuse_absent(path)
    kind = (options.format if like_data else None) or kind_of(path)
    if like_data and kind not in ("csv", "tsv") and (options.delimiter or options.quote or options.columns):
        raise FinetuneError(f"--delimiter, --quote and --columns are for CSV and TSV files; {path} is read as {kind}")
    encoding = options.encoding or "utf-8"
    try:
        if kind in ("csv", "tsv"):
            plain = Namespace(delimiter=None, quote=None, columns=None)
            table = _delimited(path, kind, options if like_data else plain, encoding)
        elif kind == "conll":
            table = _conll(path, encoding)
        else:
            table = _built(path, kind, encoding)
    except FinetuneError:
        raise
    except Exception as problem:  # noqa: BLE001 - pandas, pyarrow, datasets and the codecs raise many kinds
        text = str(problem.__cause__ or problem).strip() or type(problem).__name__
        raise FinetuneError(
            f"{path} cannot be read as {kind}: {text.splitlines()[0][:240]}. Is it the format (--format, --delimiter, "
            "--quote, --columns), and the encoding (--encoding latin-1, cp1252, utf-16, ...)?"
        ) from None
    if not len(table):
        raise FinetuneError(f"{path} has no records")
    return table


def kind_of(path: Path) -> str:
    """The format by the file's ending. Raises FinetuneError."""
    suffix = Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    if suffix.lower() not in _BY_SUFFIX:
        raise FinetuneError(
            f"{path}: the ending {suffix or '(none)'!r} does not tell the format: give --format {'|'.join(FORMATS)}"
        )
    return _BY_SUFFIX[suffix.lower()]


def refuse_absent(path: Path, folder: bool = False) -> None:
    """Raises FinetuneError where there is no such file, or (folder) nothing of that name."""
    if not path.exists():
        there = [each.name for each in path.parent.iterdir() if each.is_dir() == folder] if path.parent.is_dir() else []
        raise FinetuneError(f"there is no {'folder' if folder else 'file'} {path}{nearest(path.name, there)}")
    if path.is_dir() and not folder:
        raise FinetuneError(f"{path} is a folder: give one file of records ({', '.join(FORMATS)}), or --task images")


def _built(path: Path, kind: str, encoding: str) -> Any:
    from datasets import load_dataset

    how = {} if kind == "parquet" else {"encoding": encoding}
    with tempfile.TemporaryDirectory() as cache:  # which is deleted: the records are private
        table = load_dataset(
            _BUILDERS[kind], data_files=glob.escape(str(path)), split="train", cache_dir=cache, keep_in_memory=True,
            **how,
        )  # fmt: skip
        return table if kind != "txt" else table.filter(lambda row: bool(row["text"].strip()), keep_in_memory=True)


def _delimited(path: Path, kind: str, options: Namespace, encoding: str) -> Any:
    """Every cell as the text that stands there: nothing is guessed to be a number, a date or a missing value."""
    import pandas
    from datasets import Dataset

    delimiter = options.delimiter
    if delimiter is None:
        with _opened(path, encoding) as file:
            first = next((line for line in file if line.strip()), "")
        delimiter = "\t" if kind == "tsv" else max(",;\t|", key=first.count)  # the first of equals: a comma
    quote = options.quote or ("none" if kind == "tsv" else '"')
    how: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if quote == "none" else {"quotechar": quote}
    if options.columns:
        how |= {"names": options.columns, "header": None}
    if len(delimiter) != 1 or quote != "none" and len(quote) != 1:
        raise FinetuneError("--delimiter and --quote take one character (--quote also none)")
    frame = pandas.read_csv(path, sep=delimiter, encoding=encoding, dtype=str, keep_default_na=False, **how)
    if not isinstance(frame.index, pandas.RangeIndex):  # pandas takes the first field of such rows for their name
        raise ValueError(f"rows have more fields than the {len(frame.columns)} columns")
    return Dataset.from_pandas(frame.rename(columns=str.strip), preserve_index=False)


def _conll(path: Path, encoding: str) -> Any:
    """A word a line, its tag in the last field; an empty line ends a record. -DOCSTART- is no word."""
    from datasets import Dataset

    with _opened(path, encoding) as file:
        blocks = re.split(r"\n\s*\n", file.read())
    rows = []
    for block in blocks:
        fields = [line.split() for line in block.splitlines() if line.strip() and not line.startswith("-DOCSTART-")]
        for each in fields:
            if len(each) < 2:
                raise ValueError(f"the word {each[0][:40]!r} has no tag")
        if fields:
            rows.append({"tokens": [each[0] for each in fields], "tags": [each[-1] for each in fields]})
    return Dataset.from_list(rows)


def _opened(path: Path, encoding: str) -> Any:
    return (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", encoding=encoding)


# ---------------------------------------------------------------------- columns


def choose(columns: Sequence[str], path: Path, options: Namespace) -> dict[str, Any]:
    """{"text", "label", "pair", "rejected", "group": column}, as far as the task has them; a "label" of several columns
    is a list. As the options say, else the only column with a usual name, else the only one left. Raises FinetuneError.
    """
    task, preference = TASKS[options.task], options.task == "preference"
    flags = {"text": "--prompt-column" if preference else "--text-column", "label": task.flag,
             "pair": "--pair-column", "group": "--group-by", "rejected": "--rejected-column"}  # fmt: skip
    given = {what: getattr(options, flag[2:].replace("-", "_")) for what, flag in flags.items()}
    if given["pair"] is not None and not one_answer(options.task):
        raise FinetuneError(f"--pair-column does not go with --task {options.task}")
    found: dict[str, Any] = {what: name for what, name in given.items() if name is not None}
    if options.task == "multi-label" and "," in found.get("label", "") and found["label"] not in columns:
        found["label"] = [name.strip() for name in found["label"].split(",")]
    for what, name in found.items():
        for each in name if isinstance(name, list) else [name]:
            if each not in columns:
                hint = "" if options.columns else ". If the first line is a record and no header: --columns A,B,..."
                raise FinetuneError(
                    f"{path} has no column {each!r} ({flags[what]}){nearest(each, columns)}\n"
                    f"It has: {listed(columns)}{hint}"
                )
    usual = {"rejected": ("rejected",) if preference else (), "text": task.texts, "label": task.labels}
    wanted = [what for what, names in usual.items() if names and what not in found]
    for by_name in (True, False):
        for what in [what for what in wanted if what not in found]:
            taken = [each for name in found.values() for each in (name if isinstance(name, list) else [name])]
            left = [name for name in columns if name not in taken and (not by_name or _plain(name) in usual[what])]
            if len(left) == 1:
                found[what] = left[0]
            elif not by_name:
                raise FinetuneError(
                    f"which column of {path}? Give {flags[what]}. It has: {listed(columns)}\n"
                    "If the first line is a record and no header: --columns text,label"
                )
    apart = [found[what] for what in ("text", "pair", "label", "rejected") if isinstance(found.get(what), str)]
    if len(set(apart)) < len(apart):
        raise FinetuneError(f"a column is given twice, of {', '.join(apart)}: text, label and the like differ")
    return found


def _plain(name: str) -> str:
    """ "Review-Text " -> "review_text"."""
    return re.sub(r"[\s\-.]+", "_", name.strip().lower())
