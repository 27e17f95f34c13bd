"""Kinds of index: constant, made by each sample for itself, or dependent on other samples.

A sample may pick among its own rows (the tokens that it sends to an expert); a choice that depends on other
samples mixes them. Whole numbers made of places are told by value where rows are numbered within their own group (the
patches of Qwen3-VL's images).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operator_table, tensor_notes
from .batch_positions import counts, is_counted, is_random, note_counting
from .calls import Call, Tags, bounds_of
from .host_values import at, both_known, is_order, made_known, on_host
from .layout import Layout, spread
from .own_places import alike, same_of_each
from .tensor_notes import version_of


class Entry(NamedTuple):
    """One tensor of an index: the layout written on it, whose sample each element is, and the order it gives.

    own: sample of each element (-1: of all), or None for a constant; order: see `Layout.order`; fixed: whether it is a
    constant that was made in sight, of no other numbers; mask: whether these are the coordinates at which a mask holds.
    """

    tensor: Tensor
    layout: Layout | None
    own: Tensor | None
    order: Tensor | None
    fixed: bool
    mask: bool = False


def index_tuple(call: Call, index: Any, device: torch.device) -> tuple[Any, ...]:
    """An index of the call as a tuple, its lists as tensors."""
    items = index if isinstance(index, tuple) else (index,)
    items = tuple(_as_tensor(call, item, device) if _is_listed(item) else item for item in items)
    _know_drawn_masks(call, items)
    return items


def _know_drawn_masks(call: Call, items: tuple[Any, ...]) -> None:
    """Masks that were drawn at random, with a row for each of the samples': what is drawn for a sample is its own."""
    layout, value = call.layout(call.args[0]), call.layout(call.args[2] if len(call.args) > 2 else None)
    if layout is None:
        layout = value and Layout(call.batch, mixed=value.mixed)  # data is written to a constant
    if layout is None or layout.mixed or layout.alone >= 0:
        return
    dim = 0
    for item in items:
        if item is Ellipsis:
            return
        masks = isinstance(item, Tensor) and item.dtype == torch.bool
        place = layout.dim - dim
        if masks and 0 <= place < item.dim() and item.size(place) == layout.rows:
            if call.is_constant(item) and is_random(item):
                call.knows(item, layout._replace(dim=place, piece=None, is_row_index=False))
        dim += item.dim() if masks else item is not None


CUT_BY_DATA = "cuts all samples where the data of some says"


def cut_by_samples(call: Call, index: tuple[Any, ...]) -> bool:
    """Whether a slice ends where some samples' numbers say (a number over the whole batch may, as a size may)."""
    known = [call.layout(bound) for bound in bounds_of(index)]
    return any(layout is not None and not layout.mixed for layout in known)


def cut_by_one(call: Call, index: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
    """The one sample whose numbers say where slices end, or -1, and the index with these numbers."""
    known = [layout for bound in bounds_of(index) if (layout := call.layout(bound)) is not None]
    owners = {layout.alone for layout in known}

    def number(bound: Any) -> Any:
        return int(bound) if isinstance(bound, Tensor) else bound

    found = tuple(
        slice(number(item.start), number(item.stop), number(item.step)) if isinstance(item, slice) else item
        for item in index
    )
    return owners.pop() if len(owners) == 1 else -1, found


def _is_listed(item: Any) -> bool:
    """Whether an index is of several numbers that are not in a tensor: of Python, or an array of numpy."""
    return isinstance(item, list | tuple | range) or (not isinstance(item, Tensor) and getattr(item, "ndim", 0) > 0)


def _as_tensor(call: Call, numbers: Any, device: torch.device) -> Tensor:
    """A list or an array as an index; numbers that are tensors of one sample each keep their samples."""
    if hasattr(numbers, "__array__"):
        whole = torch.tensor(numbers, device=device)
    else:
        whole = torch.tensor(list(numbers), dtype=None if numbers else torch.long, device=device)
    if counts(numbers):
        note_counting(whole)
    layouts = [] if hasattr(numbers, "__array__") else [call.layout(item) for item in numbers]
    known = [layout for layout in layouts if layout is not None]
    if known:
        owner = torch.tensor([-1 if layout is None else layout.alone for layout in layouts], device=device)
        strange = len(known) < len(layouts) or whole.dim() != 1 or any(layout.alone < 0 for layout in known)
        why = next((layout.mixed for layout in known if layout.mixed), "an index made of several samples")
        call.knows(whole, Layout(call.batch, mixed=why) if strange else Layout(call.batch, owner=owner))
    return whole


def expanded(call: Call, index: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[int, Entry]]:
    """The index with masks as positions, and its tensors by their place in it."""
    items: list[Any] = []
    entries: dict[int, Entry] = {}
    for item in index:
        if not isinstance(item, Tensor):
            items.append(item)
            continue
        layout, fixed = call.layout(item), call.is_constant(item) and is_counted(item)
        if item.dtype == torch.bool and item.dim():
            coordinates, own, order = found_in(item, layout)
            for coordinate in coordinates:
                entries[len(items)] = Entry(coordinate, layout, own, order, fixed, mask=True)
                items.append(coordinate)
            continue
        own = None
        if layout is not None and layout.alone >= 0:
            own = torch.full_like(item, layout.alone)
        elif layout is not None and not layout.mixed and item.dim():
            own = spread(layout.owners(item.device), layout.dim, item.shape)
        order = layout.order if layout is not None else None
        entries[len(items)] = Entry(item, layout, own, order, fixed)
        items.append(item)
    return tuple(items), entries


def source_dims(index: tuple[Any, ...], ndim: int) -> dict[int, Any]:
    """Which source dimension each entry of an index speaks of."""
    width = sum(item is not None and item is not Ellipsis for item in index)
    used: dict[int, Any] = {}
    dim = 0
    for item in index:
        if item is Ellipsis:
            dim += ndim - width
        elif item is not None:
            used[dim] = item
            dim += 1
    return used


def position_of(entries: dict[int, Entry], items: tuple[Any, ...]) -> int:
    """Where the dimensions of an index of tensors begin in the result."""
    places = sorted(entries)
    apart = places[-1] - places[0] >= len(places)
    return 0 if apart else sum(item is not Ellipsis and not isinstance(item, int) for item in items[: places[0]])


OWN_PLACES = (
    "takes of each sample other numbers, by its place in the batch. If one sample is removed, the others move to other "
    "places: take the same of every sample, or let its own data choose"
)


def may_choose(along: Any, entries: dict[int, Entry], layout: Layout) -> bool:
    """Whether constants that were made in sight may take of each sample other numbers of its own. along: of the index,
    what names the rows of `layout`, or None."""
    entry = next((entry for entry in entries.values() if entry.tensor is along), None)
    if entry is not None and any(other.fixed for other in entries.values() if other is not entry):
        return True
    several = layout.owner is not None or layout.rows > layout.batch
    return several and (entry.fixed if entry is not None else along is not None and along != slice(None))


def by_own_place(
    along: Any, items: tuple[Any, ...], entries: dict[int, Entry], layout: Layout, rows: Tensor, found: Layout
) -> bool:
    """Whether they do. rows [*]: the rows that the index names; found: how they lie now."""
    if found.mixed or found.alone >= 0 or found.order is not None or not may_choose(along, entries, layout):
        return False
    entry = next((entry for entry in entries.values() if entry.tensor is along), None)
    if entry is not None:
        place = position_of(entries, items)
        shape = torch.broadcast_shapes(*[one.tensor.shape for one in entries.values()])
        for other in entries.values() if place <= found.dim < place + len(shape) else ():
            if other is not entry and other.fixed:
                numbers = on_host(other.tensor)
                if not alike((other.tensor if numbers is None else numbers).expand(shape), found.dim - place, found):
                    return True
    cut_off = isinstance(along, slice) and along.step in (None, 1) and found.piece not in (None, layout.piece)
    if entry is None and cut_off:
        return False  # a part, which may be put together with the others
    return (entry is None or entry.fixed) and not same_of_each(rows, None, layout, found)


def found_in(
    mask: Tensor, layout: Layout | None, coordinates: tuple[Tensor, ...] | None = None
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """Coordinates of the elements that are not zero (these, if they are found), the sample of each, and the groups in
    which they come."""
    if coordinates is None:
        coordinates = torch.nonzero(mask, as_tuple=True)
    if layout is None or layout.mixed:
        return coordinates, None, None
    if layout.alone >= 0:
        return coordinates, torch.full_like(coordinates[0], layout.alone), torch.zeros_like(coordinates[0])
    rows = coordinates[layout.dim]
    group = torch.zeros_like(rows)
    for dim in range(layout.dim):  # what comes before the samples sorts first
        group = group * mask.size(dim) + coordinates[dim]
    return coordinates, layout.owners(mask.device)[rows], group


def problem_of(entries: dict[int, Entry], along: Any, layout: Layout) -> str:
    """Why an index mixes samples, or ''. along: what stands in it for the samples' dimension, rows laid as `layout`."""
    known = [entry for entry in entries.values() if entry.layout is not None]
    if known and isinstance(along, Tensor | int):
        places = along if isinstance(along, Tensor) else torch.tensor(along, device=known[0].tensor.device)
        chosen = at(layout.owners(places.device), places)
        for entry in known:
            if entry.layout.mixed:  # type: ignore[union-attr]
                whole = entry.tensor is along and _covers_evenly(along, layout.rows)
                if not (whole and entry.layout.is_row_index):  # type: ignore[union-attr]
                    return "picks rows by what other samples hold"
            elif entry.own is not None and not _same(entry.own, chosen):
                return "picks rows of one sample by another's data"
        return ""
    if not all(entry.layout.mixed and entry.layout.is_row_index for entry in known):  # type: ignore[union-attr]
        return "indexes all samples by one sample's data"
    if any(entry.tensor.numel() > 1 and not entry.mask for entry in known):
        return "picks of each sample what occurs in the batch"
    return ""


def order_of(entries: dict[int, Entry], rows: int) -> Tensor | None:
    """The order that the data among an index gives to the rows picked."""
    for entry in entries.values():
        if entry.order is not None and entry.order.numel() == rows:
            return entry.order
    if any(entry.layout is not None and entry.layout.mixed for entry in entries.values()):
        device = next(entry.tensor.device for entry in entries.values())
        return torch.zeros(rows, dtype=torch.long, device=device)
    return None


def looked_at(
    layout: Layout, items: tuple[Any, ...], device: torch.device
) -> tuple[Layout, tuple[Any, ...], torch.device]:
    """A layout and an index of its rows where they can be looked at without waiting for a device: on the CPU, if all
    their numbers are known there; as they are, of any other."""
    owner = None if layout.owner is None else on_host(layout.owner)
    found = tuple(on_host(item) if isinstance(item, Tensor) else item for item in items)
    known = layout.order is None and (owner is None) is (layout.owner is None)
    if known and not any(given is not None and item is None for given, item in zip(items, found, strict=True)):
        return layout._replace(owner=owner), found, torch.device("cpu")
    return layout, items, device


def brought_back(layout: Layout, device: torch.device) -> Layout:
    """A layout that was found on the CPU, with its owners on the device of its rows."""
    if layout.owner is None or layout.owner.device == device:
        return layout
    owner = layout.owner
    return layout._replace(owner=made_known(owner.to(device), lambda: owner))


def permutes(index: Tensor, rows: int) -> bool:
    """Whether the index names every row once."""
    return index.dim() == 1 and index.numel() == rows and _covers_evenly(index, rows)


def _covers_evenly(index: Tensor, rows: int) -> bool:
    """Whether every row is named equally often: an order, not a choice."""
    if is_order(index, rows):
        return True
    if index.dtype not in (torch.int64, torch.int32) or not index.numel() or index.numel() % max(rows, 1):
        return False
    flat = index.flatten().long()
    counts = torch.bincount(torch.where(flat < 0, flat + rows, flat), minlength=rows)
    return bool((counts == index.numel() // rows).all())


def _same(own: Tensor, chosen: Tensor) -> bool:
    numbers = both_known(own, chosen) if own.shape == chosen.shape else None
    own, chosen = numbers or (own, chosen)
    try:
        own, chosen = torch.broadcast_tensors(own, chosen.to(own.device))  # an index may lie on the CPU
    except RuntimeError:
        return False
    return bool((own == chosen).all())


def repeated(layout: Layout, times: Tensor, rows: Tensor) -> Layout:
    """The layout of rows that were repeated as often as each sample's own data says, to the rows of these numbers.

    Where all say the same, rows lie as in any batch of so many rows a sample; else their places depend on the samples
    before, and constants must not meet them by place.
    """
    even = times.numel() > 0 and bool((times == times.flatten()[0]).all())
    return layout.taken(layout.dim, rows, layout.order if even and layout.order is None else torch.zeros_like(rows))


def note_groups(call: Call, times: Tensor, by: Layout) -> None:
    """Note on numbers of several samples, repeated as often as each sample says, which group every row is of."""
    if times.dim() != 1 or not isinstance(call.out, Tensor) or call.out.dim() != 1 or call.out.is_floating_point():
        return
    groups = torch.arange(by.rows, device=times.device).repeat_interleave(times)
    if len(groups) == len(call.out):
        call.out.__dict__[tensor_notes.GROUPS] = (groups, repeated(by, times, groups), version_of(call.out))


def counted(call: Call) -> Tags | None:
    """Of constants less repeated starts that number the rows of each group; None of any other call."""
    if call.name not in operator_table.SUBTRACTING or len(call.args) != 2 or call.kwargs:
        return None
    numbers, starts = call.args
    note = starts.__dict__.get(tensor_notes.GROUPS) if isinstance(starts, Tensor) else None
    if note is None or note[2] != version_of(starts) or not isinstance(numbers, Tensor):
        return None
    groups, layout, _ = note
    by = call.layout(starts)
    if by is None or not by.mixed or call.layout(numbers) is not None or call.out.shape != groups.shape:
        return None
    rows = torch.arange(len(groups), device=groups.device)
    first = torch.searchsorted(groups, groups)  # groups come in order
    return [(call.out, layout)] if torch.equal(call.out, (rows - first).to(call.out.dtype)) else None
