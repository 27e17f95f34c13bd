"""Uses by rows of many samples in any order, of one matrix or of a stack of matrices (experts).

With e_t the matrix of row t, the gradient of sample b with respect to matrix e is the sum of g_t a_t^T over its rows
with e_t = e. Gradients of different matrices share no element, so the squared norm is a sum over matrices of the
norms of ordinary matrix products with few rows; no gradient is stored, and no row is padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..batch_axis.layout import Layout
from ..batch_axis.row_groups import Groups
from ..ops.bounds import enlarged
from ..ops.common import accumulate, sum_over
from .cost_model import Segments, Shape
from .forward_pass import ForwardPass
from .parameter_links import link_of
from .parameter_use import ParameterUse, Stored
from .rules import by_sample


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
    if not forward_pass.planner.materialises(shape, forward_pass.planner.adds(a, g), a.device, use.short):
        return use
    return Stored(operand, use.per_sample(0, use.batch), name, shape)


def row_sum(g: Tensor, layout: Layout) -> Tensor:
    """Output gradients [..., O], rows in any order -> their sums by sample [B,O] in float32."""
    if g.device.type != "cpu":  # there index_add adds in any order: not the same bits each time
        return sum_over(by_sample(g, layout).flatten(1, -2), 1)
    rows = accumulate(rows_of(g, layout))
    return rows.new_zeros(layout.batch, rows.size(1)).index_add_(0, owners_below(layout, g), rows)
