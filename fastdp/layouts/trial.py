"""Ask a function itself: run it once on a larger batch, and once with one sample changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .calls import Call, is_in_place, map_tensors, tensors_in
from .layout import Layout, tag_of

Tags = list[tuple[Tensor, Layout | None]]
UNCHECKED: set[Any] = set()  # functions that draw random numbers, or whose rules have checked them

# --------------------------------------------------------------------------- the check by value

CACHE_SIZE = 20_000  # answers kept; then all are asked again
_INDEPENDENT: set[Any] = set()


def is_independent(call: Call, inputs: list[tuple[Tensor, Layout]], tags: Tags) -> bool:
    """Whether a change of sample 0's rows leaves the other samples' rows of the result alone.

    The trial sees sizes only: a Fourier transform along the batch keeps them. So each kind of call is run once
    more with sample 0 changed; calls whose indices or constants (of the batch's size) may differ, every time.
    """
    floating = [(t, layout) for t, layout in inputs if t.is_floating_point()]
    if call.name in VIEWS or call.func in UNCHECKED or not floating or call.batch < 2:
        return True
    key: Any = None
    others = [t for t in tensors_in((call.args, call.kwargs)) if tag_of(t, call.batch) is None]
    rows = {call.batch, *[layout.rows for _, layout in inputs]}
    varying = any(not rows.isdisjoint(t.shape) for t in others) or any(not t.is_floating_point() for t, _ in inputs)
    if not varying:
        try:
            key = (call.func, call.batch, _key(call.args, call.batch), _key(call.kwargs, call.batch))
            if key in _INDEPENDENT:
                return True
        except TypeError:
            key = None
    if is_in_place(call.name):  # the input is gone: its twin out of place says the same
        return True
    changed = {id(t): _with_first_sample_changed(t, layout) for t, layout in floating}

    def replace(tensor: Tensor) -> Tensor:
        return changed.get(id(tensor), tensor)

    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            again = call.func(*map_tensors(call.args, replace), **map_tensors(call.kwargs, replace))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return True  # cannot be asked
    finally:
        torch.set_rng_state(state)
    for (before, layout), after in zip(tags, tensors_in(again), strict=False):
        if layout is not None and not layout.mixed and not _same_others(layout, before, after):
            return False
    if key is not None:
        if len(_INDEPENDENT) >= CACHE_SIZE:
            _INDEPENDENT.clear()
        _INDEPENDENT.add(key)
    return True


def _with_first_sample_changed(tensor: Tensor, layout: Layout) -> Tensor:
    changed = tensor.detach().clone()
    if layout.mixed or changed.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return changed
    rows = changed.movedim(layout.dim, 0)
    first = layout.owners(tensor.device) == 0
    rows[first] = rows[first] * -1.75 + 0.9
    return changed


def _same_others(layout: Layout, before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return False
    keep = layout.owners(before.device) != 0
    a, b = before.detach().movedim(layout.dim, 0)[keep], after.movedim(layout.dim, 0)[keep]
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    digits = 1e-6 if a.dtype in (torch.float32, torch.float64) else 1e-3
    finite = a[a.isfinite()]  # masked scores are -inf, whose size would let any difference pass
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=10 * digits, atol=digits * largest, equal_nan=True)


# --------------------------------------------------------------------------- the trial

Answer = tuple[list[list[tuple[int, int]]] | None, bool]
_CACHE: dict[Any, Answer] = {}


def cached_trial(call: Call, inputs: list[tuple[Tensor, Layout]]) -> Answer:
    """What grew in each result, and whether constants of the batch's size had to grow along."""
    try:
        key = (call.func, call.batch, _key(call.args, call.batch), _key(call.kwargs, call.batch))
        if key in _CACHE:
            return _CACHE[key]
    except TypeError:  # an argument without a hash
        key = None
    answer: Answer = (None, False)
    for grow in (_constants_as_they_are, _constants_aligned, _constants_first):
        answer = (_trial(call, inputs, grow), grow is not _constants_as_they_are)
        if answer[0] is not None:
            break
    if key is not None:
        if len(_CACHE) >= CACHE_SIZE:
            _CACHE.clear()
        _CACHE[key] = answer
    return answer


def _key(value: Any, batch: int) -> Any:
    if isinstance(value, Tensor):
        layout = tag_of(value, batch)
        where = layout and (layout.dim, layout.outer, layout.inner, layout.owner is None, bool(layout.mixed))
        return (tuple(value.shape), value.dtype, where)
    if isinstance(value, tuple | list):
        return (type(value), *(_key(item, batch) for item in value))
    if isinstance(value, dict):
        return tuple((name, _key(item, batch)) for name, item in value.items())
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    hash(value)
    return (type(value), value)


VIEWS = frozenset(
    "permute transpose t T mT movedim moveaxis swapaxes swapdims squeeze unsqueeze unbind narrow select chunk split "
    "tensor_split diagonal __iter__".split()
)
Grow = Callable[[Tensor, int, list[tuple[Tensor, Layout]]], list[int]]


def _constants_as_they_are(tensor: Tensor, batch: int, inputs: list[tuple[Tensor, Layout]]) -> list[int]:
    return list(tensor.shape)


def _constants_aligned(tensor: Tensor, batch: int, inputs: list[tuple[Tensor, Layout]]) -> list[int]:
    """A constant made for this batch (a mask), lying as the data lies."""
    shape = list(tensor.shape)
    for source, layout in inputs:
        dim = layout.dim - source.dim() + tensor.dim()
        if not layout.mixed and 0 <= dim < tensor.dim() and tensor.size(dim) == layout.rows:
            shape[dim] = _grown_rows(layout)
            break
    return shape


def _constants_first(tensor: Tensor, batch: int, inputs: list[tuple[Tensor, Layout]]) -> list[int]:
    """A constant made for this batch, samples first."""
    shape = list(tensor.shape)
    if shape and shape[0] == batch:
        shape[0] += 1
    return shape


def _grown_rows(layout: Layout) -> int:
    return layout.rows + (1 if layout.owner is not None else layout.outer * layout.inner)


def _trial(call: Call, inputs: list[tuple[Tensor, Layout]], grow: Grow) -> list[list[tuple[int, int]]] | None:
    def to_meta(tensor: Tensor) -> Tensor:
        layout = tag_of(tensor, call.batch)
        if layout is None:
            shape = grow(tensor, call.batch, inputs)
        else:
            shape = list(tensor.shape)
            if not (layout.mixed and (layout.dim >= len(shape) or shape[layout.dim] != layout.rows)):
                shape[layout.dim] = _grown_rows(layout)
        if call.name in VIEWS:  # costs nothing, where the first use of meta tensors imports half of torch
            return torch.empty((), dtype=tensor.dtype).expand(shape)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    try:
        with torch.no_grad():
            result = call.func(*map_tensors(call.args, to_meta), **map_tensors(call.kwargs, to_meta))
    except Exception:  # noqa: BLE001  (any failure means only that the question has no answer)
        return None
    answer = []
    for tensor, larger in zip(tensors_in(call.out), tensors_in(result), strict=False):
        if tensor.dim() != larger.dim():
            return None
        pairs = enumerate(zip(tensor.shape, larger.shape, strict=True))
        answer.append([(dim, new - old) for dim, (old, new) in pairs if new != old])
    return answer
