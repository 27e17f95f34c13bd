"""Ask a function itself: run it once on a larger batch, and again with some samples changed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .answers import Answers
from .calls import Call, Inputs, Tags
from .draws import DRAWS, Draw, is_close
from .kinds import UNCHECKED, VIEWS
from .layout import Layout
from .nests import map_tensors, signature, tensors_in
from .positions import is_fixed

# --------------------------------------------------------------------------- the check by value

_INDEPENDENT = Answers()


def is_independent(call: Call, inputs: Inputs, tags: Tags) -> bool:
    """Whether a change of some samples' rows leaves the other samples' rows of the result alone.

    The trial sees sizes only: a Fourier transform along the batch keeps them. So each kind of call is run again with
    some samples changed, so that every pair of samples is told apart (`_changes`); calls whose indices or constants
    (of the batch's size) may differ, every time.
    """
    data = [(_as_it_was(call, t), layout) for t, layout in inputs if not layout.mixed]
    if call.name in VIEWS or call.func in UNCHECKED or not data or call.batch < 2:
        return True
    key: Any = None
    rows = {call.batch, *[layout.rows for _, layout in inputs]}
    varying = any(not rows.isdisjoint(t.shape) for t in call.constants())
    if not varying and all(t.is_floating_point() and layout.owner is None for t, layout in data):
        try:
            key = (call.func, call.batch, _key(call))
            if key in _INDEPENDENT:
                return True
        except TypeError:
            key = None
    if call.in_place and call.before is None:
        return False
    asked, kind = False, _kind(call)
    for draw in DRAWS[:1] if kind in _SCALED else DRAWS:
        drawn = _drawn(call, data, draw)
        if drawn is not None:
            asked = True
            if not _apart(call, data, tags, *drawn):
                return False
    if not asked and not _apart(call, data, tags, [t for t, _ in data], [t for t, _ in tags]):
        return False
    if kind is not None:
        _SCALED[kind] = True
    if key is not None:
        _INDEPENDENT[key] = True
    return True


_SCALED = Answers()  # kinds of calls that were asked with numbers of every size


def _kind(call: Call) -> Any:
    """A call but for the values of its tensors; None where there is no telling."""
    try:
        kind = (call.func, call.batch, _key(call))
        hash(kind)
    except TypeError:
        return None
    return kind


def _apart(call: Call, data: Inputs, tags: Tags, values: list[Tensor], before: list[Tensor]) -> bool:
    """Whether the results `before` of these values stay as they are for samples that do not change."""
    whole = any(not t.is_floating_point() for t in (*values, *before))  # a change may leave such numbers as they were
    for changed in _changes(call.batch):
        found: list[list[Tensor]] = []
        for change in _WAYS:  # where the first fails, or does not show all
            if not found or whole:
                new = [_with_samples_changed(t, lay, changed, change) for t, (_, lay) in zip(values, data, strict=True)]
                found += [] if (after := _run_again(call, data, new)) is None else [after]
        if not found:
            return False
        for after in found:
            for was, now, (_, layout) in zip(before, after, tags, strict=False):
                if layout is not None and not layout.mixed and not _same_others(layout, was, now, changed):
                    return False
    return True


@functools.lru_cache(maxsize=64)
def _changes(batch: int) -> Tensor:
    """Sets of samples [sets, batch], few: of any two samples there is a set that holds the first and not the second."""
    sets = next(k for k in range(2, 2 * batch + 2) if math.comb(k, k // 2) >= batch)
    codes = list(itertools.islice(itertools.combinations(range(sets), sets // 2), batch))
    return torch.zeros(batch, sets, dtype=torch.bool).scatter_(1, torch.tensor(codes), True).T.contiguous()


def _drawn(call: Call, data: Inputs, draw: Draw) -> tuple[list[Tensor], list[Tensor]] | None:
    """Random numbers in place of the data's, as zeros hide what depends on what, and the results; None where the
    function does not take them."""
    if not any(t.is_floating_point() or t.is_complex() for t, _ in data):
        return None
    values = []
    for number, (tensor, layout) in enumerate(data):
        value = tensor.detach()
        if value.is_floating_point() or value.is_complex():
            random = torch.Generator().manual_seed(number)  # the CPU's: some devices have none
            normal = torch.empty(value.shape, dtype=value.dtype).normal_(generator=random)
            value = draw(normal, layout).to(value.device)
        values.append(value)
    found = _run_again(call, data, values)
    if found is None or any(t.is_floating_point() and not bool(t.isfinite().all()) for t in found):
        return None
    return values, found


def _run_again(call: Call, data: Inputs, values: list[Tensor]) -> list[Tensor] | None:
    """The results with other values for the data; None where the function does not take them."""
    state = torch.get_rng_state()
    try:
        return _results(call, {id(t): value for (t, _), value in zip(data, values, strict=True)})
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    finally:
        torch.set_rng_state(state)


def _as_it_was(call: Call, tensor: Tensor) -> Tensor:
    return call.before if call.before is not None and tensor is call.args[0] else tensor


def _results(call: Call, replaced: dict[int, Tensor]) -> list[Tensor]:
    """The call with tensors replaced (by id), nothing of the caller's written to."""
    args, kwargs = call.args, {name: value for name, value in call.kwargs.items() if name != "out"}
    if call.before is not None:
        replaced = {**replaced, id(args[0]): replaced.get(id(call.before), call.before).clone()}
    with torch.no_grad():
        return list(tensors_in(call.func(*map_tensors(args, lambda t: replaced.get(id(t), t)),
                                         **map_tensors(kwargs, lambda t: replaced.get(id(t), t)))))  # fmt: skip


def _other_numbers(rows: Tensor, layout: Layout) -> Tensor:
    if rows.dtype == torch.bool:
        return ~rows
    if rows.is_floating_point() or rows.is_complex():
        return rows * -1.75 + 0.9
    return (rows.min().long() + rows.max().long() - rows.long()).to(rows.dtype)  # within the range: they may be indices


def _numbers_of_others(rows: Tensor, layout: Layout) -> Tensor:
    if layout.owner is not None or layout.alone >= 0:
        return rows.roll(1, 0)
    return rows.unflatten(0, (layout.outer, layout.batch, layout.inner)).roll(1, 1).flatten(0, 2)


Change = Callable[[Tensor, Layout], Tensor]
_WAYS: tuple[Change, ...] = (_other_numbers, _numbers_of_others)


def _with_samples_changed(tensor: Tensor, layout: Layout, samples: Tensor, change: Change) -> Tensor:
    changed = tensor.detach().clone()
    if not changed.numel():
        return changed
    if layout.alone >= 0:
        return change(changed.unsqueeze(0), layout)[0] if samples[layout.alone] else changed
    if changed.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return changed
    rows = changed.movedim(layout.dim, 0)
    chosen = samples.to(tensor.device)[layout.owners(tensor.device)]
    rows[chosen] = change(rows, layout)[chosen]
    return changed


def _same_others(layout: Layout, before: Tensor, after: Tensor, changed: Tensor) -> bool:
    if layout.alone >= 0:
        same = before.shape == after.shape
        return bool(changed[layout.alone]) or (same and is_close(before.detach().unsqueeze(0), after.unsqueeze(0)))
    if before.shape != after.shape or before.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return False
    keep = ~changed.to(before.device)[layout.owners(before.device)]
    return is_close(before.detach().movedim(layout.dim, 0)[keep], after.movedim(layout.dim, 0)[keep])


def is_blind_to_order(call: Call, inputs: Inputs, tags: Tags) -> bool:
    """Whether rows whose order depends on the data are treated alike wherever they stand: rows in another order give
    the results in that order."""
    if call.func in UNCHECKED:
        return True
    if call.in_place and call.before is None:
        return False
    ordered = [(_as_it_was(call, t), layout) for t, layout in inputs if not layout.mixed and layout.alone < 0]
    number = torch.arange(ordered[0][1].rows, device=ordered[0][0].device)
    for order in (number.flip(0), number.roll(1)):
        state = torch.get_rng_state()
        try:
            after = _results(call, {id(t): t.detach().index_select(layout.dim, order) for t, layout in ordered})
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        finally:
            torch.set_rng_state(state)
        for (before, layout), now in zip(tags, after, strict=False):
            if layout is None or layout.mixed:
                continue
            if before.shape != now.shape or before.shape[layout.dim : layout.dim + 1] != order.shape:
                return False
            moved = before.detach().index_select(layout.dim, order)
            if not is_close(moved.movedim(layout.dim, 0), now.movedim(layout.dim, 0)):
                return False
    return True


def keep_target(call: Call) -> None:
    """Before a call in place: copy what it overwrites, if that may be asked again, or may have numbers by place."""
    target = call.args[0] if call.in_place and call.args else None
    if not isinstance(target, Tensor) or call.name == "__setitem__":
        return
    if call.func not in UNCHECKED or (is_fixed(target) and call.is_constant(target)):
        with torch.no_grad():
            call.before = target.detach().clone()


# --------------------------------------------------------------------------- the trial

Answer = tuple[list[list[tuple[int, int]]] | None, bool]
_CACHE = Answers()


def cached_trial(call: Call, inputs: Inputs) -> Answer:
    """What grew in each result, and whether constants of the batch's size had to grow along."""
    try:
        key = (call.func, call.batch, _key(call))
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
        _CACHE[key] = answer
    return answer


def _key(call: Call) -> Any:
    """Of a call's arguments: shapes, types and layouts of tensors, values of others."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = call.layout(value)
            where = layout and (layout.dim, layout.outer, layout.inner, layout.owner is None, bool(layout.mixed))
            return (tuple(value.shape), value.dtype, where)
        if isinstance(value, slice):
            return (slice, value.start, value.stop, value.step)
        hash(value)
        return (type(value), value)

    return signature((call.args, call.kwargs), leaf)


Grow = Callable[[Tensor, int, Inputs], list[int]]


def _constants_as_they_are(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    return list(tensor.shape)


def _constants_aligned(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    """A constant made for this batch (a mask), lying as the data lies."""
    shape = list(tensor.shape)
    for source, layout in inputs:
        dim = layout.dim - source.dim() + tensor.dim()
        if not layout.mixed and 0 <= dim < tensor.dim() and tensor.size(dim) == layout.rows:
            shape[dim] = _grown_rows(layout)
            break
    return shape


def _constants_first(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    """A constant made for this batch, samples first."""
    shape = list(tensor.shape)
    if shape and shape[0] == batch:
        shape[0] += 1
    return shape


def _grown_rows(layout: Layout) -> int:
    return layout.rows + (1 if layout.owner is not None else layout.outer * layout.inner)


def _trial(call: Call, inputs: Inputs, grow: Grow) -> list[list[tuple[int, int]]] | None:
    def to_meta(tensor: Tensor) -> Tensor:
        layout = call.layout(tensor)
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
    for tensor, larger in zip(call.results(), tensors_in(result), strict=False):
        if tensor.dim() != larger.dim():
            return None
        pairs = enumerate(zip(tensor.shape, larger.shape, strict=True))
        answer.append([(dim, new - old) for dim, (old, new) in pairs if new != old])
    return answer
