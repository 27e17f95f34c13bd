"""Integer device tensors whose values are known without reading them, as they follow from sizes.

A mask is often looked up by ranges (`mask[torch.arange(B)[:, None], torch.arange(T)]`), and rows that were sorted by
their expert are put back by the inverse of that order. Whose rows come out follows from how these indices were made:
from ranges, whose numbers the host can make for itself, and from an order that was gone there and back. The layout
rules would otherwise wait for the device at every step. On the CPU they look at the numbers themselves.

What is noted holds for the batch in which it was noted, until the tensor is written to, or its memory given away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import operator_table
from .generations import nothing, now
from .tensor_notes import KNOWN, storage_of


class Order:
    """An order of all rows that a sort on a device made: its numbers are not known, only what undoes it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class Known:
    """A tensor's numbers: those of `numbers()`, on the CPU, or, under an order p, numbers()[p].

    undoes: the tensor is the inverse of this order, with no numbers.
    """

    __slots__ = ("_make", "_made", "order", "undoes", "_version", "_moment")

    def __init__(self, make: Callable[[], Tensor] | None, order: Order | None, undoes: Order | None = None) -> None:
        self._make, self.order, self.undoes = make, order, undoes
        self._made: Tensor | None = None
        self._version, self._moment = 0, now().number

    def numbers(self) -> Tensor:
        """The numbers, int64 on the CPU; before the order, if there is one."""
        if self._made is None:
            assert self._make is not None
            self._made = self._make()
        return self._made

    def of(self, tensor: Tensor) -> None:
        """Note this on a tensor that is no view."""
        if tensor._base is None and not tensor.is_inference():
            self._version = tensor._version
            tensor.__dict__[KNOWN] = self

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is what it was when this was noted, and was not to be written to out of sight."""
        if self._version != tensor._version or self._moment != now().number:
            return False
        return not is_given_away(tensor)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return nothing()


def is_asked(tensor: Tensor) -> bool:
    """Whether asking for the numbers of a tensor would make the host wait."""
    return tensor.device.type != "cpu"


def known(tensor: Any) -> Known | None:
    """What is known of a tensor's numbers; None of tensors on the CPU, which are asked."""
    if not isinstance(tensor, Tensor) or not is_asked(tensor):
        return None
    base = tensor._base
    found = (tensor if base is None else base).__dict__.get(KNOWN)
    if not isinstance(found, Known) or not found.holds(tensor if base is None else base):
        return None
    if base is None or found.order or found.undoes:
        return found if base is None else None
    whole = found
    offset = tensor.storage_offset() - base.storage_offset()
    if tensor.dtype != base.dtype or not base.is_contiguous() or offset < 0:
        return None
    shape, stride = tensor.shape, tensor.stride()
    return Known(lambda: whole.numbers().contiguous().as_strided(shape, stride, offset), None)


def is_given_away(tensor: Tensor) -> bool:
    """Whether a device tensor's memory was to be written to out of sight."""
    return getattr(storage_of(tensor), KNOWN, None) is not None


def on_host(tensor: Tensor) -> Tensor | None:
    """The numbers of a tensor, if they are known as they stand: on the CPU."""
    if not is_asked(tensor):
        return tensor
    found = known(tensor)
    return None if found is None or found.order or found.undoes else found.numbers()


def both_known(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """The numbers of both tensors, in one order perhaps; None where they are not known."""
    first, second = known(one), known(other)
    if first is None or second is None or first.undoes or second.undoes or first.order is not second.order:
        return None
    return first.numbers(), second.numbers()


def in_some_order(tensor: Tensor) -> Tensor:
    """The numbers of a tensor, in whatever order: on the CPU, if they are known."""
    found = known(tensor)
    return tensor if found is None or found.undoes else found.numbers()


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """torch.equal, without asking a device where the numbers are known."""
    numbers = both_known(one, other)
    return torch.equal(*(numbers or (one, other)))


def made_known(tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """The tensor, whose numbers are those that `make` gives on the CPU."""
    if is_asked(tensor):
        Known(make, None).of(tensor)
    return tensor


def numbered(count: int, device: torch.device) -> Tensor:
    """torch.arange(count) on a device, known."""
    return made_known(torch.arange(count, device=device), functools.partial(torch.arange, count))


def at(source: Tensor, index: Tensor) -> Tensor:
    """source[index], of numbers [n] and an index of any shape, known if it follows from what is known of both."""
    out = source[index]
    if not is_asked(out):
        return out
    numbers, places = known(source), known(index)
    if numbers is None or places is None or numbers.undoes:
        return out
    if places.undoes is not None:
        if numbers.order is places.undoes and index.dim() == 1:  # (s[p])[inverse of p] = s
            Known(numbers.numbers, None).of(out)
        elif numbers.order is None and _is_range(numbers.numbers()):
            Known(None, None, undoes=places.undoes).of(out)
    elif numbers.order is None:
        Known(lambda: numbers.numbers()[places.numbers()], places.order).of(out)
    return out


def note_sorted(order: Tensor, source: Tensor) -> None:
    """Note on the order [n] that sorts a source [n] that it is one: of unknown numbers, or what undoes another."""
    if not is_asked(order):
        return
    before = known(source)
    if before is not None and before.order is not None and _is_range(before.numbers()):
        Known(None, None, undoes=before.order).of(order)
    elif before is None:
        Known(functools.partial(torch.arange, order.numel()), Order(order.numel())).of(order)


def is_order(tensor: Tensor, rows: int) -> bool:
    """Whether a tensor [rows] is known to name every row once."""
    found = known(tensor)
    if found is None or tensor.shape != (rows,):
        return False
    return found.undoes is not None or _is_range(found.numbers().sort().values)


def written_by(index: Tensor, values: Tensor) -> Known | None:
    """What a tensor is after tensor[index] = values, where the index names every row of it once."""
    places, numbers = known(index), known(values)
    if places is None or numbers is None or places.order is None or not _is_range(places.numbers()):
        return None
    if numbers.order is places.order:  # target[p] = s[p]
        return Known(numbers.numbers, None)
    if numbers.order is None and numbers.undoes is None and _is_range(numbers.numbers()):  # target[p] = 0, 1, 2 ...
        return Known(None, None, undoes=places.order)
    return None


def _is_range(numbers: Tensor) -> bool:
    return numbers.dim() == 1 and torch.equal(numbers, torch.arange(len(numbers)))


T = torch.Tensor
_DIVIDING = frozenset((T.__floordiv__, T.floor_divide, torch.floor_divide, T.__mod__, T.remainder, torch.remainder))
_SHIFTING = frozenset((
    T.__add__, T.__radd__, T.add, torch.add, T.__sub__, T.sub, torch.sub, T.__mul__, T.__rmul__, T.mul, torch.mul,
))  # fmt: skip
_COPYING = frozenset((T.repeat, T.tile, torch.tile, T.clone, torch.clone, T.contiguous))
_GIVING_AWAY = frozenset({"data"}) | operator_table.SHARING_MEMORY | operator_table.CHANGING_MEMORY


def note_known(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """After a call: what is known of the numbers of its result."""
    first = args[0] if args else None
    if func is torch.arange:
        asked = isinstance(out, Tensor) and is_asked(out) and out.dtype == torch.int64
        if asked and all(type(value) is int for value in args) and kwargs.keys() <= {"device", "dtype"}:
            Known(functools.partial(torch.arange, *args), None).of(out)
    elif name in _GIVING_AWAY and isinstance(first, Tensor) and is_asked(first):
        if (storage := storage_of(first)) is not None:
            setattr(storage, KNOWN, "given away")  # what is written there raises no version
    elif func in _COPYING:
        copied = known(first)
        if copied is not None and not copied.order and not copied.undoes and out is not first:
            numbers, sizes = copied.numbers, [tuple(each) if isinstance(each, list) else each for each in args[1:]]
            Known(lambda: func(numbers(), *sizes, **kwargs), None).of(out)
    elif func in _SHIFTING or func in _DIVIDING:
        if len(args) != 2 or kwargs or type(args[1]) is not int or (func in _DIVIDING and not args[1]):
            return
        before = known(first)
        if before is not None and not before.undoes:
            Known(lambda: func(before.numbers(), args[1]), before.order).of(out)
