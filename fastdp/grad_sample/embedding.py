"""Table look-ups: F.embedding, F.embedding_bag, a parameter indexed by data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..batch_axis import tensor_notes
from ..batch_axis.calls import Call, bind
from ..batch_axis.layout import Layout, tag, tag_of
from ..errors import SampleMixingError
from ..ops.bounds import enlarged, is_small, of_repeats, of_rows
from .captured_call import Captured, Context, capture
from .forward_pass import ForwardPass
from .generic import capture_whole
from .parameter_links import check_embedding, mark_derived
from .parameter_use import Positioned
from .routed_rows import note_gathered
from .rules import by_sample, sample_layout, use_rule


class Lookup(Positioned):
    """Rows `ids` [B,K] of a table were used, with output gradients `g` [B,K,d]; the table is [V, *row]."""

    route = "segments"
    overwrites = True

    def __init__(self, operand: Tensor, ids: Tensor, g: Tensor, name: str) -> None:
        super().__init__(operand, ids.size(0), name)
        self.ids, self.g = ids, g

    @classmethod
    def rows(cls, operand: Tensor, ids: Tensor, grads: Tensor, name: str) -> Lookup:
        """ids [B, ...], grads [B, ..., *row]."""
        batch = ids.size(0)
        ids = ids.reshape(batch, -1).long()
        ids = torch.where(ids < 0, ids + operand.size(0), ids)
        width = max(1, operand[0].numel()) if operand.size(0) else 1
        return cls(operand, ids, grads.reshape(batch, ids.size(1), width), name)

    def sides(self) -> tuple[Tensor, Tensor]:
        return self.ids, self.g

    def of(self, first: Tensor, second: Tensor, name: str) -> Lookup:
        return Lookup(self.operand, first, second, name)

    def norm_sq(self) -> Tensor:
        found = ops.embedding_norm_sq(self.ids, self.g, dtype=torch.float64)
        if found.device.type == "cpu" and is_small(found, of_rows(self.g)):  # no need to look for equal ids
            return found
        return enlarged(found, self.rounding())

    def rounding(self) -> Tensor | None:
        return of_repeats(self.ids, self.g)

    def per_sample(self, low: int, high: int) -> Tensor:
        rows = ops.embedding_per_sample(self.ids[low:high], self.g[low:high], self.operand.size(0))
        return rows.view(high - low, *self.operand.shape)

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        if into is not None and self.g.dtype != torch.float64 and into.is_contiguous():
            ops.embedding_clipped_sum(
                self.ids, self.g, factors, self.operand.size(0), out=into.zero_().view(self.operand.size(0), -1)
            )
            return into
        found = ops.embedding_clipped_sum(self.ids, self.g, factors, self.operand.size(0))
        return found if found.shape == self.operand.shape else found.view(self.operand.shape)


class _Embedding(Captured):
    """Rows of a table, by ids; those at `padding_idx` have no gradient."""

    by_shapes = True

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout, padding_idx: int | None = None) -> None:
        super().__init__(forward_pass, name, layout)
        self.padding_idx = padding_idx

    def run(self, ctx: Context, *data: Tensor) -> Any:
        return F.embedding(data[0], ctx.values[0])

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        ids, g = by_sample(saved[0], self.layout), by_sample(grads[0], self.layout)
        if self.padding_idx is not None:
            g = torch.where((ids == self.padding_idx).unsqueeze(-1), torch.zeros((), dtype=g.dtype, device=g.device), g)
        ctx.forward_pass.record(Lookup.rows(ctx.operands[0], ids, g, self.name))


@use_rule(F.embedding)
def capture_embedding(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.embedding(ids, table); options that couple samples are refused."""
    ids, table, padding_idx = bind(args, kwargs, "input", "weight", "padding_idx")
    if forward_pass.is_parameter(ids) or not forward_pass.is_parameter(table):
        return NotImplemented
    check_embedding(forward_pass, args, kwargs)
    layout = sample_layout(forward_pass, ids, "embedding")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += table.size(0)
    return capture(_Embedding(forward_pass, "embedding", layout, padding_idx), Context(forward_pass, table), ids)


@use_rule(torch.Tensor.__getitem__)
def capture_getitem(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """table[ids] with ids from the data (relative position tables)."""
    table, index = args
    chosen = _without_choices(forward_pass, table, index)
    if chosen is not None:
        out = func(table, chosen)
        mark_derived(Call(func, (table, chosen), {}, forward_pass.batch, out=out), forward_pass, [table])
        return out
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if not forward_pass.is_parameter(table) or forward_pass.is_parameter(index):
        return NotImplemented
    layout = sample_layout(forward_pass, index, "__getitem__")
    out = capture(_RowIndex(forward_pass, "__getitem__", layout), Context(forward_pass, table), index)
    note_gathered(out, table, index)
    return out


def _without_choices(forward_pass: ForwardPass, table: Tensor, index: Any) -> Any:
    """An index made of choices that occur in the batch alone (the experts that got any token), as constants.

    None if there is anything else among it. The choices say which parts of the table are computed with; what each
    sample does with a part is its own.
    """
    items = index if isinstance(index, tuple) else (index,)
    found: list[Any] = []
    chosen = False
    for item in items:
        layout = tag_of(item, forward_pass.batch) if isinstance(item, Tensor) else None
        if layout is None:
            found.append(item)
            continue
        if item.dtype not in (torch.int64, torch.int32) or not layout.mixed or not layout.is_row_index:
            return None
        found.append(int(item) if item.dim() == 0 else item.detach().clone())
        chosen = True
    if not chosen or not forward_pass.is_parameter(table):
        return None
    for item in found:
        if isinstance(item, Tensor):
            tag(item, None)
    return tuple(found) if isinstance(index, tuple) else found[0]


class _RowIndex(_Embedding):
    by_shapes = False  # what was gathered is noted on the result

    def run(self, ctx: Context, *data: Tensor) -> Any:
        return ctx.values[0][data[0]]


class _Bag(Captured):
    """embedding_bag with sum or mean: every element of a bag has the bag's gradient times its weight."""

    def __init__(self, forward_pass: ForwardPass, bags: Layout, options: dict[str, Any]) -> None:
        super().__init__(forward_pass, "embedding_bag", bags)
        self.options = options

    def run(self, ctx: Context, *data: Tensor) -> Tensor:
        weights = data[1] if len(data) > 1 else None
        return F.embedding_bag(data[0], ctx.values[0], per_sample_weights=weights, **self.options)

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        ids, g = saved[0], grads[0]
        if ids.dim() == 2:
            bag = torch.arange(g.size(0), device=ids.device).repeat_interleave(ids.size(1))
        else:
            bag = _bags_of_elements(ids, self.options["offsets"], g.size(0))
        flat = ids.flatten()
        live = torch.ones_like(flat, dtype=torch.bool)
        if self.options["padding_idx"] is not None:
            live = flat != self.options["padding_idx"] % ctx.values[0].size(0)
        scale = live.to(g.dtype)
        if self.options["mode"] == "mean":
            count = torch.zeros(g.size(0), dtype=g.dtype, device=g.device).index_add_(0, bag, scale)
            scale = scale / count[bag].clamp(min=1)
        if len(saved) > 1:
            scale = scale * saved[1].flatten()
        rows = torch.where(
            live.unsqueeze(1), g[bag] * scale.unsqueeze(1), torch.zeros((), dtype=g.dtype, device=g.device)
        )
        layout = Layout(self.batch, 0, owner=self.layout.owners(g.device)[bag])
        use = Lookup.rows(ctx.operands[0], by_sample(flat, layout), by_sample(rows, layout), self.name)
        ctx.forward_pass.record(use)


def _bags_of_elements(ids: Tensor, offsets: Tensor, bags: int) -> Tensor:
    """The bag of each of the flat ids; an empty bag begins where the next one does."""
    return torch.searchsorted(offsets[:bags].contiguous(), torch.arange(ids.numel(), device=ids.device), right=True) - 1


def _check_bags(forward_pass: ForwardPass, ids: Tensor, offsets: Tensor, bags: Layout) -> None:
    """Where the model itself made ids of samples' rows, each must lie in a bag of its own sample."""
    layout = tag_of(ids, forward_pass.batch)
    if layout is None or layout.batch <= 1 or (tensor_notes.INPUT in ids.__dict__ and layout.owner is None):
        return  # rows of an input are not looked at as samples here: its bags are
    owner = bags.owners(ids.device)[_bags_of_elements(ids, offsets, len(offsets))]
    if layout.mixed or layout.alone >= 0 or not torch.equal(layout.owners(ids.device), owner):
        place = forward_pass.place("embedding_bag")
        raise SampleMixingError(f"{place}: a bag holds rows of several samples.", f"{place} puts samples into one bag")


@use_rule(F.embedding_bag)
def capture_embedding_bag(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sum and mean bags, 2-D ids or offsets, weights per element; max takes the generic rule."""
    names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
             "per_sample_weights", "include_last_offset", "padding_idx")  # fmt: skip
    found = dict(zip(names, bind(args, kwargs, *names), strict=True))
    ids, table, offsets, weights = (found[n] for n in ("input", "weight", "offsets", "per_sample_weights"))
    if not forward_pass.is_parameter(table):
        return NotImplemented
    if weights is not None and forward_pass.is_parameter(weights):  # shared by the samples: each has its own copy
        weights = forward_pass.traced(lambda: weights * (ids * 0 + 1).to(weights.dtype))
    check = (ids, table, None, found["max_norm"], None, found["scale_grad_by_freq"])
    check_embedding(forward_pass, check, {})
    mode = found["mode"] or "mean"
    if mode == "max":
        return capture_whole(forward_pass, func, args, kwargs)
    if offsets is None:
        bags = sample_layout(forward_pass, ids, "embedding_bag")
        if bags.batch > 1 and bags.dim != 0:
            return NotImplemented
    else:
        count = offsets.numel() - bool(found["include_last_offset"])
        if forward_pass.batch > 1 and tag_of(ids, forward_pass.batch) is not None:
            sample_layout(forward_pass, ids, "embedding_bag")
        if count % max(forward_pass.batch, 1):
            return NotImplemented
        bags = Layout(forward_pass.batch, 0, 1, count // max(forward_pass.batch, 1))
    if offsets is not None:
        _check_bags(forward_pass, ids, offsets[:count], bags)
    options = {k: found[k] for k in ("offsets", "padding_idx")}
    options |= {"mode": mode, "include_last_offset": bool(found["include_last_offset"])}
    data = (ids,) if weights is None else (ids, weights)
    return capture(_Bag(forward_pass, bags, options), Context(forward_pass, table), *data)
