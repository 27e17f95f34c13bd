"""Files of records: CSV, TSV, JSON lines, Parquet, CoNLL or text, read row by row; bad rows are told by line.

A row is never repaired or dropped in silence: what cannot be read is a `Bad`, and the caller refuses or skips it.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..utils.formatting import listed, nearest
from .plan import FinetuneError

FORMATS = ("csv", "tsv", "jsonl", "parquet", "txt", "conll")
_BY_SUFFIX = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet", ".pq": "parquet", ".txt": "txt", ".conll": "conll", ".iob": "conll", ".bio": "conll",
}  # fmt: skip
_DELIMITERS = (",", ";", "\t", "|")
_MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_LONGEST = 1 << 30  # characters in a field: the csv module's own limit of 131,072 is a refusal of long texts


class Bad(NamedTuple):
    """A row that cannot be used: its line in the file (its number in a Parquet file), and why."""

    line: int
    reason: str


@dataclass
class Table:
    """Rows of cells, in the order of `columns`; `lines` says where each stood."""

    path: Path
    kind: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    digest: str = ""  # of the file's bytes, to tell changed data when a run is resumed

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def place(self) -> str:
        """What `lines` counts."""
        return {"parquet": "row", "images": "image"}.get(self.kind, "line")

    def position(self, name: str, what: str) -> int:
        """Where a column stands. Raises FinetuneError where there is none of that name, or more than one."""
        count = self.columns.count(name)
        if count == 1:
            return self.columns.index(name)
        if count:
            raise FinetuneError(f"{self.path} has {count} columns named {name!r}: rename all but one of them")
        hint = ""
        if self.kind in ("csv", "tsv") and looks_like_data(self.columns):
            hint = (
                "\nThe first line looks like data, not like names. If the file has none, name its columns: --columns "
            )
            hint += ",".join(f"column{i + 1}" for i in range(len(self.columns)))
        raise FinetuneError(
            f"{self.path} has no column {name!r} ({what}){nearest(name, self.columns)}\n"
            f"It has: {listed(self.columns)}{hint}"
        )


def looks_like_data(columns: Sequence[str]) -> bool:
    """Whether a header has what no name has: a number, a sentence, nothing at all."""
    return any(name.strip().replace(".", "", 1).isdigit() or len(name) > 60 for name in columns)


def read_table(
    path: str | Path,
    kind: str | None = None,
    *,
    delimiter: str | None = None,
    quote: str | None = None,
    columns: Sequence[str] | None = None,
    encoding: str | None = None,
) -> Table:
    """Read a file of records.

    Args: kind: of FORMATS (default: by the file's ending, before ".gz"); delimiter (default: a tab in TSV; in CSV the
    one of , ; tab | that the first line has most of); quote: '"' (default of CSV), or "none" (default of TSV, where
    quotes are text); columns: their names, for a CSV or TSV file whose first line is a record; encoding (default:
    UTF-8, or what a byte order mark says).

    Raises FinetuneError where there is no file, nothing in it, or nothing can be made of it as a whole; single rows
    that cannot be read are listed in `Table.bad`.
    """
    path = Path(path)
    raw, kind = _bytes_of(path), kind or kind_of(path)
    if kind not in ("csv", "tsv") and (delimiter or quote or columns):
        raise FinetuneError(f"--delimiter, --quote and --columns are for CSV and TSV files; {path} is read as {kind}")
    table = Table(path, kind, [], digest=hashlib.sha256(raw).hexdigest())
    if kind == "parquet":
        _parquet(table, raw)
    else:
        text = _decoded(path, raw, encoding)
        if kind == "txt":
            table.columns = ["text"]
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    table.rows.append([line.rstrip("\r")])
                    table.lines.append(number)
        elif kind == "jsonl":
            _json_lines(table, text)
        elif kind == "conll":
            _conll(table, text)
        else:
            _delimited(table, text, delimiter, quote, columns)
    if not table.rows and not table.bad:
        raise FinetuneError(f"{path} has no records" + (" below its header" if table.columns else ""))
    return table


def kind_of(path: Path) -> str:
    """The format by the file's ending. Raises FinetuneError."""
    suffix = Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    found = _BY_SUFFIX.get(suffix.lower())
    if found is None:
        raise FinetuneError(
            f"{path}: the ending {suffix or '(none)'!r} does not tell the format: give --format {'|'.join(FORMATS)}"
        )
    return found


def refuse_absent(path: Path, folder: bool = False) -> None:
    """Raises FinetuneError where there is no such file, or (folder) nothing of that name."""
    if not path.exists():
        there = [each.name for each in path.parent.iterdir() if each.is_dir() == folder] if path.parent.is_dir() else []
        raise FinetuneError(f"there is no {'folder' if folder else 'file'} {path}{nearest(path.name, there)}")
    if path.is_dir() and not folder:
        images = ", or --task images" if any(each.is_dir() for each in path.iterdir()) else ""
        raise FinetuneError(f"{path} is a folder: give one file of records ({', '.join(FORMATS)}){images}")


def _bytes_of(path: Path) -> bytes:
    refuse_absent(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (OSError, EOFError) as problem:
        raise FinetuneError(f"{path} cannot be read: {problem}") from None
    if not raw.strip():
        raise FinetuneError(f"{path} is empty")
    return raw


def _decoded(path: Path, raw: bytes, encoding: str | None) -> str:
    marked = next((name for mark, name in _MARKS if raw.startswith(mark)), None)
    chosen = marked or encoding or "utf-8"
    try:
        return raw.decode(chosen)
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        raise FinetuneError(
            f"{path} is not {chosen}: line {line} has the byte 0x{raw[problem.start]:02x} where none can stand. "
            "If it is in another encoding, say which: --encoding latin-1 (or cp1252, utf-16, ...)"
        ) from None
    except LookupError:
        raise FinetuneError(
            f"there is no encoding {encoding!r}: --encoding utf-8, latin-1, cp1252, utf-16, ..."
        ) from None


def _delimited(
    table: Table, text: str, delimiter: str | None, quote: str | None, columns: Sequence[str] | None
) -> None:
    first = next((line for line in text.splitlines() if line.strip()), "")
    if delimiter is None:
        delimiter = "\t" if table.kind == "tsv" else max(_DELIMITERS, key=first.count)  # the first of equals: a comma
    quote = quote or ("none" if table.kind == "tsv" else '"')
    for name, value in (("--delimiter", delimiter), ("--quote", "'" if quote == "none" else quote)):
        if len(value) != 1:
            raise FinetuneError(f"{name} takes one character{' or none' if name == '--quote' else ''}, not {value!r}")
    how: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if quote == "none" else {"quotechar": quote}
    rows = _parsed(text, {"delimiter": delimiter, "strict": True, **how})
    names = list(columns) if columns else None
    for line, found in rows:
        if isinstance(found, str):
            table.bad.append(Bad(line, found))
        elif names is None:
            names = [cell.strip() for cell in found]
        elif len(found) != len(names):
            more = "" if quote != "none" or '"' not in "".join(found) else " (if fields are quoted: --quote '\"')"
            table.bad.append(Bad(line, f"{len(found)} fields, expected {len(names)}{more}"))
        else:
            table.rows.append(list(found))
            table.lines.append(line)
    table.columns = names or []


def _parsed(text: str, how: dict[str, Any]) -> Iterator[tuple[int, list[str] | str]]:
    """(the line a row begins at, its cells or what is wrong with it); blank lines are left out."""
    before = csv.field_size_limit(_LONGEST)
    try:
        start, lines = 0, text.split("\n")
        while start < len(lines):
            reader = csv.reader((lines[i] + "\n" for i in range(start, len(lines))), **how)
            line = start + 1
            try:
                for cells in reader:
                    if cells and any(cell.strip() for cell in cells):
                        yield line, cells
                    line = start + reader.line_num + 1
                return
            except csv.Error as problem:
                found = str(problem)
                if "unexpected end of data" in found:  # a quote without an end would take all that follows with it
                    found = "a quote is opened and not closed"
                yield line, found
                start = line  # go on with the line after the one that failed
    finally:
        csv.field_size_limit(before)


def _conll(table: Table, text: str) -> None:
    """A word a line, its tag in the last field; an empty line ends a record. -DOCSTART- is no word."""
    table.columns = ["tokens", "tags"]
    words: list[str] = []
    tags: list[str] = []
    begun, wrong = 0, ""
    for number, line in enumerate([*text.split("\n"), ""], 1):
        fields = line.split()
        if not fields and words:
            if wrong:
                table.bad.append(Bad(begun, wrong))
            else:
                table.rows.append([words, tags])
                table.lines.append(begun)
            words, tags, wrong = [], [], ""
        elif fields and fields[0] != "-DOCSTART-":
            begun = begun if words else number
            if len(fields) < 2:
                wrong = wrong or f"line {number} has the word {fields[0][:40]!r} and no tag"
            words.append(fields[0])
            tags.append(fields[-1])


def _json_lines(table: Table, text: str) -> None:
    rows: list[tuple[int, dict[str, Any]]] = []
    names: dict[str, None] = {}
    for line, found in _objects(text):
        if isinstance(found, str):
            table.bad.append(Bad(line, found))
        else:
            rows.append((line, found))
            names.update(dict.fromkeys(found))
    table.columns = list(names)
    table.rows = [[row.get(name) for name in names] for _, row in rows]
    table.lines = [line for line, _ in rows]


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = next(name for name in made if sum(name == other for other, _ in pairs) > 1)
            raise ValueError(f"{twice!r} is given more than once")
        return made

    def parsed(line: str) -> dict[str, Any] | str:
        try:
            value = json.loads(line, object_pairs_hook=once)
        except (ValueError, RecursionError) as problem:
            return f"no JSON: {problem}" if isinstance(problem, json.JSONDecodeError) else str(problem)
        return value if isinstance(value, dict) else f"a JSON {type(value).__name__}, expected an object"

    if text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise FinetuneError(f"the file is neither JSON lines nor a JSON list: {problem}") from None
        for number, record in enumerate(records, 1):
            yield number, record if isinstance(record, dict) else "expected an object"
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): U+2028 may stand within JSON
        if line.strip():
            yield number, parsed(line)


def _parquet(table: Table, raw: bytes) -> None:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise FinetuneError("Parquet files need pyarrow: pip install 'fastdp[finetune]'") from None
    try:
        found = parquet.ParquetFile(io.BytesIO(raw)).read()
    except (pyarrow.ArrowException, OSError) as problem:
        raise FinetuneError(f"{table.path} is no Parquet file, or a damaged one: {problem}") from None
    table.columns = [str(name) for name in found.column_names]
    cells: Iterable[Sequence[Any]] = [found.column(i).to_pylist() for i in range(found.num_columns)]
    table.rows = [list(row) for row in zip(*cells, strict=True)]
    table.lines = list(range(1, len(table.rows) + 1))


def refuse_bad(table: Table, bad: Sequence[Bad], most: int) -> str:
    """What to say of rows that are left out; raises FinetuneError where they are more than `most`."""
    if not bad:
        return ""
    bad = sorted(bad)
    first = "\n".join(f"  {table.place} {each.line}: {each.reason}" for each in bad[:10])
    more = f"\n  and {len(bad) - 10} more" if len(bad) > 10 else ""
    total = len(table.rows) + len(table.bad)
    said = f"{len(bad)} of {total} {'images' if table.kind == 'images' else 'rows'} of {table.path} cannot be used"
    if len(bad) > most:
        if len(bad) == total and table.kind != "images":
            delimited = table.kind in ("csv", "tsv")
            hint = "Is it the format (--format, --delimiter, --quote, --columns)?" if delimited else (
                "Are these the columns that are meant, and is it the right --task?"
            )  # fmt: skip
            raise FinetuneError(f"{said}:\n{first}{more}\n{hint}")
        way = f"--skip-bad-rows {len(bad)} does" if most == 0 else f"--skip-bad-rows allows {most}"
        raise FinetuneError(f"{said}:\n{first}{more}\nCorrect them, or leave them out: {way}")
    return f"{said} and are left out:\n{first}{more}"
