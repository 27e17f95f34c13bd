"""Rows of CSV files, and Markdown tables of them between the marks of a document. Needs the standard library alone."""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 119, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def between(text: str, name: str, body: str) -> str:
    """The text with another body between the marks of a name; ValueError where it has none."""
    mark = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.S)
    if not mark.search(text):
        raise ValueError(f"the document has no place for the table {name}")
    return mark.sub(lambda m: f"{m[1]}{body}\n{m[2]}", text)
