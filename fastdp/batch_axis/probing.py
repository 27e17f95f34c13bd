"""Probes a function by value: runs it again with some samples changed, or in another order."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..utils.cache import Answers
from ..utils.pytree import map_tensors, tensors_in
from .batch_positions import is_fixed
from .calls import Call, Inputs, Tags
from .layout import Layout
from .operator_table import MOVING_DIMS, REARRANGING, UNCHECKED, VIEWS
from .probe_calls import DRAWS, Draw, are_close, is_close, key_of

_INDEPENDENT = Answers()
_BLIND = Answers()  # kinds of calls that do not mind a sample's place


def coupling(call: Call, inputs: Inputs, tags: Tags) -> str:
    """How the results of a call couple the samples of a batch, in words; '' if they do not."""
    if not is_independent(call, inputs, tags):
        return "lets one sample's rows depend on another's"
    if not is_blind_to_place(call, inputs, tags):
        return "treats the samples by their place in the batch, which changes if another is removed"
    return ""


def is_independent(call: Call, inputs: Inputs, tags: Tags) -> bool:
    """Whether a change of some samples' rows leaves the other samples' rows of the result alone.

    The trial sees sizes only: a Fourier transform along the batch keeps them. So each kind of call is run again with
    some samples changed, so that every pair of samples is told apart (`_changes`); calls whose indices or constants
    (of the batch's size) may differ, every time.
    """
    data = [(_as_it_was(call, t), layout) for t, layout in inputs if not layout.mixed]
    if call.name in VIEWS or call.func in UNCHECKED or not data or call.batch < 2:
        return True
    kind, kept = _kind(call), False
    moving = call.func in REARRANGING
    rows = {call.batch, *[layout.rows for _, layout in inputs]}
    varying = any(not rows.isdisjoint(t.shape) for t in call.constants())
    if (moving or not varying) and all((moving or t.is_floating_point()) and lay.owner is None for t, lay in data):
        kept = kind is not None
        if kept and kind in _INDEPENDENT:
            return True
    if call.in_place and call.before is None:
        return False
    asked = False
    for draw in DRAWS[:1] if kind in _SCALED else DRAWS:
        drawn = _drawn(call, data, draw)
        if drawn is not None:
            asked = True
            if not _apart(call, data, tags, *drawn):
                return False
            del drawn  # before the next ones are made: they may be large
    if not asked and not _apart(call, data, tags, [t for t, _ in data], [t for t, _ in tags]):
        return False
    if kind is not None:
        _SCALED[kind] = True
    if kept:
        _INDEPENDENT[kind] = True
    return True


_SCALED = Answers()  # kinds of calls that were asked with numbers of every size


def _kind(call: Call) -> Any:
    """A call but for the values of its tensors; None where there is no telling."""
    try:
        kind = (call.func, call.batch, key_of(call))
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
                del new
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
    moving = call.func in REARRANGING
    if not moving and not any(t.is_floating_point() or t.is_complex() for t, _ in data):
        return None
    values = []
    for number, (tensor, layout) in enumerate(data):
        value = tensor.detach()
        if value.is_floating_point() or value.is_complex():
            random = torch.Generator().manual_seed(number)  # the CPU's: some devices have none
            normal = torch.empty(value.shape, dtype=value.dtype).normal_(generator=random)
            value = draw(normal, layout).to(value.device)
        elif moving:  # told apart, whatever they are now
            value = torch.arange(value.numel(), device=value.device).view(value.shape).remainder(97).to(value.dtype)
        values.append(value)
    found = _run_again(call, data, values)
    if found is None or any(t.is_floating_point() and not bool(t.isfinite().all()) for t in found):
        return None
    return values, found


def _run_again(call: Call, data: Inputs, values: list[Tensor], drawn_anew: bool = False) -> list[Tensor] | None:
    """The results with other values for the data; None where the function does not take them.

    drawn_anew: with other random numbers than in a run without, if it draws any (on the CPU; a device goes on).
    """
    state = torch.get_rng_state()
    try:
        return _results(call, {id(t): value for (t, _), value in zip(data, values, strict=True)}, drawn_anew)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    finally:
        torch.set_rng_state(state)


def _as_it_was(call: Call, tensor: Tensor) -> Tensor:
    return call.before if call.before is not None and tensor is call.args[0] else tensor


def _results(call: Call, replaced: dict[int, Tensor], drawn_anew: bool = False) -> list[Tensor]:
    """The call with tensors replaced (by id), nothing of the caller's written to."""
    args, kwargs = call.args, {name: value for name, value in call.kwargs.items() if name != "out"}
    if call.before is not None:
        replaced = {**replaced, id(args[0]): replaced.get(id(call.before), call.before).clone()}
    _ASKING.append(call)
    try:
        with torch.no_grad():
            if drawn_anew:
                torch.default_generator.manual_seed(len(replaced) + 1)  # `_run_again` sets it back
            return list(tensors_in(call.func(*map_tensors(args, lambda t: replaced.get(id(t), t)),
                                             **map_tensors(kwargs, lambda t: replaced.get(id(t), t)))))  # fmt: skip
    finally:
        _ASKING.pop()


_ASKING: list[Call] = []


def asking() -> bool:
    """Whether a function runs now only to be asked: what it draws is drawn again."""
    return bool(_ASKING)


def _other_numbers(rows: Tensor, layout: Layout) -> Tensor:
    if rows.dtype == torch.bool:
        return ~rows
    if rows.is_floating_point() or rows.is_complex():
        return (rows * -1.75).add_(0.9)
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
    if change is _other_numbers and (rows.is_floating_point() or rows.is_complex()):
        rows[chosen] = change(rows[chosen], layout)  # each number by itself
    else:
        rows[chosen] = change(rows, layout)[chosen]
    return changed


def _same_others(layout: Layout, before: Tensor, after: Tensor, changed: Tensor) -> bool:
    if layout.alone >= 0:
        same = before.shape == after.shape
        return bool(changed[layout.alone]) or (same and is_close(before.detach().unsqueeze(0), after.unsqueeze(0)))
    if before.shape != after.shape or before.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return False
    keep = ~changed.to(before.device)[layout.owners(before.device)]
    return are_close(before.detach().movedim(layout.dim, 0), after.movedim(layout.dim, 0), keep)


def is_blind_to_order(call: Call, inputs: Inputs, tags: Tags) -> bool:
    """Whether rows whose order depends on the data are treated alike wherever they stand: rows in another order give
    the results in that order."""
    if call.func in UNCHECKED or call.func in MOVING_DIMS:
        return True
    if call.in_place and call.before is None:
        return False
    ordered = [(_as_it_was(call, t), layout) for t, layout in inputs if not layout.mixed and layout.alone < 0]
    values, before = [t for t, _ in ordered], [t for t, _ in tags]
    return all(_moves_along(call, ordered, tags, values, before, move) for move in (_reversed, _next_rows))


def _moves_along(
    call: Call, data: Inputs, tags: Tags, values: list[Tensor], before: Sequence[Tensor], move: Change
) -> bool:
    """Whether these values with their rows in another order give the results `before` in that order."""
    after = _run_again(call, data, [move(t, layout) for t, (_, layout) in zip(values, data, strict=True)])
    return after is not None and all(
        layout is None or layout.mixed or _same_rows(layout, move(was, layout), now)
        for was, (_, layout), now in zip(before, tags, after, strict=False)
    )


def _reversed(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor.detach().flip(layout.dim)


def _next_rows(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor.detach().roll(1, layout.dim)


def draws(call: Call, inputs: Inputs, tags: Tags) -> bool:
    """Whether the results hold random numbers: with others they are others."""
    again = _run_again(call, inputs, [_as_it_was(call, t) for t, _ in inputs], drawn_anew=True)
    known = zip(tags, again or (), strict=False)
    return any(_differs(layout, was, now) for (was, layout), now in known if layout is None or layout.alone < 0)


def any_whole(inputs: Inputs) -> bool:
    """Whether some of the data are whole numbers."""
    return any(not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool) for t, _ in inputs)


def is_blind_to_place(call: Call, inputs: Inputs, tags: Tags) -> bool:
    """Whether it does not matter where in the batch a sample stands: samples in another order give the results in that
    order. The triangle of a matrix [samples, features] keeps more of the later samples, each of its own numbers.

    Constants of the batch's size whose numbers may be the samples' own, rows in an order of their own and samples of a
    loop are judged where they are met; whole numbers may be places themselves (`take`).
    """
    data = [(_as_it_was(call, t), layout) for t, layout in inputs if not layout.mixed]
    if any_whole(inputs):
        return True
    layouts = [layout for _, layout in (*data, *tags) if layout is not None and not layout.mixed]
    if call.name in VIEWS or call.func in UNCHECKED or not data or call.batch < 2:
        return True
    if call.in_place and call.before is None:
        return False
    if any(layout.owner is not None or layout.alone >= 0 or layout.is_row_index for layout in layouts):
        return True
    rows = {call.batch, *[layout.rows for layout in layouts]}
    beside = [constant for constant in call.constants() if not rows.isdisjoint(constant.shape)]
    if not all(is_fixed(constant) for constant in beside):
        return True
    kind = None if beside else _kind(call)
    if kind is not None and kind in _BLIND:
        return True
    values, before = _drawn(call, data, DRAWS[0]) or ([t for t, _ in data], [t for t, _ in tags])
    again = _run_again(call, data, values, drawn_anew=True)
    if again is None:
        return False
    known = list(zip(before, tags, again, strict=False))
    drawn = [i for i, (was, (_, layout), now) in enumerate(known) if _differs(layout, was, now)]
    del again, known  # these may be large: one after the other
    blind = _moves_along(call, data, tags, values, before[: min(drawn, default=len(before))], _next_samples)
    if blind and kind is not None:
        _BLIND[kind] = True
    return blind


def _differs(layout: Layout | None, before: Tensor, after: Tensor) -> bool:
    return layout is not None and not layout.mixed and not _same_rows(layout, before, after)


def _same_rows(layout: Layout, before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return False
    return is_close(before.detach().movedim(layout.dim, 0), after.movedim(layout.dim, 0))


def _next_samples(tensor: Tensor, layout: Layout) -> Tensor:
    """The rows of the sample before in each sample's place."""
    if tensor.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return tensor
    by_sample = tensor.detach().unflatten(layout.dim, (layout.outer, layout.batch, layout.inner))
    return by_sample.roll(1, layout.dim + 1).flatten(layout.dim, layout.dim + 2)


def keep_target(call: Call) -> None:
    """Before a call in place: copy what it overwrites, if that may be asked again, or may have numbers by place."""
    target = call.args[0] if call.in_place and call.args else None
    if not isinstance(target, Tensor) or call.name == "__setitem__":
        return
    if call.func not in UNCHECKED or (is_fixed(target) and call.is_constant(target)):
        with torch.no_grad():
            call.before = target.detach().clone()
