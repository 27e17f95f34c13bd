"""Tensors made of parameters alone (views, casts, `1 + w`, weight norm, merges, constant look-ups) and their links.

Ordinary autograd computes them, attached to the parameters; a note (`Link`) says of which parameters, and what is known
about the map. The gradient of a sample is pulled back through autograd's graph. If such a tensor reaches a function
that no rule sees, autograd writes to a parameter's `.grad`, and the engine refuses: nothing can slip through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..batch_axis import operator_table, tensor_notes
from ..batch_axis.calls import Call, bind
from ..batch_axis.host_values import on_host
from ..batch_axis.layout import tag_of
from ..errors import SampleMixingError, UncapturedUseError
from ..ops.common import accumulate
from .checkpoint_regions import run_again
from .forward_pass import ForwardPass


class Link(NamedTuple):
    """How a tensor was derived from parameters alone; autograd holds the graph.

    isometric: the whole chain only moves, casts or drops elements (a look-up of different rows, too), so norms are
    those of the gradient here.
    kind "cast" only changes the type of the one leaf;
    kind "broadcast" (of `parent`) and "lookup" (rows `ids` of `parent`) have gradients in closed form.
    """

    leaves: tuple[Tensor, ...]
    parent: Tensor
    kind: str
    isometric: bool
    ids: Tensor | None = None
    again: tuple[Callable[..., Any], ...] = ()  # that checkpointing runs again to pull gradients back
    version: int = 0  # of the derived tensor: another one says that it was written to through a view


def link_of(tensor: Tensor) -> Link | None:
    """The link of a derived tensor; None for a parameter and for data."""
    return tensor.__dict__.get(tensor_notes.LINK)


def set_link(tensor: Tensor, link: Link | None) -> None:
    if link is None:
        tensor.__dict__.pop(tensor_notes.LINK, None)
    else:
        tensor.__dict__[tensor_notes.LINK] = link


def leaves_of(operand: Tensor) -> tuple[Tensor, ...]:
    """The parameters that an operand is made of."""
    link = link_of(operand)
    return (operand,) if link is None else link.leaves


def span_of(operand: Tensor, leaf: Tensor) -> tuple[int, int]:
    """The first and last element of the leaf that the operand is made of: a slice's own, else all."""
    if is_lazy(leaf):
        return (0, 0)
    link = link_of(operand)
    whole = (0, max(leaf.numel() - 1, 0))
    if link is None or not link.isometric or len(link.leaves) != 1 or not leaf.is_contiguous():
        return whole
    if operand.dtype != leaf.dtype or operand.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
        return whole
    start = int(operand.storage_offset() - leaf.storage_offset())
    return start, start + sum((n - 1) * step for n, step in zip(operand.shape, operand.stride(), strict=True))


class Unwritten:
    """Tensors that must stay as they are while a forward runs."""

    def __init__(self) -> None:
        self._versions: dict[tuple[int, int], Tensor] = {}  # by identity and version; kept, so that no other has it

    def add(self, tensor: Tensor) -> None:
        """As it is now."""
        self._versions[id(tensor), tensor._version] = tensor

    def renew(self, value: object) -> None:
        """What was written into it, if it is one of these, is accounted for."""
        for key, tensor in list(self._versions.items()):
            if tensor is value:
                del self._versions[key]
                self.add(tensor)

    def written(self) -> bool:
        """Whether one was written to since."""
        return any(tensor._version != version for (_, version), tensor in self._versions.items())


def mark_derived(call: Call, forward_pass: ForwardPass, parents: list[Tensor]) -> tuple[Tensor, ...]:
    """Link the results of a call of parameters (and constants) to the parameters; returns these.

    parents: the parameters and derived tensors among the arguments, found before the call.
    """
    name, (args, kwargs) = call.name, call.given
    if name in operator_table.HOOKING:
        raise UncapturedUseError(
            f"{forward_pass.place(name)}: a hook on the gradient of {forward_pass.names_of(parents)}, or of a tensor "
            "made of it, would not see the gradients of samples. Remove it; to mask a weight, multiply it by the mask."
        )
    first = next(iter((*args, *kwargs.values())))  # torch.nn.init names its arguments
    results = [first] if call.in_place else list(call.results())
    results = [t for t in results if t.requires_grad and not forward_pass.is_tracked(t) and not _is_as_it_was(t)]
    if not results:
        return ()
    leaves: dict[int, Tensor] = {}
    for parent in parents:
        leaves.update((id(leaf), leaf) for leaf in leaves_of(parent))
    parent = parents[0]
    link = Link(tuple(leaves.values()), parent, "function", False, again=_again(parents))
    written = call.in_place or any(result is parent for result in results)
    before = link_of(first) if call.in_place else None
    if len(parents) == 1 and parent is (args[0] if args else None) and not written:
        above = link_of(parent)
        if name in operator_table.BROADCASTING or (name in operator_table.COPYING and _copies_once(parent, results)):
            link = link._replace(kind="broadcast")
        elif name in operator_table.MOVING and _moves_each_once(call, parent):
            link = link._replace(isometric=above is None or above.isometric)
            if name in operator_table.CASTING and (above is None or above.kind == "cast"):
                link = link._replace(kind="cast")
        elif (ids := _row_index(call)) is not None:
            link = link._replace(kind="lookup", ids=ids, isometric=_takes_each_once(ids, parent))
    elif call.func is F.embedding and len(parents) == 1:
        ids, _, padding_idx, max_norm = bind(args, kwargs, "input", "weight", "padding_idx", "max_norm")
        check_embedding(forward_pass, args, kwargs)
        if padding_idx is None and max_norm is None:
            link = link._replace(kind="lookup", ids=ids, isometric=_takes_each_once(ids, parent))
    for result in results:
        set_link(result, link._replace(version=result._version))
        if call.in_place and result._is_view():
            _link_base(result, before, forward_pass)
    return link.leaves


def _is_as_it_was(tensor: Tensor) -> bool:
    """Whether a call gave back what it took, unwritten: `w.to(device)` of what lies there."""
    link = link_of(tensor)
    return link is not None and link.version == tensor._version


_OF_ONE = frozenset(
    f"{name}Backward{number}"
    for name in "Alias Clamp Clone Elu Exp Expand Log LogSoftmax Neg Permute Pow Reciprocal Relu Select Sigmoid Slice "
    "Softmax Softplus Sqrt Squeeze T Tanh ToCopy Transpose Unsqueeze View".split()
    for number in (0, 1)
)


def adopt(tensor: Tensor, forward_pass: ForwardPass) -> bool:
    """Link a tensor that was made out of sight, before the forward, if autograd's graph shows that it is made of one
    tracked parameter and of nothing else. Returns whether it is."""
    node, seen = tensor.grad_fn, 0
    while node is not None and node.name() in _OF_ONE and len(node.next_functions) == 1 and seen < 100:
        node, seen = node.next_functions[0][0], seen + 1
    leaf = getattr(node, "variable", None)
    if leaf is None or not forward_pass.is_tracked(leaf) or not _is_linear_back(tensor, leaf):
        return False
    set_link(tensor, Link((leaf,), leaf, "function", False, version=tensor._version))
    return True


def _is_linear_back(tensor: Tensor, leaf: Tensor) -> bool:
    """Whether gradients go back in proportion: a hook on the way that is not linear would meet the clipped sum."""
    given = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype, device=tensor.device).view_as(tensor)
    with torch.enable_grad():
        small, large = (torch.autograd.grad(tensor, leaf, given * k, retain_graph=True)[0] for k in (1, 1024))
    return bool(torch.equal(small * 1024, large))


def _again(parents: list[Tensor]) -> tuple[Callable[..., Any], ...]:
    """What runs again to pull a gradient back through this call, and those before it."""
    found = list(run_again())
    for parent in parents:
        link = link_of(parent)
        found += [each for each in (() if link is None else link.again) if each not in found]
    return tuple(found)


def _link_base(view: Tensor, before: Link | None, forward_pass: ForwardPass) -> None:
    """What was written through a view is in the memory that it views: that tensor is made of these parameters too.

    before: the view's link before it was written to; None, as of the tensor: both were constants. Not followed where
    the memory holds data, or had been written to in another way: its own link, if it has one, is then of an older
    version, and its next use is refused.
    """
    base = view._base
    link = link_of(view)
    if base is None or link is None or forward_pass.is_tracked(base) or tag_of(base, forward_pass.batch) is not None:
        return
    above = link_of(base)
    if above is None and before is None and tensor_notes.UNTRACKED not in base.__dict__:
        set_link(base, link._replace(version=base._version))
    if above is None or before is None or above.version != before.version:
        return
    leaves = {id(leaf): leaf for leaf in (*above.leaves, *link.leaves)}
    both = (*above.again, *(each for each in link.again if each not in above.again))
    set_link(base, Link(tuple(leaves.values()), above.parent, "function", False, again=both, version=base._version))


def _moves_each_once(call: Call, parent: Tensor) -> bool:
    """No other tensor takes part, and no list as an index, which may repeat elements."""
    if any(t is not parent for t in call.tensors):
        return False
    if call.name != "__getitem__":
        return True
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    return all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in index)


def _copies_once(parent: Tensor, results: list[Tensor]) -> bool:
    """Whether a call repeats the parent along dimensions of size 1 alone, as a broadcast does."""
    shape = results[0].shape[len(results[0].shape) - parent.dim() :]
    return all(before in (1, after) for before, after in zip(parent.shape, shape, strict=True))


def _takes_each_once(ids: Tensor, table: Tensor) -> bool:
    """Whether these ids, as far as this is known without a device, take rows of a parameter, and none of them twice."""
    link, rows = link_of(table), table.size(0)
    if not 0 < ids.numel() <= rows or not (link is None or link.isometric):
        return False
    if (numbers := on_host(ids)) is None:
        return False
    places = (numbers.flatten() % rows).sort().values
    return bool((places[1:] != places[:-1]).all())  # (a recorded step asks this again, so no list of Python's)


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


def _row_index(call: Call) -> Tensor | None:
    """Constant ids, where the call takes whole rows of its first argument."""
    name, (args, kwargs) = call.name, call.given
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
