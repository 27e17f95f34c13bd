"""Checks that options are whole numbers."""

from __future__ import annotations

from typing import Any


def check_whole(least: int = 1, error: Any = ValueError, **values: Any) -> None:
    """Raises the error unless each of these options is a whole number of at least so much."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise error(f"{name} must be a whole number of at least {least}, not {value!r}")
