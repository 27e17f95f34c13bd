"""Formats names, numbers, sizes and durations for messages."""

from __future__ import annotations

import decimal
import difflib
import math
from collections.abc import Sequence


def nearest(name: str, there: Sequence[str]) -> str:
    """ "; did you mean 'label'?", or nothing where no name is near."""
    lower = {each.lower(): each for each in reversed(there)}
    found = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.6)
    return f"; did you mean {lower[found[0]]!r}?" if found else ""


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names in quotes, long ones cut, the first few of many."""
    short = [repr(name if len(name) <= 40 else name[:37] + "...") for name in names[:most]]
    return ", ".join(short) + (f" and {len(names) - most} more" if len(names) > most else "")


def count(number: float) -> str:
    """1234567 -> "1,234,567"."""
    return f"{number:,.0f}"


def at_most(bound: float, digits: int) -> str:
    """A bound in so many significant digits, rounded up, so that it is never said too small: 7.9991 -> "8"."""
    if not math.isfinite(bound):
        return str(bound)
    rounded = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING).create_decimal(repr(float(bound)))
    return f"{float(rounded):.{digits}g}"


def many(number: int, what: str) -> str:
    """ "1 record is", "1,200 records are"."""
    return f"{count(number)} {what}{' is' if number == 1 else 's are'}"


def size(number: float) -> str:
    """Bytes in the largest unit of which there is one."""
    units = iter(("B", "KB", "MB", "GB"))
    unit = next(units)
    while number >= 1000 and unit != "GB":
        number, unit = number / 1000, next(units)
    return f"{number:.0f} {unit}" if number >= 100 or unit == "B" else f"{number:.1f} {unit}"


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
