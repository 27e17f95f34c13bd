"""Known calls without Python: C++ matches a call by its signature, makes it and tags its results.

It serves the ordinary cases alone. What it does not serve it leaves undone (`MISSED`), and the pass goes on in Python,
which is also what happens if the extension is not there. Calls of data and parameters are known if everything that
their rule looked at follows from shapes, types and layouts (`Captured.by_shapes`): the call that the rule made is then
applied to the tensors of this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..batch_axis import generations, tensor_notes
from ..batch_axis.calls import Call
from ..batch_axis.layout import Layout, tag
from ..batch_axis.operator_table import REACHING_GRAPH, RESHAPING, TELLING_SIZES, function_name
from ..batch_axis.python_sizes import Sizes
from ..grad_sample.captured_call import Applied, Captured, CaptureFunction, Context, Native
from ..grad_sample.parameter_links import link_of, span_of
from ..grad_sample.routed_rows import PRODUCTS
from ..grad_sample.rules import USE_RULES
from ..ops.common import autocast_kinds
from ..ops.registry import native
from ..utils.cache import Answers
from .parameter_slices import FOLLOWED

MISSED = object()
_KINDS = {
    "asks": 0,
    "repeats": 1,
    "checked": 2,
    "depends": 3,
    "where": 4,
    "elementwise": 5,
}  # as known_calls.cpp numbers them
_FOLLOWED, _GATHERING, _INDEXING, _COMBINING, _RESHAPING = 8, 16, 32, 64, 128
_codes, _forms, _layouts = Answers(), Answers(), Answers()  # of functions; by their parts; of equal ones
# past the part of apply() that sees to transforms of torch.func: there are none where a call is known
_APPLY = super(torch.autograd.Function, CaptureFunction).apply


def note_kind(func: Any, kind: str) -> None:
    """A function is of this kind (`layout_cache.kind_of`)."""
    code = _KINDS["depends" if func in REACHING_GRAPH else kind]
    code += _FOLLOWED * (func in FOLLOWED) + _GATHERING * (func in PRODUCTS) + _COMBINING * (func in USE_RULES)
    code += _RESHAPING * (function_name(func) in RESHAPING)
    _codes[func] = code + _INDEXING * (func is torch.Tensor.__getitem__)


class Form:
    """What a call is known by of a tensor: one object for all that are alike, compared by identity."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout | None) -> None:
        self.layout = layout


def form_of(parts: tuple[Any, ...]) -> Form:
    """The one of these parts: shape, type, whether it requires a gradient, layout; before them, of data beside
    parameters, its device and whether it is contiguous."""
    parts = (*parts[:-1], parts[-1] and one_object(parts[-1]))
    found: Form | None = _forms.get(parts)
    if found is None:
        found = _forms[parts] = Form(parts[-1])
    return found


def one_object(layout: Layout) -> Layout:
    """Equal layouts as one object, so that they are compared by identity."""
    plain = not layout.mixed and layout.owner is layout.order is layout.piece is None
    return _layouts.setdefault(layout, layout) if plain else layout


class Described(NamedTuple):
    """What a forward has found of a result of a call (`Signature::described_of`)."""

    form: Form
    needs_grad: bool
    dims: int
    floating: bool
    bytes: bytes  # device, type, shape and strides: while they are the same, so is all of this


class Known(NamedTuple):
    """What a call gives. described: each result, alone and beside parameters; None where nobody asked."""

    layouts: tuple[Layout | None, ...]
    described: list[Described | None]


class NativeCall(NamedTuple):
    """How a native call is made."""

    function: Callable[..., Any]  # torch's
    as_it_is: bool  # whether the data has the form in which it is computed
    saves: bool  # whether uses need the data
    own: bool  # whether the captured call makes it itself (`run_native`)


class KnownCapture(NamedTuple):
    """A captured call, and which arguments it takes."""

    call: Captured
    operands: tuple[int, ...]  # places among the arguments, those by name behind the others; -1: none
    data: tuple[int, ...]
    learned: list[bool]  # which operands are parameters
    uses: list[tuple[int, tuple[int, int]]]  # of parameters, by id: the first and the last element
    native: NativeCall | None  # if autograd's own node for the call will do
    described: list[Described | None]  # the result, as of `Known`


def captured_by(call: Call, applied: Sequence[Applied]) -> KnownCapture | None:
    """What a rule made of a call, if the same is right wherever shapes, types and layouts are the same."""
    if len(applied) != 1 or applied[0].out is not call.out or not applied[0].call.by_shapes:
        return None
    _, ctx, data, _ = applied[0]
    found = [_place(call, tensor) for tensor in (*ctx.operands, *data)]
    places = [place for place in found if place is not None]
    given = [place for place in places if place >= 0]
    if len(set(given)) < len(given):  # one tensor in two places
        return None
    if len(places) < len(found) or any(link_of(t) is not None for t in ctx.operands if t is not None):
        return None
    operands, count = ctx.operands, len(ctx.operands)
    learned = [t for t, own in zip(operands, ctx.learned, strict=True) if own]
    uses = [(id(t), span_of(t, t)) for t in learned]
    made, native = applied[0].call, None
    if made.native and list(ctx.wanted) == [True]:
        x = data[0].detach()
        own = type(made).run_native is not Captured.run_native
        native = NativeCall(call.func, made.as_computed(x) is x, bool(made.saved(ctx, x)), own)
    return KnownCapture(made, tuple(places[:count]), tuple(places[count:]), ctx.learned, uses, native, [None, None])


def _place(call: Call, tensor: Tensor | None) -> int | None:
    """Where a tensor stands among a call's arguments; -1 of none, None if it does not."""
    args, kwargs = call.given
    if tensor is None:
        return -1
    return next((place for place, value in enumerate((*args, *kwargs.values())) if value is tensor), None)


def repeat(known: KnownCapture, forward_pass: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a captured call, of these arguments; it gets its layout in C++."""
    call, operands, data, learned, uses, *_ = known
    given: Any = (*args, *kwargs.values(), None)
    ctx = Context.repeated(forward_pass, [given[place] for place in operands], learned)
    if forward_pass.count:
        uses_of = forward_pass.backward.uses_of
        for parameter, span in uses:
            uses_of.setdefault(parameter, []).append(span)
    return _APPLY(forward_pass.token, call, ctx, *[given[place] for place in data])


def known_calls(
    known: Answers, captures: Answers, batch: int, tracked: dict[int, str], stack: list[str], sizes: Sizes
) -> Any:
    """The `KnownCalls` of a pass; None if the extension is not there.

    known: `Known` by signature; captures: `KnownCapture` by signature; stack: the modules whose forwards
    run; sizes: told of sizes that Python asks for.
    """
    module = native()
    if isinstance(module, str) or not hasattr(module, "KnownCalls"):
        return None
    if module not in _told:
        module.set_vocabulary(_vocabulary(), {name: place for place, name in enumerate(Layout._fields)})
        _told.append(module)
    return module.KnownCalls(known, captures, batch, tracked, stack, sizes)


_told: list[Any] = []  # the module that has the vocabulary


def _autocast() -> tuple[Any, ...]:
    """What autocast does, where it does something."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in autocast_kinds())


def _vocabulary() -> dict[str, Any]:
    names = (
        "LAYOUT MOMENT TAGGED_AT RELAID INPUT PRESUMED TOKEN HELD MADE LINK UNTRACKED PARTS GATHERED NUMBER NUMBER_OF "
        "COUNTED"
    ).split()
    return {
        "Tensor": Tensor, "Parameter": nn.Parameter, "Layout": Layout, "kinds": _codes, "moments": generations,
        "telling": set(TELLING_SIZES), "holding": tensor_notes.HOLDING, "drop_gone": tensor_notes.HOLDING.drop_gone,
        "tag": tag,
        "MISSED": MISSED, "under_functorch": torch._C._functorch.peek_interpreter_stack,
        "grad_enabled": torch.is_grad_enabled, "any_autocast": torch._C._is_any_autocast_enabled,
        "autocast": _autocast, "saving_hooks": torch._C._autograd._top_saved_tensors_default_hooks, "repeat": repeat,
        "Native": Native, "forward_ad": forward_ad, "forms": _forms, "form_of": form_of,
        "modes": torch._C._len_torch_function_stack, "example": torch.empty(0),
        "disabled": torch._C.DisableTorchFunction,
        **{name: getattr(tensor_notes, name) for name in names},
    }  # fmt: skip
