"""Slices of joined tensors that hold parameters alone (a class token taken out of a sequence again).

cat([class_token.expand(B * frames, 1, D), x], 1) + positions, and then joined[:B, :1]: what is taken holds no data,
and its rows may go to other samples than the rows that they lay beside. It is made once more of the parameters, to
the same values, so that its gradient is that of the sample which uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch_axis import tensor_notes
from ..batch_axis.calls import Call, bind
from ..batch_axis.operator_table import CONCATENATIONS

_ITEM = torch.Tensor.__getitem__
_ADDS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
FOLLOWED = frozenset((_ITEM, torch.Tensor.__setitem__, F.dropout))  # by `Pass.dispatch`
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Part(NamedTuple):
    """Rows [start, stop) along `dim` of a tensor: the first of `made_of`, and what was added to the whole since.

    made_of: (parameter or tensor derived from parameters, its version then).
    """

    dim: int
    start: int
    stop: int
    made_of: tuple[tuple[Tensor, int], ...]


class Parts(NamedTuple):
    """The parts of a tensor that are made of parameters alone, while it has this version."""

    parts: tuple[Part, ...]
    version: int


def note_parts(call: Call, is_parameter: Callable[[Tensor], bool]) -> None:
    """After a captured call: note which parts of its result are made of parameters alone."""
    func, out, (args, kwargs) = call.func, call.out, call.given
    if not isinstance(out, Tensor):
        return
    if func in CONCATENATIONS:
        _note(out, _joined(out, args, kwargs, is_parameter))
    elif func in _ADDS and len(args) == 2 and not kwargs:
        for tensor, other in (args, args[::-1]):
            known = _parts_of(tensor)
            if known and isinstance(other, Tensor) and is_parameter(other) and tensor.shape == out.shape:
                _note(out, tuple(p._replace(made_of=(*p.made_of, (other, other._version))) for p in known))


def _joined(out: Tensor, args: Any, kwargs: Any, is_parameter: Callable[[Tensor], bool]) -> tuple[Part, ...]:
    tensors, dim = bind(args, kwargs, "tensors", "dim")
    dim = (dim or 0) % out.dim()
    found, start = [], 0
    for tensor in tensors:
        stop = start + tensor.size(dim) if tensor.dim() == out.dim() else start
        if is_parameter(tensor) and tensor.dtype == out.dtype and stop > start:
            found.append(Part(dim, start, stop, ((tensor, tensor._version),)))
        start = stop
    return tuple(found)


def _note(tensor: Tensor, parts: tuple[Part, ...]) -> None:
    if parts:
        tensor.__dict__[tensor_notes.PARTS] = Parts(parts, tensor._version)


def _parts_of(tensor: Any) -> tuple[Part, ...]:
    known = tensor.__dict__.get(tensor_notes.PARTS) if isinstance(tensor, Tensor) else None
    return known.parts if known is not None and known.version == tensor._version else ()


def follow(forward_pass: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of `FOLLOWED`: what an index takes of one part is made of the parameters again."""
    if func is _ITEM and (taken := _taken_from_parts(forward_pass.dispatch, args)) is not None:
        forward_pass.taken.add(taken)
        return taken
    out = forward_pass.make(func, args, kwargs)
    if func is torch.Tensor.__setitem__:
        forward_pass.taken.renew(args[2])  # whole[index] = value
    elif func is F.dropout:
        _keep_parts(out, args, kwargs)
    return out


def _taken_from_parts(run: Run, args: tuple[Any, ...]) -> Tensor | None:
    """tensor[index] where all that is taken lies in one part. run: makes the calls seen."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    for part in _parts_of(args[0]):
        own = _within(part, index, args[0])
        if own is not None and all(tensor._version == version for tensor, version in part.made_of):
            return _taken(run, part, own)
    return None


def _keep_parts(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of F.dropout that does nothing, the result has the parts of its input."""
    _, p, training, inplace = bind(args, kwargs, "input", "p", "training", "inplace")
    if args and (training is False or p == 0.0) and not inplace:
        _note(out, _parts_of(args[0]))


def _within(part: Part, index: tuple[Any, ...], whole: Tensor) -> tuple[Any, ...] | None:
    """The index into the part, where everything that it takes lies there."""
    if len(index) <= part.dim or not all(type(item) is int or isinstance(item, slice) for item in index):
        return None
    item = index[part.dim]
    if isinstance(item, slice):
        start, stop, step = item.indices(whole.size(part.dim))
        if not part.start <= start < stop <= part.stop:
            return None
        own: Any = slice(start - part.start, stop - part.start, step)
    else:
        place = item % whole.size(part.dim)
        if not part.start <= place < part.stop:
            return None
        own = place - part.start
    return (*index[: part.dim], own, *index[part.dim + 1 :])


def _taken(run: Run, part: Part, index: tuple[Any, ...]) -> Tensor:
    value = part.made_of[0][0]
    for other, _ in part.made_of[1:]:
        dim = part.dim - value.dim() + other.dim()
        if dim >= 0 and other.size(dim) != 1:
            other = run(torch.Tensor.narrow, (other, dim, part.start, part.stop - part.start), {})
        value = run(torch.add, (value, other), {})
    taken = run(torch.Tensor.clone, (run(_ITEM, (value, index), {}),), {})  # no view of a parameter
    assert isinstance(taken, Tensor)
    return taken
