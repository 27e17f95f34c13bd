"""Matrix products with a parameter: F.linear, matmul, mm, addmm (HF Conv1D), either operand order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..batch_axis.calls import bind
from ..batch_axis.layout import Layout
from ..batch_axis.row_groups import Groups
from ..ops.bounds import of_products
from ..ops.routed import padded
from .captured_call import FEW, Captured, Context, Given, capture
from .cost_model import Shape
from .forward_pass import ForwardPass, stored_if_planned
from .grouped_kernels import GroupedKernels
from .parameter_use import ParameterUse, Positioned, Stored
from .planner import Planner
from .routed_rows import Routed, row_sum, use_of_rows
from .rules import by_sample, made_of_data, refuse_contraction, sample_layout, use_rule


class Matmul(Positioned):
    """The operand's gradient is g_b^T a_b, with a [B,T,I], g [B,T,O] and operand [O,I]."""

    route = "auto"
    overwrites = True
    # MEASURED on two cores, 24 uses taken together: 8.3 times as fast at 3,072 numbers, 2.7 at 20,480, 1.3 at 81,920,
    # and as fast as one by one from 400,000 on.
    abreast_limit = 1 << 16

    def __init__(self, operand: Tensor, a: Tensor, g: Tensor, name: str) -> None:
        super().__init__(operand, a.size(0), name)
        self.a, self.g = a, g
        self.filled: tuple[Tensor, Tensor] | None = None  # both, one with columns of zeros behind it
        self.bound: Tensor | None = None  # of the rounding, where the norms were taken and told it
        self.shape: Shape = Shape("linear", a.size(0), a.size(1), a.size(2), g.size(2))

    def plan(self, planner: Planner) -> None:
        self.route = planner.norm_route(self.shape, self.a.device, is_short(self.a))
        if planner.memory_budget is None:
            whole = ops.linear.filled_once(self.a, self.g)
            if whole[0] is not self.a or whole[1] is not self.g:  # the copy stays, what it is of goes
                self.filled = whole
                self.a, self.g = (x[..., : own.size(2)] for x, own in zip(whole, self.sides(), strict=True))

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """What kernels are given."""
        return self.filled or (self.a, self.g)

    def sides(self) -> tuple[Tensor, Tensor]:
        return self.a, self.g

    def of(self, first: Tensor, second: Tensor, name: str) -> Matmul:
        return Matmul(self.operand, first, second, name)

    def regroup(self, groups: Groups) -> ParameterUse:
        """Rows of a group one after the other; where groups have unequally many, none is padded."""
        if groups.each:
            return super().regroup(groups)
        a, g = (groups.by_group(side).flatten(0, 1) for side in self.sides())
        owner = torch.repeat_interleave(groups.counts * self.a.size(1)).to(a.device)
        return Routed(self.operand, a, g, torch.zeros_like(owner), owner, groups.count, self.name)

    def transposed(self, operand: Tensor) -> Matmul:
        return Matmul(operand, self.g, self.a, self.name)

    @staticmethod
    def of_rows(use: Routed) -> Matmul:
        """Rows of one matrix in any order as rows by sample, with zeros behind."""
        counts = torch.bincount(use.owner, minlength=use.batch)
        return Matmul(use.operand, padded(use.a, counts), padded(use.g, counts), use.name)

    def alike(self) -> Any:
        if self.operand.dtype == torch.float64 or not by_address(self.a, self.g):
            return super().alike()
        if not self.a.numel() or not self.g.numel():
            return None
        return type(self), self.a.shape, self.g.shape, self.a.dtype, self.g.dtype, self.a.device, self.route

    def abreast(self, others: Sequence[Any]) -> Any:
        return Many([self, *others]) if by_address(self.a, self.g) else super().abreast(others)

    def sums_abreast(self, count: int, factors: Tensor) -> Tensor:
        return ops.linear.clipped_sums(self.a, self.g, factors, count)

    def norm_sq(self) -> Tensor:
        method = "auto" if self.route == "T=1" else self.route
        found, self.bound = ops.linear.norm_sq_and_bound(*self.whole, method)
        return found

    def rounding(self) -> Tensor | None:
        return of_products(self.a, self.g) if self.bound is None else self.bound

    def per_sample(self, low: int, high: int) -> Tensor:
        return ops.linear_per_sample(self.a[low:high], self.g[low:high])

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        if into is not None:
            return ops.linear.overwrite_clipped_sum(self.a, self.g, factors, into)
        return trimmed(ops.linear_clipped_sum(*self.whole, factors), self.operand)


def trimmed(total: Tensor, operand: Tensor) -> Tensor:
    """A sum in the operand's shape, without the rows or columns that are of columns of zeros."""
    if total.numel() == operand.numel():
        return total if total.shape == operand.shape else total.view(operand.shape)
    outputs, inputs = operand.shape
    return total[:outputs, :inputs].contiguous()


def by_address(a: Tensor, g: Tensor) -> bool:
    """Whether kernels find such products where they lie, so that those of equal shape go together whatever their size:
    nothing is copied."""
    return ops.extension.on_device("many", a, g) is not None


class Many(GroupedKernels):
    """Products of equal shape, or convolutions that are such products."""

    def __init__(self, uses: Sequence[Any]) -> None:
        self.operand, self.route = uses[0].operand, uses[0].route
        self._pairs = [use.whole for use in uses]

    def norm_sq(self) -> Tensor:
        return ops.linear.norm_sq_of_many(self._pairs, "auto" if self.route == "T=1" else self.route).flatten()

    def sums_abreast(self, factors: Tensor, last: bool = False) -> list[Tensor]:
        pairs = self._pairs
        if last:
            self._pairs = []
        return [trimmed(total, self.operand) for total in ops.linear.clipped_sums_of_many(pairs, factors, last)]


def use_of_product(forward_pass: ForwardPass, operand: Tensor, a: Tensor, g: Tensor, name: str) -> ParameterUse:
    """The use of an operand [O,I] by a [B,T,I] with output gradient g [B,T,O], stored as the planner says."""
    product = Matmul(operand, a, g, name)
    use, shape = forward_pass.regrouped(product), product.shape
    if use is not product:
        shape = Shape("linear", use.batch, -(-a.size(0) * a.size(1) // max(use.batch, 1)), a.size(2), g.size(2))
    if forward_pass.planner.memory_budget is None and product.is_small:
        return use  # taken together with its like, by fewer calls
    return stored_if_planned(forward_pass, use, shape, a, g)


def in_any_order(layout: Layout, data: Tensor) -> bool:
    """Whether the rows of `data` belong to samples one by one (routed tokens), not in equal blocks."""
    return layout.owner is not None and layout.batch > 1 and layout.dim < data.dim() - 1


def is_short(tensor: Tensor) -> bool:
    """16-bit numbers."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type autocast computes matrix products in here, if it is on."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def computed(x: Tensor) -> Tensor:
    """The data in the type that autocast computes in."""
    cast = autocast_dtype(x)
    return x if cast is None else x.to(cast)


def as_autocast(ctx: Context, x: Tensor) -> Tensor:
    """The data, and the operands, in the type autocast computes in. The first operand is kept for the backward."""
    cast = autocast_dtype(x)
    if cast is not None:
        x = x.to(cast)
        ctx.values = [None if t is None else t.to(cast) for t in ctx.values]
    if ctx.wanted[0]:
        ctx.keep(ctx.values[0])
    return x


class _Product(Captured):
    """Data times an operand matrix, plus a bias; either may be an operand, a constant or (bias) absent."""

    by_shapes = fresh = native = by_rows = True
    flipped = False  # whether the operand is stored [I,O]

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout) -> None:
        super().__init__(forward_pass, name, layout)
        self._one_each = lies_in_order(layout) and layout.inner == 1  # what has three dimensions is [B, T, I]

    def as_computed(self, x: Tensor) -> Tensor:
        return _in_rows(computed(x))

    def saved(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        return (computed(data[0]),) if ctx.learned[0] else ()

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        if in_any_order(self.layout, grads[0]):
            self._back_of_rows(ctx, saved, grads[0])
            return
        self.record_rows(ctx, self.rows(ctx, saved, grads))

    def rows(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sums = (row_sums(steps_by_sample(grads[0], self.layout)),) if ctx.learned[1] else ()
        return (*self._sides(ctx, saved, grads), *sums)

    def together(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Any:
        g = grads[0]
        if not ctx.learned[1] or g.numel() > FEW:  # (it is the bias whose rows are computed)
            return None
        return type(self), tuple(ctx.learned), self.layout, g.shape, g.dtype, g.device

    def rows_together(self, given: Sequence[Given]) -> list[tuple[Tensor, ...]]:
        sums = row_sums(steps_of_all([grads[0] for _, _, grads in given], self.layout))
        rows = sums.unflatten(0, (len(given), -1)).unbind(0)
        return [(*self._sides(*each), row) for each, row in zip(given, rows, strict=True)]

    def _sides(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The weight's rows."""
        if not ctx.learned[0]:
            return ()
        a, g = saved[0], grads[0]
        if not (self._one_each and a.dim() == g.dim() == 3):
            a, g = steps_by_sample(a, self.layout), steps_by_sample(g, self.layout)
        return (g, a) if self.flipped else (a, g)

    def record_rows(self, ctx: Context, rows: tuple[Tensor, ...]) -> None:
        (weight, bias), forward_pass = ctx.operands, ctx.forward_pass
        if ctx.learned[0]:
            forward_pass.record(use_of_product(forward_pass, weight, rows[0], rows[1], self.name))
        if ctx.learned[1]:
            forward_pass.record(Stored(bias, rows[-1], self.name))

    def _back_of_rows(self, ctx: Context, saved: tuple[Tensor, ...], g: Tensor) -> None:
        """Rows of many samples in any order: no padding to the longest sample."""
        (weight, bias), forward_pass = ctx.operands, ctx.forward_pass
        if ctx.learned[0]:
            a, o = (g, saved[0]) if self.flipped else (saved[0], g)
            forward_pass.record(use_of_rows(forward_pass, weight, a, o, self.layout, self.name))
        if ctx.learned[1]:
            forward_pass.record(Stored(bias, row_sum(g, self.layout), self.name))


def _in_rows(x: Tensor) -> Tensor:
    """Contiguous, if of more dimensions than a matrix: without a graph torch multiplies others sample by sample."""
    return x if x.dim() <= 2 else x.contiguous()


class _Linear(_Product):
    """x W^T + b, W [O,I], with its input gradient written out."""

    def forward(self, ctx: Context, *data: Tensor) -> Tensor:
        return F.linear(_in_rows(as_autocast(ctx, data[0])), *ctx.values)

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        return [torch.matmul(_in_rows(grads[0]), ctx.values[0])] if ctx.wanted[0] else []


class _Right(_Product):
    """x W + b, W [I,O]: the operand's gradient is a^T g."""

    flipped = True

    def forward(self, ctx: Context, *data: Tensor) -> Tensor:
        x = _in_rows(as_autocast(ctx, data[0]))
        weight, bias = ctx.values
        if bias is not None and x.dim() == 2:
            return torch.addmm(bias, x, weight)
        out = torch.matmul(x, weight)
        return out if bias is None else out + bias

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        return [torch.matmul(_in_rows(grads[0]), ctx.values[0].t())] if ctx.wanted[0] else []


def steps(tensor: Tensor) -> Tensor:
    """[B, ..., I] -> [B, T, I], I perhaps 0."""
    return tensor.reshape(tensor.size(0), math.prod(tensor.shape[1:-1]), tensor.size(-1))


def lies_in_order(layout: Layout) -> bool:
    """Whether the samples lie one after the other, each in equally many rows of the first dimension."""
    return layout.batch > 1 and layout.owner is None and layout.dim == 0 and layout.outer == 1


def steps_by_sample(tensor: Tensor, layout: Layout) -> Tensor:
    """[B, T, I]: the rows of each sample, with all that is not the last dimension."""
    if lies_in_order(layout) and tensor.dim() > 1:
        if layout.inner == 1 and tensor.dim() == 3:
            return tensor
        shape = tensor.shape  # views of one call, as samples lie one after the other
        return tensor.reshape(layout.batch, layout.inner * math.prod(shape[1:-1]), shape[-1])
    return steps(by_sample(tensor, layout))


def steps_of_all(tensors: list[Tensor], layout: Layout) -> Tensor:
    """[n * B, T, I]: `steps_by_sample` of n tensors of one shape, one after the other."""
    if lies_in_order(layout) and tensors[0].dim() > 1:
        return steps_by_sample(torch.cat(tensors), layout._replace(batch=len(tensors) * layout.batch))
    return torch.cat([steps_by_sample(tensor, layout) for tensor in tensors])


def row_sums(g: Tensor) -> Tensor:
    """[B,T,O] -> [B,O] in float32 (float64 of float64)."""
    return g.squeeze(1) if g.size(1) == 1 else ops.common.sum_over(g, 1)


def _captured(
    kind: type[Captured], forward_pass: ForwardPass, name: str, x: Tensor, dim: int, *operands: Tensor | None
) -> Any:
    """The result of a product of this kind, which sums over a dimension of x."""
    layout = sample_layout(forward_pass, x, name)
    refuse_contraction(forward_pass, layout, dim, name)
    return capture(kind(forward_pass, name, layout), Context(forward_pass, *operands), x)


def captured_linear(forward_pass: ForwardPass, x: Tensor, weight: Tensor, bias: Tensor | None, adds_bias: bool) -> Any:
    """F.linear, with the bias's gradient also where another process adds the bias to what all sum up."""
    layout = sample_layout(forward_pass, x, "linear")
    refuse_contraction(forward_pass, layout, x.dim() - 1, "linear")
    ctx = Context(forward_pass, weight, bias)
    ctx.values[1] = ctx.values[1] if adds_bias else None
    return capture(_Linear(forward_pass, "linear", layout), ctx, x)


@use_rule(F.linear)
def capture_linear(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.linear(x, W, b), x of any number of dimensions."""
    x, weight, bias = bind(args, kwargs, "input", "weight", "bias")
    if x.dim() == 0 or weight.dim() != 2:
        return NotImplemented
    if not made_of_data(forward_pass, x) or made_of_data(forward_pass, weight, bias):
        return NotImplemented
    return _captured(_Linear, forward_pass, "linear", x, x.dim() - 1, weight, bias)


class _Left(Captured):
    """W @ x with W [O,I], x [..., I, T]: the gradient is sum_t g_t x_t^T."""

    by_shapes = native = True

    def run(self, ctx: Context, *data: Tensor) -> Any:
        return torch.matmul(ctx.values[0], data[0])

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        a, g = (
            steps(by_sample(t, self.layout).mT) for t in (saved[0], grads[0])
        )  # from [B, ..., I, T], [B, ..., O, T]
        ctx.forward_pass.record(use_of_product(ctx.forward_pass, ctx.operands[0], a, g, self.name))


@use_rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.mm, torch.Tensor.mm
)
def capture_matmul(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x @ W and W @ x for a matrix W; vectors, stacks of matrices and products of operands are generic."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    first, second = args if func is not torch.Tensor.__rmatmul__ else args[::-1]
    left, right = forward_pass.is_parameter(first), forward_pass.is_parameter(second)
    if left and right:
        return NotImplemented
    if right and second.dim() == 2 and first.dim() >= 1:
        return _captured(_Right, forward_pass, "matmul", first, first.dim() - 1, second, None)
    if left and first.dim() == 2 and second.dim() >= 2:
        return _captured(_Left, forward_pass, "matmul", second, second.dim() - 2, first)
    return NotImplemented


@use_rule(torch.addmm, torch.Tensor.addmm)
def capture_addmm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """addmm(b, x, W) with a vector b: transformers' Conv1D."""
    bias, x, weight = bind(args, kwargs, "input", "mat1", "mat2")
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1 or len(args) > 3:
        return NotImplemented
    if bias.dim() != 1 or bias.numel() != weight.size(1):
        return NotImplemented
    if not made_of_data(forward_pass, x) or made_of_data(forward_pass, weight, bias):
        return NotImplemented
    return _captured(_Right, forward_pass, "addmm", x, 1, weight, bias)
