"""Parameters that broadcast against data: add, sub, mul, div, cat, and everything that reduces to them.

Position embeddings, class tokens, layer scale, learned temperatures, biases added by hand.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..errors import SampleMixingError
from ..layouts.calls import bind
from ..layouts.layout import Layout
from .captured import Captured, Operand, capture
from .embedding import Lookup
from .forward_pass import ForwardPass
from .links import link_of
from .rules import by_sample, refuse_by_position, sample_layout, use_rule
from .use import Lazy, Stored, Use


def uses_of_broadcast(operand: Tensor, grads: Tensor, layout: Layout, ndim: int, name: str) -> Use:
    """The use of an operand that was broadcast to a result of `ndim` dimensions laid out as `layout`.

    grads: with respect to the broadcast operand, cut by sample: [B, *result.shape with dim -> rows].
    """
    shape = operand.shape
    lead = ndim - len(shape)
    if lead:
        grads = grads.sum(tuple(range(1, 1 + lead)))
    dim = layout.dim - lead  # where the samples lie in the operand, if it spans them
    spans = layout.batch > 1 and 0 <= dim and shape[dim] != 1
    grads = _sum_to(grads, shape, dim if spans else None)
    if not spans:
        return _follow(operand, grads, name)
    return _follow_rows(operand, grads, layout._replace(dim=dim), name)


def _sum_to(grads: Tensor, shape: torch.Size, kept: int | None) -> Tensor:
    over = [d + 1 for d, size in enumerate(shape) if size == 1 and d != kept and grads.size(d + 1) != 1]
    return grads.sum(over, keepdim=True) if over else grads


def _follow(operand: Tensor, grads: Tensor, name: str) -> Use:
    """Per-sample gradients [B, *operand.shape], taken back through broadcasts and look-ups."""
    link = link_of(operand)
    if link is not None and link.kind == "broadcast":
        lead = operand.dim() - link.parent.dim()
        grads = grads.sum(tuple(range(1, 1 + lead))) if lead else grads
        return _follow(link.parent, _sum_to(grads, link.parent.shape, None), name)
    if link is not None and link.kind == "lookup" and link.ids is not None:
        ids = link.ids.unsqueeze(0).expand(grads.size(0), *link.ids.shape)
        return Lookup.rows(link.parent, ids, grads, name)
    return Stored(operand, grads, name)


def _follow_rows(operand: Tensor, grads: Tensor, layout: Layout, name: str) -> Use:
    """The same where the operand has rows of its own for every sample: grads [B, ..., rows, ...]."""
    link = link_of(operand)
    if link is not None and link.kind == "broadcast":
        lead = operand.dim() - link.parent.dim()
        grads = grads.sum(tuple(range(1, 1 + lead))) if lead else grads
        dim = layout.dim - lead
        if dim < 0 or link.parent.size(dim) == 1:
            return _follow(link.parent, _sum_to(grads, link.parent.shape, None), name)
        return _follow_rows(link.parent, _sum_to(grads, link.parent.shape, dim), layout._replace(dim=dim), name)
    if link is not None and link.kind == "lookup" and link.ids is not None and layout.dim < link.ids.dim():
        return Lookup.rows(link.parent, by_sample(link.ids, layout), grads, name)
    owners = layout.owners(operand.device)

    def own_rows(low: int, high: int) -> Tensor:
        full = grads.new_zeros((high - low, *operand.shape))
        for b in range(low, high):
            mine = torch.nonzero(owners == b).flatten()
            full[b - low].index_copy_(layout.dim, mine, grads[b].narrow(layout.dim, 0, mine.numel()))
        return full

    return Lazy(operand, layout.batch, name, own_rows)


_DATA = object()  # a side of an elementwise call that is data: the call's node must not hold it


class _Elementwise(Captured):
    """x (op) w with op one of add, sub, mul, div; either side may be the operand."""

    def __init__(
        self, forward_pass: ForwardPass, name: str, sides: tuple[Any, Any], alpha: Any, layout: Layout
    ) -> None:
        super().__init__(forward_pass, name, forward_pass.path)
        self.sides = tuple(
            s if not isinstance(s, Tensor) else Operand.of(s) if forward_pass.is_parameter(s) else _DATA for s in sides
        )
        self.alpha, self.layout = alpha, layout
        self.kind = next(k for k in ("add", "sub", "mul", "div") if k in name.replace("multiply", "mul"))
        self.ndim = 0
        self.shapes: list[tuple[torch.Size, torch.dtype] | None] = []

    def run(self, *data: Tensor) -> Tensor:
        values = list(data)
        sides = [s.value if isinstance(s, Operand) else values.pop(0) if s is _DATA else s for s in self.sides]
        if self.kind in ("add", "sub") and self.alpha != 1:
            out = getattr(torch, self.kind)(*sides, alpha=self.alpha)
        else:
            out = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}[self.kind](
                *sides
            )
        self.ndim = out.dim()
        return out

    def forward(self, *data: Tensor) -> Any:
        if self.kind in ("mul", "div"):
            self.keep(*[side.value for side in self.sides if isinstance(side, Operand)])
            return super().forward(*data)
        self.shapes = [(t.shape, t.dtype) if t.requires_grad else None for t in data]
        return self.run(*data)  # a sum's gradients need none of its terms: hold none

    def input_grads(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if self.kind in ("mul", "div"):
            return super().input_grads(saved, grads)
        positions = [k for k, side in enumerate(self.sides) if side is _DATA]
        found: list[Tensor | None] = []
        for k, wanted in zip(positions, self.shapes, strict=True):
            g = self._gradient(grads[0], None, None, k)
            found.append(None if wanted is None else g.sum_to_size(wanted[0]).to(wanted[1]))
        return found

    def saved(self, *data: Tensor) -> tuple[Tensor, ...]:
        return data if self.kind in ("mul", "div") else ()

    def record_uses(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        values = list(saved)
        for position, side in enumerate(self.sides):
            if isinstance(side, Operand):
                other = self.sides[1 - position]
                if isinstance(other, Operand):
                    other = other.value
                elif other is _DATA:
                    other = values[0] if values else None
                full = self._gradient(grads[0], side, other, position)
                use = uses_of_broadcast(side.tensor, by_sample(full, self.layout), self.layout, self.ndim, self.name)
                self.forward_pass.record(use)

    def _gradient(self, g: Tensor, side: Operand | None, other: Any, position: int) -> Tensor:
        if self.kind == "mul":
            return g * other
        if self.kind == "div":
            assert side is not None
            return g / other if position == 0 else -g * other / side.value.square()
        factor = 1 if position == 0 else self.alpha * (-1 if self.kind == "sub" else 1)
        return g if factor == 1 else g * factor


_ADD = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
_SUB = (torch.sub, torch.subtract, torch.Tensor.sub, torch.Tensor.__sub__)
_MUL = (torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)
_DIV = (torch.div, torch.divide, torch.true_divide, torch.Tensor.div, torch.Tensor.__truediv__)
_IN_PLACE = tuple(
    getattr(torch.Tensor, n)
    for n in "add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__".split()
    if hasattr(torch.Tensor, n)
)


def _kind_name(func: Any) -> str:
    name = func.__name__.replace("true_divide", "div").replace("truediv", "div")
    return str(name)


@use_rule(*_ADD, *_SUB, *_MUL, *_DIV, *_IN_PLACE)
def capture_elementwise(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """w + x, x * w, ... with one or two operands; in place, the target becomes the captured result."""
    if "rounding_mode" in kwargs or "out" in kwargs or kwargs.get("other") is not None or len(args) != 2:
        return NotImplemented
    first, second = args
    data = [s for s in (first, second) if isinstance(s, Tensor) and not forward_pass.is_parameter(s)]
    source = next(s for s in data if forward_pass.is_data(s))
    layout = sample_layout(forward_pass, source, func.__name__)
    in_place = func in _IN_PLACE
    ndim = max(s.dim() for s in (first, second) if isinstance(s, Tensor))
    if in_place and first is not source:
        return NotImplemented
    layout = layout._replace(dim=layout.dim + ndim - source.dim()) if layout.batch > 1 else layout
    for side in (first, second):
        if isinstance(side, Tensor) and side is not source:
            refuse_by_position(forward_pass, side, layout, ndim, func.__name__)
    call = _Elementwise(forward_pass, _kind_name(func), (first, second), kwargs.get("alpha", 1), layout)
    if not in_place:
        return capture(call, *data, layout=layout)
    out = capture(call, first.clone(), *data[1:], layout=layout)
    return first.copy_(out)


class _Cat(Captured):
    """cat of data and operands: each operand's gradient is its slice of the output gradient."""

    def __init__(self, forward_pass: ForwardPass, parts: list[Tensor], dim: int, layout: Layout) -> None:
        super().__init__(forward_pass, "cat", forward_pass.path)
        self.parts = [Operand.of(p) if forward_pass.is_parameter(p) else p.size(dim) for p in parts]
        self.dim, self.layout = dim, layout

    def run(self, *data: Tensor) -> Tensor:
        values = list(data)
        return torch.cat([p.value if isinstance(p, Operand) else values.pop(0) for p in self.parts], self.dim)

    def forward(self, *data: Tensor) -> Any:
        return self.run(*data)

    def saved(self, *data: Tensor) -> tuple[Tensor, ...]:
        return ()

    def input_grads(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        start = 0
        for part in self.parts:
            size = part.value.size(self.dim) if isinstance(part, Operand) else part
            if not isinstance(part, Operand):
                found.append(grads[0].narrow(self.dim, start, size))
            start += size
        return found

    def record_uses(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        start, g = 0, grads[0]
        for part in self.parts:
            size = part.value.size(self.dim) if isinstance(part, Operand) else part
            if isinstance(part, Operand):
                piece = by_sample(g.narrow(self.dim, start, size), self.layout)
                use = uses_of_broadcast(part.tensor, piece, self.layout, g.dim(), "cat")
                self.forward_pass.record(use)
            start += size


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
    return capture(_Cat(forward_pass, parts, dim, layout), *data, layout=layout)
