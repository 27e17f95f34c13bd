"""Constants that become data: which sample each row of a constant belongs to, once data is written to some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import tensor_notes
from .batch_positions import is_fixed, note_made
from .calls import Call
from .index_kinds import source_dims
from .inputs import layouts_marked
from .layout import NOBODY, Layout, spread, tag
from .own_numbers import DRAWN, OWN_NUMBERS


class Write(NamedTuple):
    """places: of a tensor of the target's shape, the elements that are written; owners: the sample of each of these, by
    the values and by the index; source: the values' layout; by_data: data are among the index."""

    target: Tensor
    places: Callable[[Tensor], Tensor]
    owners: list[Tensor]
    source: Layout | None
    by_data: bool

    def fits(self, layout: Layout) -> bool:
        """Whether every sample's rows go into its own rows, if the target's rows lie so."""
        written = self.places(spread(layout.owners(self.target.device), layout.dim, self.target.shape))
        return all(_agree(written, own) for own in self.owners)


def _agree(written: Tensor, own: Tensor) -> bool:
    try:
        return bool((written == own).all())
    except RuntimeError:  # of shapes that do not fit
        return False


def note_shape(tensor: Tensor, layout: Layout | None) -> None:
    """Note on a constant made by data of this layout (`h.new_zeros(h.shape)`) that it has as many rows."""
    if layout is None or layout.mixed or layout.alone >= 0:
        return
    if tensor.shape[layout.dim : layout.dim + 1] == (layout.rows,):
        tensor.__dict__[tensor_notes.SHAPED] = Layout(*layout[:5])


def shape_of(tensor: Tensor, batch: int) -> Layout | None:
    """What was noted of a constant's shape, if it still has it."""
    layout: Layout | None = tensor.__dict__.get(tensor_notes.SHAPED)
    return layout if layout is not None and layout.batch == batch else None


def of_constant(call: Call, write: Write, dim: int | None = None, numbers: Sequence[int] = ()) -> Layout | None:
    """The layout of a constant once data is written to it; None: two samples' meet.

    dim: the only one along which the samples may lie; numbers: those that the index names by one number each.
    """
    shaped = shape_of(write.target, call.batch)
    if shaped is not None and dim in (None, shaped.dim) and write.fits(shaped):
        return shaped
    fitting = [one for one in _candidates(call.batch, write) if dim in (None, one.dim) and write.fits(one)]
    by_number = [one for one in fitting if one.dim in numbers]
    by_number = [one for one in by_number if one.inner == 1] or by_number
    if by_number or len({one.dim for one in fitting}) == 1:  # what is not written yet may count as anyone's
        return (by_number or fitting)[0]
    if fitting or write.by_data or not write.owners:  # which rows nobody wrote to would depend on the data
        return None
    return _filled(call, write, (write.source.dim if write.source is not None else 0) if dim is None else dim)


def _candidates(batch: int, write: Write) -> Iterator[Layout]:
    """As many rows of each sample along some dimension, as an input's marks say, or as the values lie."""
    shape, like = write.target.shape, write.source
    for dim, size in enumerate(shape):
        if size and size % batch == 0:
            yield Layout(batch, dim, 1, size // batch)
    yield from (layout for layout in layouts_marked(batch, write.target.device) if shape[:1] == (layout.rows,))
    if like is not None and like.alone < 0 and like.order is None and shape[like.dim : like.dim + 1] == (like.rows,):
        if like.owner is not None or like.outer > 1:
            yield Layout(*like[:5])


def _filled(call: Call, write: Write, dim: int) -> Layout | None:
    """Rows of a constant as those of the samples that wrote to them, constants saying which; rows that nobody wrote to
    count to the sample of the row before, the first ones to that of the row after."""
    target, device = write.target, write.target.device
    if dim >= target.dim():
        return None
    numbers = torch.arange(target.size(dim), device=device)
    rows = write.places(spread(numbers, dim, target.shape))
    try:
        own = write.owners[0].expand_as(rows)
    except RuntimeError:
        return None
    owner = torch.full_like(numbers, NOBODY)
    owner[rows.flatten()] = own.flatten()
    if not rows.numel() or not torch.equal(owner[rows], own):
        return None
    last = torch.where(owner == NOBODY, -1, numbers).cummax(0).values
    owner = owner[last.clamp(min=int((owner != NOBODY).nonzero()[0]))]
    return Layout(call.batch, dim, owner=owner).taken(dim, numbers)


def note_constant(
    call: Call, is_owned: Callable[[Tensor], bool], of_loss: Callable[[bool], bool] | None = None
) -> None:
    """Note how constants were made (`note_made`); one becomes data by mask[i, :n] = 1, if Python has n of sample i."""
    found = _of_own_numbers(call)
    if found is None:
        note_made(call, is_owned, of_loss)
    else:
        tag(call.args[0], found)


def _are_alike(target: Tensor, but: int) -> bool:
    """Whether the rows of a constant are the same, all but one."""
    rest = torch.cat([target[:but], target[but + 1 :]])
    return bool((rest == rest[:1]).all())


def _of_own_numbers(call: Call) -> Layout | None:
    if call.name != "__setitem__" or call.batch <= 1 or not isinstance(call.args[0], Tensor) or call.inputs():
        return None
    target, index, value = call.args
    sample = -1 if isinstance(value, Tensor) else OWN_NUMBERS.row_of(index, value, target.shape)
    if not 0 <= sample < call.batch or (is_fixed(target) and not _are_alike(target, sample)):
        return None
    write = Write(target, lambda t: t[index], [torch.tensor(sample, device=target.device)], None, True)
    numbers = [dim for dim, item in source_dims(index, target.dim()).items() if isinstance(item, int)]
    found = of_constant(call, write, None, numbers)
    if found is not None:
        DRAWN.note_own(target, sample)
    return found
