"""Uses by rows of many samples in any order, of one matrix or of a stack of matrices (experts).

With e_t the matrix of row t, the gradient of sample b with respect to matrix e is the sum of g_t a_t^T over its rows
with e_t = e. Gradients of different matrices share no element, so the squared norm is a sum over matrices of the
norms of ordinary matrix products with few rows; no gradient is stored, and no row is padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..batch_axis import tensor_notes
from ..batch_axis.calls import Call, bind
from ..batch_axis.deferred_checks import DeferredCheck, doubt
from ..batch_axis.layout import Layout, spread, tag_of
from ..batch_axis.operator_table import spellings
from ..batch_axis.propagate import layouts_of
from ..batch_axis.row_groups import Groups
from ..errors import SampleMixingError
from ..ops.bounds import enlarged
from ..ops.common import accumulate, sum_over
from .captured_call import Captured, Context, capture
from .cost_model import Segments, Shape
from .forward_pass import ForwardPass, stored_if_planned
from .parameter_links import link_of
from .parameter_use import ParameterUse, Stored
from .rules import Rule, attributed, by_sample, sample_layout, use_rule


class Routed(ParameterUse):
    """Rows a [S,I] with output gradients g [S,O] used matrix ids[s] of the operand [E,O,I], on behalf of owner[s].

    An operand [O,I] is the only matrix. Rows without a matrix (id out of range) have no gradient. Rows are kept in the
    order of (id, owner), which makes the sums of a matrix, and the norms of a sample in it, products of neighbours.
    """

    route = "routed"
    overwrites = True

    def __init__(
        self, operand: Tensor, a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, batch: int, name: str
    ) -> None:
        super().__init__(operand, batch, name)
        self.experts = operand.size(0) if operand.dim() == 3 else 1
        _, order = ops.routed.order_of(ids, owner, self.experts, batch)
        if order is not None:
            a, g, ids, owner = a[order], g[order], ids[order], owner[order]
        self.a, self.g, self.ids, self.owner = a, g, ids, owner

    def concat(self, others: Sequence[Any], name: str) -> ParameterUse:
        uses = [self, *others]
        a, g = (
            torch.cat([accumulate(side) for side in sides]) for sides in zip(*((u.a, u.g) for u in uses), strict=True)
        )
        ids, owner = torch.cat([use.ids for use in uses]), torch.cat([use.owner for use in uses])
        return Routed(self.operand, a, g, ids, owner, self.batch, name)

    def stack(self, others: Sequence[Any]) -> ParameterUse:
        uses = [self, *others]
        batch = sum(use.batch for use in uses)
        first = itertools.accumulate([use.batch for use in uses], initial=0)
        each = [
            Routed(u.operand, u.a, u.g, u.ids, u.owner + start, batch, u.name)
            for u, start in zip(uses, first, strict=False)
        ]
        return each[0].concat(each[1:], self.name)

    def regroup(self, groups: Groups) -> ParameterUse:
        owner = groups.owner(self.owner.device)[self.owner]
        return Routed(self.operand, self.a, self.g, self.ids, owner, groups.count, self.name)

    def transposed(self, operand: Tensor) -> Routed:
        return Routed(operand, self.g, self.a, self.ids, self.owner, self.batch, self.name)

    def segments(self) -> Segments:
        keys = torch.where(self.ids < 0, self.experts, self.ids) * self.batch + self.owner
        starts = torch.searchsorted(keys, torch.arange(self.experts * self.batch + 1, device=keys.device))
        return Segments(starts.diff(), self.experts, self.a.size(1), self.g.size(1))

    def norm_sq(self) -> Tensor:
        rows = (self.a, self.g, self.ids, self.owner)
        return enlarged(ops.routed_norm_sq(*rows, self.experts, self.batch, dtype=torch.float64), self.rounding())

    def rounding(self) -> Tensor | None:
        return ops.routed.rounding(self.a, self.g, self.ids, self.owner, self.experts, self.batch)

    def per_sample(self, low: int, high: int) -> Tensor:
        ids, owner = self.ids, self.owner
        if low > 0 or high < self.batch:  # rows of other samples are rows of no matrix
            ids = torch.where((owner < low) | (owner >= high), -1, ids)
            owner = (owner - low).clamp(0, max(high - low - 1, 0))
        found = ops.routed_per_sample(self.a, self.g, ids, owner, self.experts, high - low)
        return found.view(-1, *self.operand.shape)

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        rows = (self.a, self.g, self.ids, self.owner, factors)
        own = self.a.device.type in ops.registry.OPERATORS["routed_clipped_sum"].own
        if into is not None and not own and self.a.dtype != torch.float64 and into.is_contiguous():
            ops.routed.overwrite_routed_sum(*rows, into.view(self.experts, *into.shape[-2:]))
            return into
        return ops.routed_clipped_sum(*rows, self.experts).view(self.operand.shape)


def record_routed(forward_pass: ForwardPass, operand: Tensor, a: Tensor, g: Tensor, ids: Tensor, owner: Tensor,
                  name: str) -> None:  # fmt: skip
    """Record a use of the stack `operand` [E,I,O] by rows a [S,I] with output gradients g [S,O]."""
    link = link_of(operand)
    if link is not None and link.isometric and len(link.leaves) == 1:
        leaf = link.leaves[0]
        swapped = operand.mT
        same = leaf.data_ptr() == operand.data_ptr() and leaf.dtype == operand.dtype and leaf.shape == swapped.shape
        if same and leaf.stride() == swapped.stride():
            forward_pass.record(Routed(leaf, a, g, ids, owner, forward_pass.batch, name))
            return
    forward_pass.record(Routed(operand, g, a, ids, owner, forward_pass.batch, name))


def owners_below(layout: Layout, data: Tensor) -> Tensor:
    """Sample of each of `rows_of(data)`."""
    below = data.numel() // max(data.size(-1) * layout.rows, 1)
    return layout.owners(data.device).to(data.device).repeat_interleave(below)


def rows_of(tensor: Tensor, layout: Layout) -> Tensor:
    """Rows of data whose samples lie in any order along layout.dim: [S, ..., n] -> [S', n]."""
    return tensor.movedim(layout.dim, 0).reshape(-1, tensor.size(-1))


def use_of_rows(
    forward_pass: ForwardPass, operand: Tensor, a: Tensor, g: Tensor, layout: Layout, name: str
) -> ParameterUse:
    """The use of an operand [O,I] by data a [..., I] with output gradients g [..., O], rows in any order.

    Stored, where the planner says so for samples of an average number of rows.
    """
    if not operand.numel():  # a projection to no dimension (nn.AdaptiveLogSoftmaxWithLoss of few)
        return Stored(operand, operand.new_zeros(forward_pass.batch, *operand.shape), name)
    owner = owners_below(layout, g)
    a, g = rows_of(a, layout), rows_of(g, layout)
    use: ParameterUse = forward_pass.regrouped(
        Routed(operand, a, g, torch.zeros_like(owner), owner, forward_pass.batch, name)
    )
    shape = Shape("linear", use.batch, -(-a.size(0) // use.batch), a.size(1), g.size(1))
    return stored_if_planned(forward_pass, use, shape, a, g)


def row_sum(g: Tensor, layout: Layout) -> Tensor:
    """Output gradients [..., O], rows in any order -> their sums by sample [B,O] in float32."""
    if g.device.type != "cpu":  # there index_add adds in any order: not the same bits each time
        return sum_over(by_sample(g, layout).flatten(1, -2), 1)
    rows = accumulate(rows_of(g, layout))
    return rows.new_zeros(layout.batch, rows.size(1)).index_add_(0, owners_below(layout, g), rows)


class _GroupedProduct(Captured):
    """Rows x [S,I] times the matrices of a stack [E,I,O]; group e ends before row ends[e]."""

    def __init__(self, forward_pass: ForwardPass, layout: Layout, func: Any, options: dict[str, Any]) -> None:
        super().__init__(forward_pass, "grouped_mm", layout)
        self.func, self.options = func, options

    def run(self, ctx: Context, *data: Tensor) -> Any:
        stack, ends = ctx.values
        return self.func(data[0], stack, offs=ends, **self.options)

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        if ctx.doubt is not None:
            doubt(*ctx.doubt[:3])
        x, g = saved[0], grads[0]
        rows = torch.arange(x.size(0), device=x.device)
        ids = torch.searchsorted(ctx.values[1].long(), rows, right=True)
        record_routed(ctx.forward_pass, ctx.operands[0], x, g, ids, owners_of(self.layout, x), self.name)


def owners_of(layout: Layout, rows: Tensor) -> Tensor:
    """Sample of each row, also in a batch of one."""
    if layout.batch == 1:
        return torch.zeros(rows.size(0), dtype=torch.long, device=rows.device)
    return layout.owners(rows.device).to(rows.device)


@use_rule(*spellings("grouped_mm", "_grouped_mm"))
def capture_grouped_mm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of data [S,I], in groups, times a stack of operands [E,I,O]."""
    x, stack, ends = bind(args, {**kwargs, "offs": kwargs.get("offs")}, "input", "mat2", "offs")
    options = {name: value for name, value in kwargs.items() if name in ("out_dtype",) and value is not None}
    if x is None or stack is None or ends is None or kwargs.get("bias") is not None or len(args) > 3:
        return NotImplemented
    if forward_pass.is_parameter(x) or not forward_pass.is_parameter(stack) or x.dim() != 2 or stack.dim() != 3:
        return NotImplemented
    layout = sample_layout(forward_pass, x, "grouped_mm")
    ctx = Context(forward_pass, stack, ends)
    if layout.batch > 1:
        ctx.doubt = _check_groups(forward_pass, layout, ends)
    return capture(_GroupedProduct(forward_pass, layout, func, options), ctx, x)


def _check_groups(forward_pass: ForwardPass, layout: Layout, ends: Tensor) -> DeferredCheck | None:
    """Rows in dimension 0; ends that depend on the batch must be those of the groups in which the rows came: on a
    device that is asked later."""
    place, apart = forward_pass.place("grouped_mm"), None
    problem = "sums over the batch" if layout.dim != 0 else ""
    if not problem and tag_of(ends, forward_pass.batch) is not None:
        problem = "divides rows into groups by what other samples hold"
        if layout.order is not None:
            apart = _cuts_groups(layout.order, ends)
            if apart.device.type == "cpu" and not bool(apart):
                return None
    if not problem:
        return None
    message = f"{place}: {problem}. Sort the rows by the number of their own expert."
    if apart is None or apart.device.type == "cpu":
        raise SampleMixingError(message, f"{place} {problem}")
    return DeferredCheck(apart, f"{place} {problem}", message)


def _cuts_groups(order: Tensor, ends: Tensor) -> Tensor:
    """Whether one of the ends lies within rows [n] of equal order, as a tensor: true or false."""
    if not order.numel():
        return torch.zeros((), dtype=torch.bool)
    inside = (ends > 0) & (ends < order.numel())
    place = torch.where(inside, ends, 1).long().clamp(max=order.numel() - 1)
    return (inside & (order[place] == order[(place - 1).clamp(min=0)])).any()


class Gathered(NamedTuple):
    """Note on a result of `operand[ids]`: the rows of a stack of matrices, one for each token."""

    operand: Tensor
    ids: Tensor
    version: int  # of the result: another says that it was written to


def note_gathered(result: Tensor, operand: Tensor, ids: Tensor) -> None:
    """Let products with the result know what it is made of."""
    if operand.dim() == 3:
        result.__dict__[tensor_notes.GATHERED] = Gathered(operand, ids, result._version)


def gathered_of(tensor: Any) -> tuple[Gathered, bool] | None:
    """What a tensor was gathered from, and whether its matrices are transposed."""
    if not isinstance(tensor, Tensor):
        return None
    note = tensor.__dict__.get(tensor_notes.GATHERED)
    if note is not None:
        return (note, False) if note.version == tensor._version else None
    base = tensor._base if tensor._is_view() else None
    note = None if base is None else base.__dict__.get(tensor_notes.GATHERED)
    if base is None or note is None or note.version != tensor._version:
        return None
    flipped = base.mT
    same = flipped.shape == tensor.shape and flipped.stride() == tensor.stride()
    return (note, True) if same and tensor.storage_offset() == base.storage_offset() else None


class _GatheredProduct(Captured):
    """M @ X or X @ M with M [..., P, Q] gathered: the matrix of token n gets sum_r of its rows' products."""

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout, flipped: bool, left: bool) -> None:
        super().__init__(forward_pass, name, layout)
        self.flipped, self.left = flipped, left

    def run(self, ctx: Context, *data: Tensor) -> Tensor:
        matrices = ctx.values[1]
        return torch.matmul(matrices, data[0]) if self.left else torch.matmul(data[0], matrices)

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        (x, ids), g = saved, grads[0]
        outer = g.shape[:-2]
        rows, outs = (x.mT, g.mT) if self.left else (g, x)  # [..., R, Q] and [..., R, P]
        rows = rows.expand(*outer, *rows.shape[-2:])
        outs = outs.expand(*outer, *outs.shape[-2:])
        each = rows.size(-2)
        owner = torch.zeros(outer, dtype=torch.long, device=g.device)
        if self.batch > 1:
            owner = spread(self.layout.owners(g.device), self.layout.dim, outer)
        stack = ctx.operands[0].size(0)
        ids = torch.where(ids < 0, ids + stack, ids).expand(outer)
        rows, outs = (t.reshape(-1, t.size(-1)) for t in (rows, outs))
        a, o = (outs, rows) if self.flipped else (rows, outs)
        ids, owner = (t.reshape(-1).repeat_interleave(each) for t in (ids, owner))
        ctx.forward_pass.record(Routed(ctx.operands[0], a, o, ids, owner, self.batch, self.name))


def capture_gathered(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product with gathered matrices: the rows are kept, and no matrix for each token."""
    pair = args[::-1] if func is torch.Tensor.__rmatmul__ else args
    if kwargs or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        return NotImplemented
    gathered = [gathered_of(tensor) for tensor in pair]
    side = 0 if gathered[0] is not None else 1
    found, x = gathered[side], pair[1 - side]
    if found is None or gathered[1 - side] is not None or x.dim() != pair[side].dim() or not forward_pass.is_data(x):
        return NotImplemented
    note, flipped = found
    shadow = pair[side].detach()
    with torch.no_grad():
        probe = torch.matmul(shadow, x) if side == 0 else torch.matmul(x, shadow)
    product = Call(torch.matmul, tuple(pair), {}, forward_pass.batch, forward_pass.path, probe)
    layout = attributed(forward_pass, probe, layouts_of(product)[0][1], func.__name__)
    if layout.batch > 1 and layout.dim >= probe.dim() - 2:
        return NotImplemented
    call = _GatheredProduct(forward_pass, func.__name__, layout, flipped, side == 0)
    return capture(call, Context(forward_pass, note.operand, shadow), x, note.ids)


PRODUCTS: dict[Any, Rule] = dict.fromkeys(
    (torch.bmm, torch.Tensor.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
     torch.Tensor.__rmatmul__), capture_gathered,
)  # fmt: skip
