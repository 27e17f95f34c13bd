"""Recognises labels: tensors of unseen origin that meet the model's outputs in the loss.

A batch that no `fastdp.poisson_loader` handed out may have been put in another order before the forward, out of sight:
`p = torch.randperm(len(x)); F.cross_entropy(model(x[p]), y[p])`. In sight is only `y[p]`. So labels picked by an index
that was there before the forward are taken to lie in the samples' order, with a warning, unless something tells that
they do not: the same labels meet the outputs in another order too, or the index was made after the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..utils.pytree import tensors_in
from . import operator_table, tensor_notes
from .batch_positions import is_drawn_by_sample, made_in_sight
from .calls import Call
from .index_kinds import permutes
from .inputs import mark_of
from .layout import Layout, tag, tag_of
from .loss_ops import LOSSES, class_weights
from .own_numbers import OWN_NUMBERS
from .tensor_notes import is_of_model, release

UNKNOWN_ORDER = (
    "the loss takes labels in an order given by an index that was made before the forward. They are taken to belong to "
    "the model's inputs, row by row, as they do where the same index has picked both; if it has not, the loss gives "
    "one sample's labels to another's output, which clipping does not bound. Let fastdp.poisson_loader hand out the "
    "batch, which lets fastdp see it, or pick the labels before the forward; fastdp.verify checks a loss."
)
TWO_ORDERS = (
    "the same labels meet the model's outputs in their own order and in another, so one sample's labels meet another's "
    "output"
)


# which arguments of a function may be labels, by its name; of several kinds the last counts
_KINDS = {
    **dict.fromkeys(operator_table.INDEXED_BY_LABELS, "index"),
    "einsum": "einsum",
    "gather": "gather",
    **dict.fromkeys(operator_table.MULTIPLIED_BY_LABELS, "product"),
    **dict.fromkeys(operator_table.RESHAPING_LABELS | operator_table.COMBINING_LABELS, "all"),
    **dict.fromkeys(operator_table.ELEMENTWISE | operator_table.PAIRED_WITH_LABELS, "all"),
    **dict.fromkeys(("masked_select", "tolist", "numpy"), "all"),
    **dict.fromkeys(operator_table.TAKING_ROWS, "rows"),
}


@functools.lru_cache(maxsize=1024)
def _kind(func: Any) -> str:
    """Which arguments of a function may be labels."""
    of_losses = "ctc" if func is torch.nn.functional.ctc_loss else "loss" if func in LOSSES else ""
    return _KINDS.get(operator_table.function_name(func), of_losses)


_ONE_BY_ONE = operator_table.CASTING | operator_table.ELEMENTWISE


class Origin(NamedTuple):
    """roots: the labels (by id) that a tensor is made of; order: how their rows were picked; moment: in which batch."""

    roots: frozenset[int]
    order: Tensor | None
    moment: int


class Labels:
    """What one batch's loss takes for labels."""

    def __init__(self, batch: int, moment: int) -> None:
        self.batch, self.moment = batch, moment
        self.unknown_order = self.two_orders = False
        self.paused = 0  # forwards of the model itself that are on
        self._own: dict[int, tuple[Tensor, int]] = {}  # by id: of lists, with the sample whose data they met
        self._met: dict[int, Tensor | None] = {}  # the order in which labels (by id) met the outputs

    # ------------------------------------------------------------------ what is taken for labels

    def presume(self, call: Call, whole: bool = False) -> None:
        """Tensors of unseen origin with a row for each sample are taken for labels, beside the model's outputs.

        whole: wherever they stand, as parameters do in this call: by their numbers a parameter's rows may be picked.
        """
        for tensor in call.tensors:
            note = tensor.__dict__.get(tensor_notes.PRESUMED)
            if note is not None and note != (self.moment, tensor_notes.version_of(tensor)):
                del tensor.__dict__[tensor_notes.PRESUMED]
                # (else what was written to them stands)
                if note[1] == tensor_notes.version_of(tensor) or (note[0] != self.moment and _is_copy(tensor)):
                    tag(tensor, None)  # the same labels again, in another step
        weights = class_weights(call)
        if isinstance(weights, Tensor) and weights.is_floating_point() and id(weights) not in self._met:
            origin = self._origin(weights)
            if origin is not None and origin.roots == {id(weights)} and origin.order is None:
                self._take_back(weights)  # there are as many classes as samples
        known = [tag_of(tensor, self.batch) for tensor in call.tensors if tensor.dim()]
        weighs = any(layout is not None and layout.total for layout in known)  # sums of several losses, of columns
        if call.name in _ONE_BY_ONE and not any(tag_of(tensor, self.batch) is not None for tensor in call.tensors):
            return  # what becomes of them may be labels, or one sample's of a list
        # what the loop has drawn becomes a sample's own beside its data, or by a sum over all draws
        beside = call.name not in operator_table.RESHAPING_LABELS and any(layout is not None for layout in known)
        drawn = beside or call.name in operator_table.COMBINING_LABELS
        owners = {layout.alone for tensor in call.tensors if (layout := tag_of(tensor, self.batch)) is not None}
        for tensor in () if self.paused or weighs else call.tensors if whole else self._candidates(call):
            if tensor is weights or not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter):
                continue
            if not tensor.requires_grad and not self._is_own(tensor, owners):
                self._presume(tensor, drawn)

    def _candidates(self, call: Call) -> Iterable[Any]:
        kind, (args, kwargs) = _kind(call.func), call.given
        if kind == "all":
            return (*args, *kwargs.values()) if kwargs else args
        if kind == "rows":
            known = [t for t in tensors_in(args[1:]) if tag_of(t, self.batch) is not None]
            if isinstance(args[0], Tensor) and tag_of(args[0], self.batch) is not None:  # of columns, by labels
                index = args[1] if len(args) > 1 and isinstance(args[1], tuple) else ()
                return [t for t in tensors_in(index[1:]) if t.dtype in (torch.int64, torch.int32)]
            if isinstance(args[0], Tensor) and is_of_model(args[0]):  # detached prototypes, by labels
                return [t for t in tensors_in(args[1:]) if t.dtype in (torch.int64, torch.int32)]
            return args[:1] if all(t.dtype == torch.bool and t.dim() for t in known) else ()  # else a table, maybe
        if kind == "product":  # a second matrix is multiplied row by row: by no sample's
            return [*args[:1], *(t for t in args[1:2] if isinstance(t, Tensor) and t.dim() > 2)]
        if kind == "einsum":
            return _kept_in_product(args)
        if kind == "gather":  # along the first dimension from a table, by labels
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            found = (*args, *kwargs.values())
            return found if dim != 0 else [t for t in found if isinstance(t, Tensor) and not t.is_floating_point()]
        if kind == "index":
            return [t for t in call.tensors if t.dtype in (torch.int64, torch.int32)]
        if kind == "ctc":
            return [t for t in (*args, *kwargs.values()) if t is not _packed_targets(args, kwargs)]
        if kind == "loss":
            return (*args, *[value for key, value in kwargs.items() if key not in ("weight", "pos_weight")])
        return ()

    def _is_own(self, tensor: Tensor, owners: set[int]) -> bool:
        """Whether a tensor beside a single sample's data is of a list with one for each: it meets no other's."""
        if len(owners) != 1 or not tensor.dim() or made_in_sight(tensor) or tag_of(tensor, self.batch) is not None:
            return False
        sample = next(iter(owners))
        if sample < 0 or self._own.setdefault(id(tensor), (tensor, sample))[1] != sample:
            return False
        if tensor_notes.LISTED in tensor.__dict__ or len({owner for _, owner in self._own.values()}) > 1:
            OWN_NUMBERS.of(Layout(self.batch))  # each may have an item of its own, or none
        return True

    def _presume(self, tensor: Tensor, drawn: bool) -> None:
        if (
            not tensor.dim()
            or tensor_notes.WRITTEN_DOWN in tensor.__dict__
            or tensor_notes.LISTED in tensor.__dict__
            or tensor.is_sparse
            or tensor.is_nested
            or hasattr(tensor_notes.storage_of(tensor), tensor_notes.FILLED)
            or tag_of(tensor, self.batch) is not None
            or any(mark.owner is None for t in (tensor, tensor._base) if t is not None and (mark := mark_of(t)))
        ):
            return
        first = tensor.__dict__.setdefault(tensor_notes.SEEN_WITH, self.batch)
        constant = made_in_sight(tensor) and not (drawn and is_drawn_by_sample(tensor))
        if tensor.size(0) == self.batch == first and not constant and not is_of_model(tensor):
            tensor.__dict__[tensor_notes.PRESUMED] = (self.moment, tensor_notes.version_of(tensor))
            tag(tensor, Layout(self.batch))
            tensor.__dict__[tensor_notes.LABELS] = Origin(frozenset((id(tensor),)), None, self.moment)

    # ------------------------------------------------------------------ in which order

    def before(self, call: Call) -> Origin | None:
        """Before a call: what its results are of, if they are made of labels alone."""
        given = call.tensors
        found = [(t, note) for t in given if (note := t.__dict__.get(tensor_notes.LABELS)) is not None]
        if found and (len(found) > 1 or len(given) > 1 or found[0][1].moment != self.moment):
            found = [(tensor, origin) for tensor, _ in found if (origin := self._origin(tensor)) is not None]
            if found and call.name in operator_table.LOOKING_UP and self._is_table(call):
                found = [(tensor, origin) for tensor, origin in found if tensor_notes.LABELS in tensor.__dict__]
        if not found:
            return None
        first = found[0][1]
        if len(found) == len(given) == 1:
            return first
        mine = {id(tensor) for tensor, _ in found}
        others = [
            (tensor, layout)
            for tensor in given
            if id(tensor) not in mine and (layout := tag_of(tensor, self.batch)) is not None
        ]
        if others:
            self._meet(found, others)
            return None
        if not all(_same(origin.order, first.order) for _, origin in found):
            for tensor, origin in found:
                self._place(tensor, origin)
            return None
        if all(origin is first for _, origin in found):
            return first
        return first._replace(roots=frozenset().union(*(origin.roots for _, origin in found)))

    def after(self, origin: Origin, call: Call) -> None:
        """After a call on labels alone, whose results have their layouts."""
        (args, _), out = call.given, call.out
        order = self._order(call) if call.name in operator_table.PICKING_ROWS else None
        if order is not None and not any(made_in_sight(tensor) for tensor in tensors_in(args[1:])):
            before = tag_of(args[0], self.batch)
            if before == Layout(self.batch):
                tag(out, before)
                order = order if origin.order is None else origin.order[order]
                origin = origin._replace(order=order)
        for tensor in call.results():
            tensor.__dict__[tensor_notes.LABELS] = origin

    def _is_table(self, call: Call) -> bool:
        """Whether numbers that were taken for labels, as there are as many, are a table that labels look up in."""
        number, (args, _) = int(call.name == "embedding"), call.given
        table = args[number] if len(args) > number else None
        if not isinstance(table, Tensor) or not table.is_floating_point() or (origin := self._origin(table)) is None:
            return False
        indices = [t for t in call.tensors if t is not table and t.dtype != torch.bool]  # a mask looks nothing up
        known = [layout for t in indices if (layout := tag_of(t, self.batch)) is not None]
        layout = tag_of(table, self.batch)
        if not known or any(found.mixed or found.is_row_index for found in known) or layout is None or layout.mixed:
            return False
        if origin.order is not None or any(root in self._met for root in origin.roots):
            return False
        self._take_back(table)
        return True

    def _take_back(self, table: Tensor) -> None:
        """These numbers are no labels after all."""
        for tensor in (table, table._base):
            if tensor is not None and tensor_notes.LABELS in tensor.__dict__:
                release(tensor)
                tag(tensor, None)
                del tensor.__dict__[tensor_notes.LABELS]

    def _origin(self, tensor: Tensor) -> Origin | None:
        origin: Origin | None = tensor.__dict__.get(tensor_notes.LABELS)
        if origin is None or origin.moment != self.moment or tag_of(tensor, self.batch) is None:
            return None
        return origin

    def _order(self, call: Call) -> Tensor | None:
        """The index by which a call puts all rows of its first argument in another order."""
        args, _ = call.given
        index = args[-1] if call.name == "index_select" or len(args) == 2 else None
        if call.name == "index_select" and args[1:2] != (0,):
            return None
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, list) and len(index) == self.batch and all(type(item) is int for item in index):
            index = torch.tensor(index)
        if not isinstance(index, Tensor) or index.dim() != 1 or index.is_floating_point():
            return None
        if tag_of(index, self.batch) is not None or not permutes(index, self.batch):
            return None
        index = index.detach()
        return None if torch.equal(index, torch.arange(self.batch, device=index.device)) else index

    def _meet(self, found: list[tuple[Tensor, Origin]], others: list[tuple[Tensor, Layout]]) -> None:
        """Labels meet data: of an order of its own, or the samples'."""
        for tensor, origin in found:
            order = origin.order
            if order is not None and any(
                layout.owner is not None and _same(order, layout.owner) for _, layout in others
            ):
                self._place(tensor, origin)
                continue
            known = [self._met[root] for root in origin.roots if root in self._met]
            if any(not _same(order, other) for other in known):
                self.two_orders = True
                self._place(tensor, origin)
            elif any(other.requires_grad for other, _ in others):
                self._met.update(dict.fromkeys(origin.roots, order))
            self.unknown_order = self.unknown_order or order is not None

    def _place(self, tensor: Tensor, origin: Origin) -> None:
        """Take labels in an order for what they are in sight: rows of the samples in that order."""
        layout = tag_of(tensor, self.batch)
        if origin.order is not None and layout is not None and layout.plain and layout.dim < tensor.dim():
            tag(tensor, layout.taken(layout.dim, origin.order))
        tensor.__dict__.pop(tensor_notes.LABELS, None)


def _is_copy(tensor: Tensor) -> bool:
    """Whether the notes on labels are another tensor's, of which this is a copy (by `copy`, out of sight)."""
    origin: Origin | None = tensor.__dict__.get(tensor_notes.LABELS)
    return origin is not None and id(tensor) not in origin.roots


def _kept_in_product(args: tuple[Any, ...]) -> list[Tensor]:
    """The operands of an einsum whose first dimension the result has, or all do that have it."""
    equation, operands = args[0], tensors_in(args[1:])
    if not isinstance(equation, str):
        return []
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    result = result if arrow else "".join(letter for letter in inputs if inputs.count(letter) == 1)
    terms = inputs.split(",")
    kept = [t[:1] in result or t.startswith("...") or all(t[:1] not in each[1:] for each in terms) for t in terms]
    return [tensor for tensor, keeps in zip(operands, kept, strict=False) if keeps]


def _packed_targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The targets of ctc_loss, where those of all samples are in one row."""
    targets = args[1] if len(args) > 1 else kwargs.get("targets")
    return targets if isinstance(targets, Tensor) and targets.dim() == 1 else None


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other.to(one.device)))
