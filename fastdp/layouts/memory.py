"""Memory that several tensors share: what is written through a view is seen through its base and its other views."""

from __future__ import annotations

from torch import Tensor

from .calls import Call
from .layout import ATTRIBUTE, Layout, layout_of_owners, owner_map, tag


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
    rows = owner_map(base, known)
    if rows is None or view.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return None
    shape = [1] * view.dim()
    shape[layout.dim] = layout.rows
    inside = rows.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset())
    owners = layout.owners(view.device).view(shape).expand(view.shape)
    if known is not None:
        return known if known.alone < 0 and bool((inside == owners).all()) else None
    inside.copy_(owners)
    return layout_of_owners(rows.as_strided(base.shape, base.stride()), layout)
