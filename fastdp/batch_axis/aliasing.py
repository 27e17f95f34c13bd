"""Tensors that share memory: what is written through a view is seen through its base and other views."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .calls import Call
from .generations import is_forgotten, is_past
from .layout import Layout, layout_on, spread, stale_layout, tag
from .operator_table import RENORMING
from .own_places import seen_through
from .tensor_notes import APART, HELD, INPUT, OF_LABELS, HeldBytes, foreign, is_over, storage_of, written

_SHARED = (
    "a tensor shares its memory with data that was written to, or made data of another tensor, out of autograd's sight "
    "(.data, detach(), set_, nn.Parameter, numpy, dlpack); make a new tensor, by clone()"
)


def look(tensor: Tensor, layout: Layout | None, batch: int) -> Layout | None:
    """The layout that a tensor's memory allows, which is written on it: `layout` (that of its tag), mostly.

    A constant over memory that holds data is data; a layout is not believed of memory that another took, or that other
    samples were written to through an alias.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse
        return layout
    held: HeldBytes | None = getattr(storage, HELD, None)
    if layout is not None:
        if held is tensor.__dict__.get(HELD) or layout.mixed or _by_its_base(tensor, held):
            return layout
        found = Layout(batch, mixed=_SHARED)
    else:
        if held is None and storage.resizable():  # nobody's, mostly
            return None
        over = None if held is not None or is_apart(tensor) else foreign(storage)
        if over is not None and over[0].batch == batch:
            found = Layout(batch, mixed=over[0].mixed or _SHARED)
            tag(tensor, found)
            return found
        if held is None or is_apart(tensor):
            return None
        if (held[1] is OF_LABELS and len(held) == 2) or is_forgotten(held[1], held[0]):
            return None  # others of a user's tensors may lie there, too
        if is_past(held[1]):
            found = stale_layout(tensor, batch)
            tag(tensor, found)
            return found
        if held[0].batch != batch:
            return None
        twin = is_over(held, tensor) or _is_whole_input(tensor, held)
        found = held[0] if twin else Layout(batch, mixed=held[0].mixed or _SHARED)
    tag(tensor, found)
    return found


def _is_whole_input(tensor: Tensor, held: HeldBytes) -> bool:
    """Whether a tensor is an input's memory as a whole, in order (`Variable(x)`)."""
    if (
        held[1] is not None
        or not tensor.is_contiguous()
        or tensor.shape[held[0].dim : held[0].dim + 1] != (held[0].rows,)
    ):
        return False
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _by_its_base(tensor: Tensor, held: HeldBytes | None) -> bool:
    """Whether a view's base, by which its own layout is judged, is right about its memory."""
    return tensor._is_view() and held is tensor._base.__dict__.get(HELD)  # type: ignore[union-attr]


def is_apart(tensor: Tensor) -> bool:
    """Whether a tensor without a layout is a constant although its memory holds data elsewhere."""
    return INPUT in tensor.__dict__ or APART in tensor.__dict__


def shares(tensor: Tensor) -> bool:
    """Whether a constant lies in memory that holds data."""
    storage = storage_of(tensor)
    return storage is not None and getattr(storage, HELD, None) is not None


def keep_apart(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Views of constants of a call without data are constants, as these are."""
    for tensor in outputs:
        if shares(tensor) and any(is_apart(t) and storage_of(t) is storage_of(tensor) for t in inputs):
            tensor.__dict__[APART] = True


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was written to; -1 where torch does not count (inference tensors)."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def write_unaccounted(call: Call, versions: list[int]) -> bool:
    """See to what a call wrote without its rule's knowing, by the versions of its arguments. Returns whether any is."""
    changed = [t for t, version in zip(call.tensors, versions, strict=True) if version >= 0 and t._version != version]
    if not changed or call.func in RENORMING:
        return bool(changed)
    spoken_of = {id(storage_of(t)) for t in (*call.results(), *call.written())}
    for tensor in changed:
        if id(storage_of(tensor)) in spoken_of or call.name == "data":
            continue
        layout = call.combined("writes to an argument of its own, of what samples is not known")
        for held in (tensor, tensor._base if tensor._is_view() else tensor):
            before = layout_on(held)  # type: ignore[arg-type]
            tag(held, layout)  # type: ignore[arg-type]
            written(held, layout, before)  # type: ignore[arg-type]
    return True


def written_through(call: Call, view: Tensor, before: Layout | None, layout: Layout | None) -> None:
    """A view has been written to: its base holds that data too. before, layout: of the view, before and after."""
    base = view._base
    if base is None or base is view or layout is None or (layout == before and not layout.mixed):
        return
    known = layout_on(base)
    known = known if known is not None and known.batch == call.batch else None
    if layout.alone >= 0 or (known is not None and known.mixed):
        return  # `alone` has looked at it
    found = None
    if not layout.mixed and layout.order is None and view.shape[layout.dim : layout.dim + 1] == (layout.rows,):
        found = base_written(base, view, known, spread(layout.owners(view.device), layout.dim, view.shape), call.batch)
    part = None if known is None else known.piece
    if found is None or (part is not None and (before is None or before.piece != part)):  # parts through several views
        why = layout.mixed or call.mixed("writes rows of samples into memory where they cannot be followed")
        found = Layout(call.batch, mixed=why)
    tag(base, found._replace(piece=layout.piece))


def base_written(base: Tensor, view: Tensor, known: Layout | None, owners: Tensor, batch: int) -> Layout | None:
    """The layout of a tensor after these samples' numbers were written through a view of it; known: that before, None
    of a constant, whose rows lie then as they must. None if several ways fit, or none."""
    even = [Layout(batch, d, 1, n // batch) for d, n in enumerate(base.shape) if n and n % batch == 0]
    fitting = []
    for guess in even if known is None else [known]:
        seen = seen_through(view, base, guess) if guess.alone < 0 else None
        if seen is not None and bool((guess.owners(view.device)[seen[0]] == owners).all()):
            fitting.append(guess)
    return fitting[0] if len(fitting) == 1 else None
