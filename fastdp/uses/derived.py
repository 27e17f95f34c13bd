"""Tensors made of parameters alone: views, casts, 1 + w, weight norm, merges, look-ups by constants.

Ordinary autograd computes them, attached to the parameters; what is added here is a note (`Link`) of the
leaves and of what is known about the map. The gradient of a sample is pulled back through autograd's graph.
If such a tensor reaches a function that no rule sees, autograd writes to a parameter's `.grad`, and the
engine refuses: nothing can slip through.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SampleMixingError, UncapturedUseError
from ..layouts.calls import bind, function_name, is_in_place
from ..layouts.layout import tag_of
from ..layouts.nests import tensors_in
from ..ops.common import accumulate
from .forward_pass import ForwardPass
from .links import Link, leaves_of, link_of, set_link

# functions that only move, drop or cast elements
_MOVING = frozenset(
    "t transpose permute movedim moveaxis swapaxes swapdims view reshape flatten unflatten squeeze unsqueeze "
    "narrow select chunk split split_with_sizes tensor_split unbind contiguous clone to float double half "
    "bfloat16 type T mT H mH neg __getitem__ view_as reshape_as requires_grad_ diagonal".split()
)
_CASTING = frozenset("to float double half bfloat16 type clone contiguous".split())
_HOOKING = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
_BROADCASTING = frozenset(("expand", "expand_as", "broadcast_to"))


def mark_derived(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, forward_pass: ForwardPass, parents: list[Tensor]
) -> tuple[Tensor, ...]:
    """Link the results of a function of parameters (and constants) to the parameters; returns these.

    parents: the parameters and derived tensors among the arguments, found before the call.
    """
    name = function_name(func)
    if name in _HOOKING:
        raise UncapturedUseError(
            f"{forward_pass.place(name)}: a hook on the gradient of {forward_pass.names_of(parents)}, or of a tensor "
            "made of it, would not see the gradients of samples. Remove it; to mask a weight, multiply it by the mask."
        )
    first = next(iter((*args, *kwargs.values())))  # torch.nn.init names its arguments
    results = [first] if is_in_place(name) else list(tensors_in(out))
    results = [t for t in results if t.requires_grad and not forward_pass.is_tracked(t)]
    if not results:
        return ()
    leaves: dict[int, Tensor] = {}
    for parent in parents:
        leaves.update((id(leaf), leaf) for leaf in leaves_of(parent))
    parent = parents[0]
    link = Link(tuple(leaves.values()), parent, "function", False)
    written = is_in_place(name) or any(result is parent for result in results)
    before = link_of(args[0]) if is_in_place(name) else None
    if len(parents) == 1 and parent is (args[0] if args else None) and not written:
        above = link_of(parent)
        if name in _BROADCASTING:
            link = link._replace(kind="broadcast")
        elif name in _MOVING and _moves_each_once(name, parent, args, kwargs):
            link = link._replace(isometric=above is None or above.isometric)
            if name in _CASTING and (above is None or above.kind == "cast"):
                link = link._replace(kind="cast")
        elif _row_index(name, args, kwargs) is not None:
            link = link._replace(kind="lookup", ids=_row_index(name, args, kwargs))
    elif func is F.embedding and len(parents) == 1:
        ids, _, padding_idx, max_norm = bind(args, kwargs, "input", "weight", "padding_idx", "max_norm")
        check_embedding(forward_pass, args, kwargs)
        if padding_idx is None and max_norm is None:
            link = link._replace(kind="lookup", ids=ids)
    for result in results:
        set_link(result, link._replace(version=result._version))
        if is_in_place(name) and result._is_view() and not forward_pass.compiling:
            _link_base(result, before, forward_pass)
    return link.leaves


def _link_base(view: Tensor, before: Link | None, forward_pass: ForwardPass) -> None:
    """What was written through a view is in the memory that it views: that tensor is made of these parameters too.

    before: the view's link before it was written to. Not followed where the memory holds data, or had been written to
    in another way: its own link, if it has one, is then of an older version, and its next use is refused.
    """
    base = view._base
    link = link_of(view)
    if base is None or link is None or forward_pass.is_tracked(base) or tag_of(base, forward_pass.batch) is not None:
        return
    above = link_of(base)
    if above is None or before is None or above.version != before.version:
        return
    leaves = {id(leaf): leaf for leaf in (*above.leaves, *link.leaves)}
    set_link(base, Link(tuple(leaves.values()), above.parent, "function", False, version=base._version))


def _moves_each_once(name: str, parent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """No other tensor takes part, and no list as an index, which may repeat elements."""
    if any(t is not parent for t in tensors_in((args, kwargs))):
        return False
    if name != "__getitem__":
        return True
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in index)


def check_embedding(forward_pass: ForwardPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the options of F.embedding that depend on other samples or change the table without noise."""
    options = bind(args, kwargs, "", "", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    if options[3] is not None:
        raise SampleMixingError(
            f"{forward_pass.place('embedding')}: max_norm rescales rows of the table by who is in the batch, without "
            "noise. Set max_norm=None."
        )
    if options[5]:
        raise SampleMixingError(
            f"{forward_pass.place('embedding')}: scale_grad_by_freq makes a sample's gradient depend on the others. "
            "Set scale_grad_by_freq=False."
        )


def _row_index(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Constant ids, where the call takes whole rows of its first argument."""
    if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype in (torch.int64, torch.int32):
        return args[1]
    if name == "index_select" and bind(args, kwargs, "input", "dim", "index")[1] == 0:
        return bind(args, kwargs, "input", "dim", "index")[2]
    return None


def pull_back(operand: Tensor, grads: Tensor) -> dict[int, Tensor]:
    """Gradients with respect to the leaves: [b, *operand.shape] -> {id(leaf): [b, *leaf.shape]}."""
    link = link_of(operand)
    if link is None:
        return {id(operand): grads}
    cast = grads.to(operand.dtype)
    try:
        found = torch.autograd.grad(
            operand, link.leaves, cast, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except RuntimeError:  # no batched rule for some backward: one sample at a time
        each = [torch.autograd.grad(operand, link.leaves, g, retain_graph=True, allow_unused=True) for g in cast]
        columns = [[part for part in parts if part is not None] for parts in zip(*each, strict=True)]
        found = tuple(torch.stack(parts) if parts else None for parts in columns)  # type: ignore[misc]
    return {id(leaf): accumulate(g) for leaf, g in zip(link.leaves, found, strict=True) if g is not None}


def pull_back_sum(operand: Tensor, total: Tensor) -> dict[int, Tensor]:
    """The same for one gradient [*operand.shape], a clipped sum."""
    link = link_of(operand)
    if link is None:
        return {id(operand): total}
    found = torch.autograd.grad(operand, link.leaves, total.to(operand.dtype), retain_graph=True, allow_unused=True)
    return {id(leaf): accumulate(g) for leaf, g in zip(link.leaves, found, strict=True) if g is not None}
