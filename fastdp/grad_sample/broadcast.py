"""Parameters that broadcast against data: add, sub, mul, div, cat, and what reduces to them.

Position embeddings, class tokens, layer scale, learned temperatures, biases added by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.calls import bind
from ..batch_axis.layout import Layout
from ..errors import SampleMixingError
from .captured_call import Captured, Context, capture
from .embedding import Lookup
from .forward_pass import ForwardPass
from .parameter_links import link_of
from .parameter_use import Lazy, ParameterUse, Stored
from .rules import by_sample, refuse_by_position, sample_layout, use_rule


def uses_of_broadcast(operand: Tensor, grads: Tensor, layout: Layout | None, ndim: int, name: str) -> ParameterUse:
    """The use of an operand that was broadcast to a result of `ndim` dimensions, taken back through broadcasts and
    look-ups.

    grads: with respect to the broadcast operand, cut by sample: [B, *result.shape with dim -> rows]. layout: of the
    result; None: it has no rows of samples, grads are [B, *result.shape].
    """
    lead = ndim - operand.dim()
    grads = grads.sum(tuple(range(1, 1 + lead))) if lead else grads
    rows = None  # where the samples lie in the operand, if it spans them
    if layout is not None and layout.batch > 1 and layout.dim >= lead and operand.size(layout.dim - lead) != 1:
        rows = layout._replace(dim=layout.dim - lead)
    once = [d for d, size in enumerate(operand.shape) if size == 1 and (rows is None or d != rows.dim)]
    over = [d + 1 for d in once if grads.size(d + 1) != 1]
    grads = grads.sum(over, keepdim=True) if over else grads
    link = link_of(operand)
    if link is not None and link.kind == "broadcast":
        return uses_of_broadcast(link.parent, grads, rows, operand.dim(), name)
    if link is not None and link.kind == "lookup" and link.ids is not None:
        if rows is None:
            return Lookup.rows(link.parent, link.ids.expand(grads.size(0), *link.ids.shape), grads, name)
        if rows.dim < link.ids.dim():
            return Lookup.rows(link.parent, by_sample(link.ids, rows), grads, name)
    if rows is None:
        return Stored(operand, grads, name)
    return Lazy(operand, rows.batch, name, _own_rows(operand, grads, rows))


def _own_rows(operand: Tensor, grads: Tensor, layout: Layout) -> Callable[[int, int], Tensor]:
    """Gradients of an operand that has rows of its own for every sample, of these: grads [B, ..., rows, ...]."""

    def of_samples(low: int, high: int) -> Tensor:
        full = grads.new_zeros((high - low, *operand.shape))
        for b in range(low, high):
            mine = layout.rows_of(b, operand.device)
            full[b - low].index_copy_(layout.dim, mine, grads[b].narrow(layout.dim, 0, mine.numel()))
        return full

    return of_samples


class _Elementwise(Captured):
    """x (op) w or w (op) x, of data x and an operand w, with op one of add, sub, mul, div."""

    by_shapes = native = True

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout, x: Tensor, alpha: Any, second: bool,
                 ndim: int) -> None:  # fmt: skip
        """second: whether the operand is; ndim: of the result."""
        super().__init__(forward_pass, name, layout)
        self.shape, self.dtype, self.second, self.ndim = x.shape, x.dtype, second, ndim
        self.kind = next(k for k in ("add", "sub", "mul", "div") if k in name.replace("multiply", "mul"))
        self.options = {} if alpha == 1 else {"alpha": alpha}

    def run(self, ctx: Context, *data: Tensor) -> Any:
        sides = (*data, *ctx.values) if self.second else (*ctx.values, *data)
        return getattr(torch, self.kind)(*sides, **self.options)

    def forward(self, ctx: Context, *data: Tensor) -> Any:
        if self.kind in ("mul", "div"):
            ctx.keep(*ctx.values)
            return super().forward(ctx, *data)
        return self.run(ctx, *data)  # a sum's gradients need none of its terms: hold none

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if self.kind in ("mul", "div"):
            return super().input_grads(ctx, saved, grads)
        g = self._of_sum(grads[0], not self.second)
        return [g.sum_to_size(self.shape).to(self.dtype)] if ctx.wanted[0] else []

    def saved(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        return data if self.kind in ("mul", "div") else ()

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        g, (operand,), (value,) = grads[0], ctx.operands, ctx.values
        if self.kind == "mul":
            full = g * saved[0]
        elif self.kind == "div":
            full = -g * saved[0] / value.square() if self.second else g / saved[0]
        else:
            full = self._of_sum(g, self.second)
        use = uses_of_broadcast(operand, by_sample(full, self.layout), self.layout, self.ndim, self.name)
        ctx.forward_pass.record(use)

    def _of_sum(self, g: Tensor, second: bool) -> Tensor:
        """The gradient of a side of a sum or difference, broadcast."""
        factor = self.options.get("alpha", 1) * (-1 if self.kind == "sub" else 1) if second else 1
        return g if factor == 1 else g * factor


_IN_PLACE = tuple(
    getattr(torch.Tensor, n)
    for n in "add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__".split()
    if hasattr(torch.Tensor, n)
)


@use_rule(
    torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__,
    torch.sub, torch.subtract, torch.Tensor.sub, torch.Tensor.__sub__,
    torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__,
    torch.div, torch.divide, torch.true_divide, torch.Tensor.div, torch.Tensor.__truediv__, *_IN_PLACE,
)  # fmt: skip
def capture_elementwise(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """w + x, x * w, ...; in place, the target becomes the captured result."""
    if "rounding_mode" in kwargs or "out" in kwargs or kwargs.get("other") is not None or len(args) != 2:
        return NotImplemented
    first, second = args
    tensors = [s for s in (first, second) if isinstance(s, Tensor)]
    source = next(s for s in tensors if not forward_pass.is_parameter(s) and forward_pass.is_data(s))
    layout = sample_layout(forward_pass, source, func.__name__)
    in_place = func in _IN_PLACE
    ndim = max(s.dim() for s in tensors)
    if in_place and first is not source:
        return NotImplemented
    layout = layout._replace(dim=layout.dim + ndim - source.dim()) if layout.batch > 1 else layout
    for side in tensors:
        if side is not source:
            refuse_by_position(forward_pass, side, layout, ndim, func.__name__)
    operand = second if first is source else first
    if not isinstance(operand, Tensor) or not forward_pass.is_parameter(operand):
        return NotImplemented
    name, alpha = func.__name__.replace("true_divide", "div").replace("truediv", "div"), kwargs.get("alpha", 1)
    call = _Elementwise(forward_pass, name, layout, source, alpha, operand is second, ndim)
    ctx = Context(forward_pass, operand)
    return first.copy_(capture(call, ctx, first.clone())) if in_place else capture(call, ctx, source)


class _Cat(Captured):
    """cat of data and operands: each operand's gradient is its slice of the output gradient."""

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout, parts: list[Tensor], dim: int) -> None:
        super().__init__(forward_pass, name, layout)
        self.is_operand = [forward_pass.is_parameter(p) for p in parts]
        self.sizes, self.dim = [p.size(dim) for p in parts], dim

    def forward(self, ctx: Context, *data: Tensor) -> Tensor:
        values, rest = iter(ctx.values), iter(data)
        return torch.cat([next(values if own else rest) for own in self.is_operand], self.dim)

    def saved(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        return ()

    def _pieces(self, g: Tensor, of_operands: bool) -> list[Tensor]:
        """What belongs to the operands, or to the data."""
        pieces = zip(self.is_operand, g.split(self.sizes, self.dim), strict=True)
        return [piece for own, piece in pieces if own == of_operands]

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        return [*self._pieces(grads[0], False)]

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        for operand, piece in zip(ctx.operands, self._pieces(grads[0], True), strict=True):
            rows = by_sample(piece, self.layout)
            ctx.forward_pass.record(uses_of_broadcast(operand, rows, self.layout, piece.dim(), self.name))


@use_rule(torch.cat, torch.concat, torch.concatenate)
def capture_cat(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cat([class_token.expand(B, -1, -1), x], 1), bias_kv of attention, prompts."""
    parts, dim = bind(args, kwargs, "tensors", "dim")
    parts = list(parts)
    source = next(p for p in parts if forward_pass.is_data(p) and not forward_pass.is_parameter(p))
    layout = sample_layout(forward_pass, source, "cat")
    dim = (dim or 0) % source.dim()
    data = [p for p in parts if not forward_pass.is_parameter(p)]
    for part in data if layout.batch > 1 else ():
        own = sample_layout(forward_pass, part, "cat") if forward_pass.is_data(part) else layout
        if own.dim != layout.dim or not own.same_rows(layout, part.device):
            place = forward_pass.place("cat")
            raise SampleMixingError(f"{place}: joins rows of different samples.", f"{place} joins rows of samples")
    if (layout.batch > 1 and dim == layout.dim) or any(p.dim() != source.dim() for p in parts):
        return NotImplemented
    if len({p.dtype for p in parts}) > 1:
        return NotImplemented
    operands = [p for p in parts if forward_pass.is_parameter(p)]
    for operand in operands:
        refuse_by_position(forward_pass, operand, layout, source.dim(), "cat")
    return capture(_Cat(forward_pass, "cat", layout, parts, dim), Context(forward_pass, *operands), *data)
