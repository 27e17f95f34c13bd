"""Memory that several tensors share: what is written through a view is seen through its base and its other views."""

from __future__ import annotations

import torch
from torch import Tensor

from .calls import Call
from .layout import ATTRIBUTE, Layout, is_one, tag

_NOBODY = -1  # owner of what no sample was written to


def written_through(call: Call, view: Tensor, before: Layout | None, layout: Layout | None) -> None:
    """A view has been written to: its base holds that data too. before, layout: of the view, before and after."""
    base = view._base
    if base is None or base is view or layout is None or (layout == before and not layout.mixed):
        return
    known = base.__dict__.get(ATTRIBUTE)
    known = known if known is not None and known.batch == call.batch else None
    if layout.alone >= 0 or (known is not None and known.mixed):
        return  # `alone` has looked at it
    found = None if layout.mixed or layout.order is not None else _of_base(base, view, known, layout)
    if found is None:
        why = layout.mixed or call.mixed("writes rows of samples into memory where they cannot be followed")
        found = Layout(call.batch, mixed=why)
    tag(base, found)


def _of_base(base: Tensor, view: Tensor, known: Layout | None, layout: Layout) -> Layout | None:
    """The base's layout after this layout's rows were written through the view; None if it cannot be written as one."""
    rows = _map(base, known)
    if rows is None or view.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return None
    shape = [1] * view.dim()
    shape[layout.dim] = layout.rows
    inside = rows.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset())
    owners = layout.owners(view.device).view(shape).expand(view.shape)
    if known is not None:
        return known if known.alone < 0 and bool((inside == owners).all()) else None
    inside.copy_(owners)
    return _read(rows.as_strided(base.shape, base.stride()), layout)


def of_view(view: Tensor, base: Tensor, layout: Layout) -> Layout | None:
    """The layout of a view of memory that became data after the view was made."""
    if layout.mixed or layout.alone >= 0:
        return layout
    why = "reads memory in which the rows of the samples cannot be followed"
    rows = None if layout.order is not None else _map(base, layout)
    if rows is None:
        return layout._replace(mixed=why)
    offset = view.storage_offset() - base.storage_offset()
    seen = rows.as_strided(view.shape, view.stride(), offset)
    return _read(seen, layout) or layout._replace(mixed=why)


def _map(base: Tensor, layout: Layout | None) -> Tensor | None:
    """Owner of each element of a tensor's memory, from its first to its last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True))
    memory = torch.full((extent,), _NOBODY, device=base.device)
    if layout is None:
        return memory
    if base.shape[layout.dim : layout.dim + 1] != (layout.rows,) or any(s == 0 for s in base.stride()):
        return None
    shape = [1] * base.dim()
    shape[layout.dim] = layout.rows
    memory.as_strided(base.shape, base.stride()).copy_(layout.owners(base.device).view(shape))
    return memory


def _read(owners: Tensor, like: Layout) -> Layout | None:
    """A layout from the owner of each element; what nobody owns may count as anyone's."""
    batch = like.batch
    plain = Layout(batch, places=like.places, guessed=like.guessed)
    given = owners[owners != _NOBODY]
    if is_one(given) and bool((owners != _NOBODY).all()):
        return plain.of_sample(int(given[0]))
    fitting = []
    for dim in range(owners.dim()):
        rows = owners.movedim(dim, 0).reshape(owners.size(dim), -1)
        largest = rows.max(1).values
        if not bool(((rows == largest[:, None]) | (rows == _NOBODY)).all()):
            continue
        each = owners.size(dim) // batch
        even = torch.arange(batch, device=owners.device).repeat_interleave(each)
        if bool((largest != _NOBODY).all()):
            fitting.append(
                plain._replace(dim=dim, owner=largest).taken(dim, torch.arange(len(largest), device=owners.device))
            )
        elif len(even) == len(largest) and bool(((largest == even) | (largest == _NOBODY)).all()):
            fitting.append(plain._replace(dim=dim, inner=each))
    return fitting[0] if len(fitting) == 1 else None
