"""Captures a call whose per-sample gradients a registered rule gives, and checks the rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.layout import spread
from ..errors import FastDPError, UncapturedUseError
from ..ops.common import accumulate
from ..utils.cache import Answers
from ..utils.pytree import tensors_in, tensors_of
from .captured_call import Context
from .forward_pass import ForwardPass
from .generic import Generic, capture_generic, capture_once
from .parameter_use import Lazy, Stored
from .rules import by_sample

KEPT_BYTES = 2**24  # per-sample gradients up to this size are kept; larger ones are computed again when asked for
_CHECKED = Answers()


class RuleCall:
    """One call of a registered function, as its rule sees it. 16-bit numbers arrive as float32.

    If samples have different numbers of rows, they are padded with rows of zero data and zero gradients.

    Attributes:
        args: the positional arguments of the call. Tensors that carry samples are cut by sample: [B, *shape in a call
            on one sample alone]. [N, T, D] arrives as [N, 1, T, D] if samples lie first, and [T, N, D] as [N, T, 1, D]
            if they lie second. Parameters, constants and everything else are whole.
        kwargs: the keyword arguments of the call, cut in the same way.
        grads: the gradients with respect to the results, cut in the same way: one for each result, with nested ones in
            their order; None for results without a gradient, and for results that are None.
        batch: B, the number of samples in this call. Large gradients are computed in several calls of fewer samples.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], grads: tuple[Any, ...], batch: int) -> None:
        self.args, self.kwargs, self.grads, self.batch = args, kwargs, grads, batch

    @property
    def grad(self) -> Tensor:
        """The gradient with respect to the result, if exactly one result has a gradient."""
        found: list[Tensor] = [g for g in self.grads if g is not None]
        (only,) = found
        return only


Rule = Callable[[RuleCall], dict[Tensor, Tensor]]


def capture_registered(
    rule: Rule | None, forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The call by its rule; with None by the generic one."""
    if rule is None:
        return capture_generic(forward_pass, func, args, kwargs)
    return capture_once(_Registered(rule, forward_pass, func, args, kwargs))


class _Registered(Generic):
    """A call whose per-sample gradients a registered rule gives."""

    def __init__(self, rule: Rule, forward_pass: ForwardPass, func: Any, args: Any, kwargs: Any) -> None:
        super().__init__(forward_pass, func, args, kwargs, in_place=False)
        self.rule = rule
        code = getattr(rule, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        self.wrong = (
            f"the rule '{getattr(rule, '__name__', rule)}'{where} registered for {forward_pass.place(self.name)}"
        )

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        trained = [(n, operand) for n, operand in enumerate(ctx.operands) if operand.is_floating_point()]
        data, gs = self._cut(saved, grads)
        if 4 * self.batch * sum(operand.numel() for _, operand in trained) <= KEPT_BYTES:
            found = self._apply_rule(data, gs)
            for n, operand in trained:
                ctx.forward_pass.record(Stored(operand, found[n], self.name))
            return
        for n, operand in trained:
            compute = functools.partial(self._part, n, data, gs)
            ctx.forward_pass.record(Lazy(operand, self.batch, self.name, compute))

    def _cut(self, data: tuple[Tensor, ...], grads: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor | None]]:
        return (
            [by_sample(t, layout) for t, layout in zip(data, self.layouts, strict=True)],
            [None if g is None else by_sample(g, layout) for g, layout in zip(grads, self.out_layouts, strict=True)],
        )

    def _part(self, number: int, data: list[Tensor], gs: list[Tensor | None], low: int, high: int) -> Tensor:
        """Gradients of samples [low, high); of all at once where a constant may have been made for the batch."""
        if any(not {self.batch, *[x.rows for x in self.layouts]}.isdisjoint(t.shape) for t in self.constants):
            return self._apply_rule(data, gs)[number][low:high]
        return self._apply_rule([t[low:high] for t in data], [None if g is None else g[low:high] for g in gs])[number]

    def _apply_rule(self, data: list[Tensor], gs: list[Tensor | None]) -> list[Tensor]:
        """What the rule says of every operand, its shapes checked."""
        values = [_long(t) for t in self.ctx.values]
        args, kwargs = self.filled(values, [_long(t) for t in data], [_long(t) for t in self.constants])
        batch = next(g for g in gs if g is not None).size(0)
        grads = tuple(None if g is None else _long(g) for g in gs)
        grads = grads if self.nest is None else self.nest.aligned(grads)
        taken = [t for t in tensors_in((args, kwargs, grads)) if not t.is_inference()]
        before = [t._version for t in taken]
        try:
            with torch.no_grad():
                found = self.rule(RuleCall(args, kwargs, grads, batch))
        except FastDPError:
            raise
        except Exception as problem:
            raise UncapturedUseError(f"{self.wrong} raised {type(problem).__name__}: {problem}") from problem
        if [t._version for t in taken] != before:
            raise UncapturedUseError(f"{self.wrong} writes into its arguments, which others use: work on copies")
        if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in (*found, *found.values())):
            raise UncapturedUseError(
                f"{self.wrong} must return a dict of tensors {{parameter: gradients}}, not {type(found).__name__}"
            )
        gradients = {id(parameter): gradient for parameter, gradient in found.items()}
        result = []
        for n, value in enumerate(values):
            name, want = self._name(n), (batch, *value.shape)
            gradient = gradients.get(id(value))
            if gradient is None:
                raise UncapturedUseError(f"{self.wrong} gives no gradient for {name}, which is trained")
            if tuple(gradient.shape) != want:
                raise UncapturedUseError(
                    f"{self.wrong} gives gradients of shape {tuple(gradient.shape)} for {name}: they must be {want}, "
                    "the samples first"
                )
            result.append(gradient)
        return result

    def _name(self, number: int) -> str:
        return self.ctx.forward_pass.names_of([self.ctx.operands[number]])

    # ------------------------------------------------------------------ the check

    def remedy(self) -> str:
        return "If they lie as those of one of its arguments, say so with register_rule(..., like=position)."

    def check(self, outs: list[Tensor]) -> None:
        """Once for each kind of call: the rule's rows of the first and last sample equal autograd's, and so does the
        sum of all rows, each weighed by a number of its own."""
        kinds = [_kind(t, layout) for t, layout in zip(self.data, self.layouts, strict=True)]
        key = (self.rule, self.func, self.path, self.batch > 1, tuple(kinds), self.kind())
        if key in _CHECKED:
            return
        generator = torch.Generator().manual_seed(0)
        grads = [
            torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.device, t.dtype)
            if t.is_floating_point()
            else None
            for t in outs
        ]
        found = self._apply_rule(*self._cut(tuple(self.data), tuple(grads)))
        conclusive = True
        for whose, factors in self._weightings():
            own = factors != 0
            for n, truth in enumerate(self._by_autograd(grads, factors)):
                rows = found[n].double().flatten(1).cpu()[own] * factors[own].unsqueeze(1)
                truth = truth.double().flatten().cpu()
                off, size = float((rows.sum(0) - truth).norm()), float(rows.norm(dim=1).sum())
                conclusive = conclusive and 0 < float(truth.norm()) < float("inf")
                if bool(torch.isfinite(truth).all()) and not off <= self._tolerance(n) * size:
                    raise UncapturedUseError(
                        f"{self.wrong} is wrong: for {self._name(n)} {whose} from autograd's by {off:.2g}, of "
                        f"{size:.2g}"
                    )
        self._check_isolation(grads, found)
        if conclusive:
            _CHECKED[key] = True

    def _weightings(self) -> Iterator[tuple[str, Tensor]]:
        """Factors of the samples: of the first and of the last alone, then of all, each a number of its own."""
        for b in sorted({0, self.batch - 1}):
            yield f"and sample {b} its gradient differs", torch.eye(self.batch, dtype=torch.float32)[b]
        if self.batch > 2:
            each = torch.rand(self.batch, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
            yield "the gradients of all samples together differ", each + 0.5

    def _tolerance(self, number: int) -> float:
        """How far the gradient of an operand may be off, of its size."""
        return 3e-2 if self.ctx.values[number].dtype in (torch.bfloat16, torch.float16) else 1e-4

    def _by_autograd(self, grads: list[Tensor | None], factors: Tensor) -> list[Tensor]:
        """sum_b factors_b gradient_b by autograd, whose gradients of the results are zero where factors are."""
        # what this saves is no business of a checkpoint around the call, which counts what is saved
        apart = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
        with apart, torch.enable_grad(), torch.autocast(*self.autocast):
            weights = [t.detach().requires_grad_(t.is_floating_point()) for t in self.ctx.values]
            out = self.apply(weights, [t.detach() for t in self.data], self.constants)
        outs = tensors_of(out)
        if not any(t.requires_grad for t in outs):
            raise UncapturedUseError(
                f"{self.wrong} cannot be checked: autograd gives {self.parameters()} no gradient through it. A custom "
                "operator needs register_autograd."
            )
        pairs = [
            (t, _weighed(g, factors.to(g.device)[layout.owners(g.device)], layout.dim) if layout.batch > 1 else g)
            for t, g, layout in zip(outs, grads, self.out_layouts, strict=True)
            if g is not None and t.requires_grad
        ]
        found = torch.autograd.grad([t for t, _ in pairs], weights, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]

    def _check_isolation(self, grads: list[Tensor | None], found: list[Tensor]) -> None:
        """A NaN in the gradient of sample 0 must not reach the others."""
        if self.batch < 2:
            return
        data, gs = self._cut(tuple(self.data), tuple(grads))
        poisoned = [None if g is None else g.clone() for g in gs]
        for g in poisoned:
            if g is not None:
                g[0] = float("nan")
        for n, (before, after) in enumerate(zip(found, self._apply_rule(data, poisoned), strict=True)):
            if not torch.allclose(before[1:], after[1:], rtol=1e-4, atol=1e-6, equal_nan=True):
                raise UncapturedUseError(
                    f"{self.wrong} lets one sample's gradient reach another's: a NaN in sample 0 changes other rows of "
                    f"{self._name(n)}. Keep dimension 0, the samples, apart."
                )


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _long(tensor: Tensor) -> Tensor:
    """Floating numbers in float32 or float64; always another object than the parameter's own."""
    return accumulate(tensor) if tensor.is_floating_point() else tensor


def _kind(tensor: Tensor, layout: Any) -> Any:
    """Type, strides, shape but for the number of rows, and layout but for the number of samples."""
    shape = list(tensor.shape)
    if layout.dim < len(shape):
        shape[layout.dim] = -1
    return (tensor.dtype, tuple(shape), tensor.is_contiguous(), layout.dim, layout.outer, layout.inner,
            layout.owner is None)  # fmt: skip


def _weighed(tensor: Tensor, factors: Tensor, dim: int) -> Tensor:
    """The rows of a dimension times c; zero where c is."""
    factors = spread(factors.to(tensor.dtype), dim, tensor.shape)
    return torch.where(factors == 0, torch.zeros_like(tensor), tensor * factors)
