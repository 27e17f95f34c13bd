"""`Layout`: which rows of a tensor belong to which sample, or why this is not known.

A tensor computed from the batch carries a `Layout`: the dimension along which the samples lie, and
how the rows of that dimension map to samples. `propagate` carries layouts through a forward;
here is what a layout means and how to cut a tensor by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from . import generations
from .generations import Generation, is_forgotten, is_past, nothing
from .host_values import at, in_some_order, made_known, numbered, on_host, same_numbers
from .own_places import same_of_each, seen_through
from .tensor_notes import (
    HELD,
    INPUT,
    LAYOUT,
    MOMENT,
    OF_LABELS,
    PRESUMED,
    RELAID,
    TAGGED_AT,
    TOKEN,
    hold,
    left_as_constant,
    storage_of,
)

NOBODY = -1  # owner of memory that no sample was written to


class Layout(NamedTuple):
    """Rows of dimension `dim`: row r belongs to sample (r // inner) % batch, or to `owner[r]`.

    `outer` and `inner` describe flattened rows: [batch * inner] is batch-major (tokens flattened),
    [outer * batch] is time-major. `owner` (int64 [rows]) describes rows in any order (routed tokens).
    `mixed` is not empty where samples have been combined: it says by what.
    `order` is there where the data decided which row comes where: numbers [rows], equal within a group whose
    boundaries other samples cannot move. Rows may be cut off at these boundaries only, and no constant may meet
    the rows one by one.
    `is_row_index` marks whole numbers that say where rows lie, or which choices occur (`mixed` then): they may pick
    rows, and must not become numbers that are computed with.
    `alone`, where it is no -1, says that the whole tensor is of this one sample (a loop over the samples): then `dim`
    means nothing. `size_from_data` says that the data of that sample made one of its sizes.
    `inferred` marks rows of an input that were taken for k rows a sample on sight, and that nothing has confirmed yet;
    2: rows that an index counted over the whole batch picked, which must not pass for constants either.
    `shifted` is there where `mixed` came of one number taken from all rows alike (`batch_axis.totals`).
    `total`, beside `mixed`, says that the numbers are sums over the samples of terms of one sample each, with weights
    that no sample's data changes (`batch_axis.totals`): what a loss may be. "sum", or "mean" where it is divided by the
    number of samples; "either", where a constant equals that number; "both", where one is added to the other.
    `piece` is there for a part of the batch that was cut out by position (`batch_axis.batch_slices`).
    """

    batch: int
    dim: int = 0
    outer: int = 1
    inner: int = 1
    owner: Tensor | None = None
    mixed: str = ""
    order: Tensor | None = None
    is_row_index: bool = False
    alone: int = -1
    size_from_data: bool = False
    inferred: int = 0
    shifted: Any = None
    total: str = ""
    piece: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and all(a is b or _equal(a, b) for a, b in zip(self, other, strict=True))

    def __ne__(self, other: object) -> bool:
        return not self == other

    @property
    def rows(self) -> int:
        """Rows of `dim`."""
        if self.owner is not None:
            return self.owner.numel()
        return self.outer * self.batch * self.inner

    @property
    def plain(self) -> bool:
        """One row a sample, in order, along `dim`."""
        whole = self.owner is None and self.outer == 1 and self.inner == 1 and self.alone < 0
        return whole and not self.mixed and not self.is_row_index

    @property
    def parted(self) -> bool:
        """Whether rows may be of a part of the samples only."""
        return self.owner is not None or self.alone >= 0

    def owners(self, device: torch.device) -> Tensor:
        """Sample of each row, int64 [rows]."""
        if self.owner is not None:
            return self.owner
        ids = torch.arange(self.batch, device=device)
        out = ids.repeat_interleave(self.inner).repeat(self.outer)
        return made_known(out, lambda: self.owners(torch.device("cpu")))

    def rows_of(self, sample: int, device: torch.device) -> Tensor:
        """The rows of a sample, in order: int64 [n]."""
        if self.owner is not None:
            return torch.nonzero(self.owner.to(device) == sample).flatten()
        blocks = torch.arange(self.outer, device=device) * (self.batch * self.inner)
        within = torch.arange(sample * self.inner, (sample + 1) * self.inner, device=device)
        return (blocks[:, None] + within).flatten()

    def taken(self, dim: int, picked: Tensor, order: Tensor | None = None, anew: bool = False) -> Layout:
        """Layout of a tensor whose rows along `dim` are these rows, int64 [n]; `alone`, if all are of one sample.

        order: given by the data that picked them; anew: in place of the order that the rows had, also if None.
        """
        owner = at(self.owners(picked.device), picked)
        if order is None and not anew and self.order is not None:
            order = self.order[picked]
        kept = self._replace(dim=dim, outer=1, inner=1, owner=owner, order=order)
        if order is None and not self.mixed and is_one(owner):
            return self.of_sample(int(in_some_order(owner)[0]))
        regular = regular_rows(owner, self.batch) if order is None else None
        return kept._replace(owner=None, outer=regular[0], inner=regular[1]) if regular else kept

    def of_sample(self, sample: int, sized: bool = False) -> Layout:
        """Layout of a tensor made of this one sample."""
        sized = sized or self.size_from_data
        return Layout(
            self.batch,
            is_row_index=self.is_row_index,
            alone=sample,
            size_from_data=sized,
            inferred=self.inferred,
            piece=self.piece,
        )

    def along(self, dim: int, size: int, device: torch.device) -> Layout:
        """A sample's tensor as `size` rows along a dimension, all of that sample; other layouts as they are."""
        if self.alone < 0:
            return self
        owner = made_known(torch.full((size,), self.alone, device=device), lambda: torch.full((size,), self.alone))
        order = torch.zeros_like(owner) if self.size_from_data else None
        return self._replace(dim=dim, owner=owner, order=order, alone=-1, size_from_data=False)

    def may_take(self, rows: Tensor) -> bool:
        """Whether these rows, int64 [n], may be picked by constants: of an order made by the data, whole groups only,
        every row of a group equally often."""
        if self.order is None or not self.rows:
            return True
        group = torch.ones_like(self.order)
        group[1:] = (self.order[1:] != self.order[:-1]).long()
        group = group.cumsum(0) - 1
        times = torch.bincount(rows.flatten() % self.rows, minlength=self.rows)
        first = torch.zeros_like(times).scatter_reduce(0, group, times, "amax", include_self=False)
        return bool((times == first[group]).all())

    def __deepcopy__(self, memo: Any) -> Layout:
        return self

    def __reduce__(self) -> Any:
        return nothing()

    def same_rows(self, other: Layout, device: torch.device) -> bool:
        """Whether the rows of both belong to the same samples in the same order, wherever they lie."""
        if self.rows != other.rows:
            return False
        if self.owner is other.owner is None and self[2:4] == other[2:4]:
            return True
        return (
            self.owner is not None
            and self.owner is other.owner
            or same_numbers(self.owners(device), other.owners(device))
        )


def generation_of(tensor: Tensor) -> Generation | None:
    """Whose batch a tensor's samples are of, if it has a layout (one loaded from a file has none: `nothing`)."""
    moment = tensor.__dict__.get(MOMENT)
    return moment if isinstance(moment, Generation) and LAYOUT in tensor.__dict__ else None


def is_stale(tensor: Tensor) -> bool:
    """Whether a tensor carries samples of an earlier batch of the engine that tags now."""
    return is_past(tensor.__dict__.get(MOMENT))


def generation_of_output(tensors: Sequence[Tensor], mine: Generation) -> Generation | None:
    """The moment of what is made of these: `mine`, if one of them is of a model's outputs or states, or that of another
    engine's batch that is over, if all these are of it; None if they are inputs and labels alone."""
    found = None
    for tensor in tensors:
        notes = tensor.__dict__
        if LAYOUT in notes and INPUT not in notes and PRESUMED not in notes and _is_whole(notes.get(MOMENT)):
            moment: Generation = notes[MOMENT]
            if moment.alive or moment.owner is mine.owner:
                return mine
            found = moment
    return found


def lies_in_output(tensors: Sequence[Tensor]) -> bool:
    """Whether one of these lies in memory of a model's outputs or states."""
    return any((held := getattr(storage_of(t), HELD, None)) is not None and _is_whole(held[1]) for t in tensors)


def _is_whole(moment: Any) -> bool:
    return isinstance(moment, Generation) and moment.parent is None


STALE = (
    "carries samples of an earlier batch (kept from one step to the next: a state, a queue, a memory bank, an average "
    "of activations). A sample of that batch would act in two steps, and clipping does not bound the second. Keep no "
    "data between steps: make it anew in every forward, train it as a parameter, or let only parameters be averaged "
    "(a momentum encoder). Of labels that are written into one buffer for every batch, give the loss a clone()"
)


def stale_layout(tensor: Tensor, batch: int) -> Layout:
    """The layout of a tensor that carries samples of an earlier batch."""
    return Layout(batch, mixed=f"a tensor of shape {tuple(tensor.shape)} {STALE}")


def tag(tensor: Tensor, layout: Layout | None) -> None:
    """Write the layout on the tensor (the Python object)."""
    notes = tensor.__dict__
    if layout is None:
        notes.pop(LAYOUT, None)
        notes.pop(HELD, None)
        return
    moment = generations.current
    notes[LAYOUT], notes[MOMENT] = layout, moment
    view = tensor._is_view()
    if view and not tensor.is_inference():
        notes[TAGGED_AT] = tensor._version
    if INPUT in notes or PRESUMED in notes:
        notes[TOKEN] = None
        hold(tensor, layout, view, None if INPUT in notes else OF_LABELS)
        return
    if moment.token is not None or TOKEN in notes:
        notes[TOKEN] = moment.token
    hold(tensor, layout, view, moment)


def layout_on(tensor: Tensor) -> Layout | None:
    """The layout written on the tensor, of whatever batch."""
    found = tensor.__dict__.get(LAYOUT)
    return found if type(found) is Layout else None  # (else pickled, and loaded again)


def tag_of(tensor: Tensor, batch: int) -> Layout | None:
    """The layout written on the tensor, if it speaks of a batch of this size. (Asked for many times in every call.)"""
    notes = tensor.__dict__
    layout = notes.get(LAYOUT)
    if layout is not None:
        if type(layout) is not Layout:  # pickled, and loaded again
            layout = None
        elif (moment := notes[MOMENT]) is not generations.current:
            if is_past(moment):
                return None if PRESUMED in notes or left_as_constant(tensor) else stale_layout(tensor, batch)
            if is_forgotten(moment, layout):
                layout = None
    if layout is None or layout.batch != batch:
        return _seen_through(tensor, batch) if not is_lazy(tensor) and tensor._is_view() else None
    if layout.mixed or not tensor._is_view():
        return layout
    base = tensor._base  # samples may have been mixed through another view
    known = layout_on(base)  # type: ignore[arg-type]
    if known is not None and known.batch == batch and known.mixed and known.shifted is None:
        return layout._replace(mixed=known.mixed)
    if base.__dict__.get(RELAID, -1) > notes.get(TAGGED_AT, -1):  # type: ignore[union-attr]
        return _seen_through(tensor, batch)
    return layout


def _seen_through(view: Tensor, batch: int) -> Layout | None:
    """The layout of a view by that of its base, whose memory was written to since the view was made."""
    base = view._base
    known = None if base is None else layout_on(base)
    if base is None or known is None or not batch:
        return None
    if is_stale(base) or is_forgotten(base.__dict__.get(MOMENT), known):
        if INPUT in base.__dict__ or PRESUMED in base.__dict__ or not is_stale(base):
            return None  # a part of what was an input then may be one now
        return stale_layout(view, batch)
    if known.batch != batch:
        return None
    return of_view(view, base, known) if batch > 1 else known


def of_view(view: Tensor, base: Tensor, layout: Layout) -> Layout:
    """The layout of a view of memory that became data after the view was made."""
    if layout.mixed or layout.alone >= 0:
        return layout
    if layout.plain and view.stride() == base.stride() and view.size(layout.dim) == base.size(layout.dim):
        return layout  # a part of each row
    seen = None if layout.order is not None else seen_through(view, base, layout)
    found = None if seen is None else layout_of_rows(seen[0], layout)
    if seen is not None and found is not None and not same_of_each(*seen, layout, found):
        found = None
    return found or layout._replace(mixed="reads memory in which the rows of the samples cannot be followed")


def spread(values: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Values by position along `dim`, as a tensor of this shape."""
    if tuple(shape) == values.shape:
        return values
    view = [1] * len(shape)
    view[dim : dim + 1] = [values.numel()] * len(view[dim : dim + 1])
    return values.view(view).expand(tuple(shape))


def layout_of_rows(rows: Tensor, layout: Layout, order: Tensor | None = None, anew: bool = False) -> Layout | None:
    """The layout of a result that holds these rows of a layout; None if their samples depend on several dimensions.

    order, anew: see `Layout.taken`.
    """
    shape, owners = rows.shape, layout.owners(rows.device)
    if rows.numel() == 0:
        kept = [dim for dim, step in enumerate(rows.stride()) if step and shape[dim] == layout.rows]
        return layout._replace(dim=kept[0]) if kept else layout.taken(shape.index(0), rows.flatten(), order)
    rows = rows[tuple(slice(0, None if step else 1) for step in rows.stride())] if rows.dim() > 1 else rows
    if order is None and (anew or layout.order is None) and is_one(at(owners, rows).flatten()):
        return layout.of_sample(int(in_some_order(at(owners, rows).flatten())[0]))
    for dim, size in enumerate(shape):
        flat = rows.movedim(dim, 0).flatten(1) if rows.dim() > 1 else rows[:, None]
        if flat.size(1) == 1 or bool((owners[flat] == owners[flat[:, :1]]).all()):
            taken = rows if rows.dim() == 1 else flat[:, 0].expand(size)
            if not anew and size == layout.rows and same_numbers(taken, numbered(size, taken.device)):
                return layout._replace(dim=dim)
            order = order if order is not None and len(order) == size else None
            return layout.taken(dim, taken, order, anew)
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and torch.equal(one, other)
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)


def is_one(owner: Tensor) -> bool:
    """Whether there are rows, and all of one sample."""
    owner = in_some_order(owner)
    return owner.numel() > 0 and bool((owner == owner[0]).all())


def owner_of(layout: Layout) -> int:
    """The one sample of a tensor, or -1."""
    if layout.mixed or layout.alone >= 0:
        return -1 if layout.mixed else layout.alone
    if layout.owner is None or not is_one(layout.owner):
        return -1
    whole = layout.order is None or is_one(layout.order)  # rows of several groups have an order of their own
    return int(in_some_order(layout.owner)[0]) if whole else -1


def regular_rows(owner: Tensor, batch: int) -> tuple[int, int] | None:
    """`outer` and `inner` of rows that lie as these say; None of rows in any other order."""
    host = on_host(owner)
    if host is None:  # to be asked once: are there as many rows of each, one sample after the other?
        inner = owner.numel() // max(batch, 1)
    else:
        owner = host
        inner = int((owner != 0).long().argmax()) if batch > 1 and owner.numel() else 0
    if not inner or owner.numel() % (batch * inner):
        return None
    outer = owner.numel() // (batch * inner)
    regular = torch.arange(batch, device=owner.device).repeat_interleave(inner).repeat(outer)
    return (outer, inner) if torch.equal(owner, regular) else None


def samplewise(tensor: Tensor, layout: Layout) -> Tensor:
    """Cut by sample: [*shape] -> [batch, *shape with dim -> rows of one sample].

    Rows in any order (`owner`) are padded with zeros to the largest number of rows of a sample.
    """
    dim, batch = layout.dim, layout.batch
    if layout.owner is None:
        if layout.outer == 1 and layout.inner == 1:
            return tensor.unsqueeze(1) if dim == 0 else tensor.movedim(dim, 0).unsqueeze(dim + 1)
        cut = tensor.unflatten(dim, (layout.outer, batch, layout.inner))
        return cut.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)
    owner = layout.owner.to(tensor.device)
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(in_some_order(owner), minlength=batch)
    width = int(counts.max()) if owner.numel() else 0
    first = (counts.cumsum(0) - counts).to(owner.device)
    by_owner = owner[order]
    slot = torch.arange(owner.numel(), device=owner.device) - first[by_owner]
    rows = tensor.movedim(dim, 0)[order]
    padded = rows.new_zeros((batch, width, *rows.shape[1:]))
    padded[by_owner, slot] = rows
    return padded.movedim(1, dim + 1)
