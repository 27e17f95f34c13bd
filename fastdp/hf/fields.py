"""What a private trainer does with a field of its arguments: the kinds of treatment, and when a value is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Field(NamedTuple):
    """The treatment of a field.

    status: "supported" (part of training, and works), "no effect" (on training steps and on privacy), or "refused" (for
    values that `accepts` rejects; `example` is one of them). why: a remark, or the reason.
    """

    status: str
    why: str = ""
    accepts: Callable[[Any], bool] = lambda value: True
    example: Any = None


def off(value: Any) -> bool:
    """Whether a value asks for nothing."""
    return value is None or value is False or value in ("", [], {})


def supported(why: str = "") -> Field:
    """A field that works as it does without privacy."""
    return Field("supported", why)


def no_effect(why: str) -> Field:
    """A field that changes neither training nor privacy."""
    return Field("no effect", why)


def refused(why: str, example: Any, accepts: Callable[[Any], bool] = off) -> Field:
    """A field whose other values are refused."""
    return Field("refused", why, accepts, example)
