"""What stands in the lines of code that compute with numbers: constants, names, the dimensions whose sizes they ask."""

from __future__ import annotations

import dis
import functools
import itertools
import math
import re
import sys
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

import numpy
import torch

from ..utils.code_location import users


def is_written(number: float, asking: Iterable[CodeType]) -> bool:
    """Whether the line that computes with a number has it written down."""
    frame = users(sys._getframe(2))
    return frame is not None and literal_in_code(frame, number, asking)


def literal_in_code(frame: Any, number: float, asking: Iterable[CodeType]) -> bool:
    """Whether the line at which a frame is has a number written down, or names a global that is this number, or an
    attribute of a module that neither this code nor the one that asked for sizes assigns."""
    constants, names, globals_, _ = _lines_of(frame.f_code).get(frame.f_lineno, _NOTHING)
    held, known = frame.f_locals, list[Any]()
    if names and (modules := [value for value in held.values() if isinstance(value, torch.nn.Module)]):
        stored = frozenset().union(*[_stored_by(code) for code in {frame.f_code, *asking}])
        known = [module.__dict__.get(name) for module in modules for name in names if name not in stored]
    if globals_ and held is not frame.f_globals:  # else a script, whose names are all global
        values = [frame.f_globals.get(name) for name in globals_]
        known += [number for value in values for number in (value if isinstance(value, list | tuple) else (value,))]
    return any(is_number(value) and abs(value) == abs(number) for value in (*constants, *known))


def has_name(frame: Any, number: float) -> bool:
    """Whether the line at which a frame is has a number written down, or under a name: a variable's, an attribute's."""
    constants, names, globals_, _ = _lines_of(frame.f_code).get(frame.f_lineno, _NOTHING)
    held = [*frame.f_locals.values(), *(frame.f_globals.get(name) for name in globals_)]
    inner = [getattr(value, "__dict__", None) or (value if isinstance(value, dict) else {}) for value in held]
    known = [*constants, *held]
    known += [fields.get(name) for fields in inner for name in (*names, *fields) if isinstance(name, str)]
    return any(is_number(value) and abs(value) == abs(number) for value in known)


def is_named_square(frame: Any, number: float, batch: int) -> bool:
    """Whether a number is the square of a variable at the line at which a frame is, T**2, that is no batch's size."""
    root, (_, _, globals_, _) = math.isqrt(int(abs(number))), _lines_of(frame.f_code).get(frame.f_lineno, _NOTHING)
    known = (*frame.f_locals.values(), *(frame.f_globals.get(name) for name in globals_))
    square = root not in (0, 1, batch) and root * root == abs(number)
    return square and any(is_number(value) and value == root for value in known)


@functools.lru_cache(maxsize=4096)
def shape_dims(code: CodeType, line: int) -> tuple[int, ...]:
    """The dimensions whose sizes a line takes of shapes, `x.shape[1]`; none if it may take all."""
    *_, dims = _lines_of(code).get(line, _NOTHING)
    return () if None in dims else tuple(dim for dim in dims if dim is not None)


_Line = tuple[list[float], list[str], list[str], list[int | None]]
_NOTHING: _Line = ([], [], [], [])


@functools.lru_cache(maxsize=1024)
def _lines_of(code: CodeType) -> dict[int, _Line]:
    """By line: the numbers that it has written down, the attributes and the globals that it names, and the dimensions
    that it takes of shapes (None: all)."""
    found: dict[int, _Line] = {}
    line, steps = code.co_firstlineno, list(dis.get_instructions(code))
    for step, *after in itertools.zip_longest(steps, steps[1:], steps[2:]):
        positions = getattr(step, "positions", None)
        line = (positions.lineno if positions is not None else step.starts_line) or line
        constants, names, globals_, dims = found.setdefault(line, ([], [], [], []))
        if step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST")):
            constants += filter(is_number, step.argval if isinstance(step.argval, tuple) else (step.argval,))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(step.argval)
            dims += [None] * (step.argval == "size")
            if step.argval == "shape":
                index, then = after
                at = index is not None and type(index.argval) is int and index.opname.startswith("LOAD_")
                dims.append(index.argval if at and (then.opname == "BINARY_SUBSCR" or then.argrepr == "[]") else None)
        elif step.opname == "LOAD_GLOBAL":
            globals_.append(step.argval)
    return found


@functools.lru_cache(maxsize=1024)
def _locals_of(code: CodeType) -> tuple[dict[int, set[str]], dict[str, list[tuple[int, int]]]]:
    """The variables that each line reads, and where each variable is assigned: (line, its place where a tuple is
    unpacked, else -1)."""
    read: dict[int, set[str]] = {}
    stored: dict[str, list[tuple[int, int]]] = {}
    line, left, count = code.co_firstlineno, 0, 0
    for step in dis.get_instructions(code):
        positions = getattr(step, "positions", None)
        line = (positions.lineno if positions is not None else step.starts_line) or line
        if step.opname == "UNPACK_SEQUENCE":
            left = count = step.argval
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        for kind, name in zip(_OPERATION.findall(step.opname), names, strict=False):
            if kind == "LOAD":
                read.setdefault(line, set()).add(name)
            else:
                stored.setdefault(name, []).append((line, count - left if left else -1))
                left = max(0, left - 1)
    return read, stored


_OPERATION = re.compile("(LOAD|STORE)_(?:FAST|DEREF|NAME)")


def lines_of_call(frame: Any) -> Sequence[int]:
    """The lines of the call at which a frame is; of Python 3.10 its first."""
    if not hasattr(frame.f_code, "co_positions"):
        return [frame.f_lineno]
    return _lines_at(frame.f_code, frame.f_lasti // 2) or [frame.f_lineno]


@functools.lru_cache(maxsize=1024)
def _lines_at(code: Any, step: int) -> Sequence[int]:
    first, last, *_ = next(itertools.islice(code.co_positions(), step, None))
    return range(first, (last or first) + 1) if first else ()


def assigned(frame: Any, number: int, lines: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where the variables with this value that these lines of a frame's code read were assigned there: (line, place in
    what was unpacked, or -1); none if they read none. None: the code was given one."""
    read, stored = _locals_of(frame.f_code)
    held, names = frame.f_locals, {name for line in lines for name in read.get(line, ())}
    names = {name for name in names if type(held.get(name)) is int and held[name] == number}
    if any(name not in stored for name in names):
        return None
    return [place for name in names for place in stored[name]]


@functools.lru_cache(maxsize=1024)
def _stored_by(code: CodeType) -> frozenset[str]:
    """The attributes that code assigns: counters, averages."""
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | numpy.number) and not isinstance(value, bool)


def is_product(number: int, sizes: Iterable[int]) -> bool:
    """Whether a number is a product of some of these."""
    return number == 1 or any(
        size > 1 and number > 0 and number % size == 0 and is_product(number // size, sizes) for size in sizes
    )


def may_be_of(number: float, batch: int) -> bool:
    """Whether a number may be made of the number of samples and whole numbers (B / N), or of its root or logarithm."""
    if not 1e-30 < abs(number) < 1e30:  # infinite, too
        return False
    size, parts = max(abs(number), 1 / abs(number)), (abs(number) * batch, batch / abs(number))
    other = any(math.isclose(size, one, rel_tol=1e-6) for one in (*map(math.log, (batch, batch + 1)), math.log2(batch)))
    root = math.sqrt(batch)
    return other or any(
        part > 0.5 and math.isclose(part, round(part), rel_tol=1e-6) for part in (*parts, size / root, size * root)
    )


def is_size(number: float, told: float, roots: bool = True) -> bool:
    """Whether a number is one that was told, or its inverse or root."""
    size = abs(number)
    if told in (0, 1):
        return size == told
    if not math.isfinite(number) or size in (0.0, 1.0):
        return False
    near = (told, 1 / told, *((math.sqrt(told), 1 / math.sqrt(told)) if roots and told > 0 else ()))
    return any(math.isclose(size, one, rel_tol=1e-6) for one in near)
