"""A captured call: the forward runs with the parameters detached, so that autograd computes input gradients only; the
backward hands the output gradient to the call, which records a `Use` for each parameter."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import StepError
from ..layouts.layout import Layout, tag
from ..ops.common import exactly
from .forward_pass import ForwardPass
from .saved import check_same, fingerprints


class Operand(NamedTuple):
    """A parameter (or derived tensor) in a captured call: itself, and as the forward uses it."""

    tensor: Tensor
    value: Tensor  # detached

    @staticmethod
    def of(tensor: Tensor) -> Operand:
        return Operand(tensor, tensor.detach())


class _Again(NamedTuple):
    """How a call is run again in backward."""

    wanted: list[bool]  # which of the data want a gradient
    autocast: tuple[str, torch.dtype, bool]


class Captured:
    """One captured call. Rules subclass it: `run` is the forward, `record_uses` the backward.

    data: the tensors that carry samples, differentiable or not; what is saved for backward.
    """

    def __init__(self, forward_pass: ForwardPass, name: str, path: str) -> None:
        self.forward_pass, self.name, self.path = forward_pass, name, path
        self.inner: tuple[list[Tensor], Any] | None = None
        self.again: _Again | None = None  # the call runs once more in backward, instead of keeping a graph
        self._kept: list[tuple[Tensor, int]] = []

    @property
    def batch(self) -> int:
        return self.forward_pass.batch

    def keep(self, *values: Tensor | None) -> None:
        """Note tensors beside the data whose numbers the backward reads: autograd does not watch over these."""
        self._kept += [(t, t._version) for t in values if t is not None and not t.is_inference()]

    def check_kept(self) -> None:
        """Raises StepError where a kept tensor has been written to since."""
        if any(tensor._version != version for tensor, version in self._kept):
            raise StepError(
                f"{self.name}() in module '{self.path}': a parameter (or a constant beside it) was written to between "
                "its use in the forward and the backward, by an optimizer's step, a moving average or a normalisation "
                "in place perhaps, so the gradients would be of other numbers. Write after the step, or use a clone()."
            )

    def run(self, *data: Tensor) -> Any:
        """The function's value from the data; parameters detached."""
        raise NotImplementedError

    def saved(self, *data: Tensor) -> tuple[Tensor, ...]:
        """What `record_uses` needs of the data."""
        return data

    def record_uses(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """Record the uses."""
        raise NotImplementedError

    def forward(self, *data: Tensor) -> Any:
        """Run, keeping a graph for the input gradients. Fast rules override this and `input_grads`."""
        wanted = [t.requires_grad for t in data]
        if not any(wanted):
            return self.run(*data)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # under checkpointing a graph of its own would have the whole region computed anew, once for each call
            kind = data[0].device.type
            autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            self.again = _Again(wanted, autocast)
            return self.run(*data)
        out = self._with_graph(data, wanted)
        return out.detach() if isinstance(out, Tensor) else tuple(t.detach() for t in out)

    def run_again(self, data: tuple[Tensor, ...]) -> None:
        """The call once more on the same data, for the input gradients."""
        assert self.again is not None
        with torch.autocast(*self.again.autocast):
            self._with_graph(data, self.again.wanted)

    def _with_graph(self, data: tuple[Tensor, ...], wanted: list[bool]) -> Any:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(w) for t, w in zip(data, wanted, strict=True)]
            out = self.run(*inputs)
        outs = (out,) if isinstance(out, Tensor) else tuple(out)
        # the edges, not the tensors: nothing but what the inner graph saved stays in memory
        edges = [torch.autograd.graph.get_gradient_edge(t) if t.requires_grad else None for t in outs]
        self.inner = (inputs, edges)
        return out

    def input_grads(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if self.inner is None:
            return []
        inputs, edges = self.inner
        pairs = [(edge, g) for edge, g in zip(edges, grads, strict=True) if edge is not None]
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(
            torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
            if pairs
            else [None] * len(wanted)
        )
        self.inner = None
        return [next(found) if t.requires_grad else None for t in inputs]


def _owned(out: Tensor, data: tuple[Tensor, ...]) -> Tensor:
    """The result as no view of anything, so that an activation may write into it."""
    if not out._is_view():
        return out
    storage = out.untyped_storage().data_ptr()
    if any(t.untyped_storage().data_ptr() == storage for t in data):
        return out.clone()
    return torch.ops.aten._unsafe_view(out, out.shape)


class CaptureFunction(torch.autograd.Function):
    """The autograd node of every captured call: input gradients go on, uses are recorded."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: Captured, *data: Tensor) -> Any:
        ctx.call, ctx.count = call, len(data)
        out = call.forward(*data)
        saved = call.saved(*data)
        ctx.saved_count = len(saved)
        saved = (*saved, *(data if call.again is not None else ()))
        ctx.fingerprints = fingerprints(saved)
        ctx.save_for_backward(*saved)
        return _owned(out, data) if isinstance(out, Tensor) else tuple(_owned(t, data) for t in out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: Captured = ctx.call
        asked = call.forward_pass.begin_record(call.path)
        call.check_kept()
        kept = ctx.saved_tensors
        check_same(kept, ctx.fingerprints, call.name, call.path)
        saved, data = kept[: ctx.saved_count], kept[ctx.saved_count :]
        if call.batch and asked:
            with exactly():
                call.record_uses(saved, grads)
        if call.again is not None:
            call.run_again(data)
        inputs = call.input_grads(saved, grads)
        inputs += [None] * (ctx.count - len(inputs))
        return (None, None, *inputs)


def capture(call: Captured, *data: Tensor, layout: Layout | None) -> Any:
    """Run a captured call and tag its result."""
    out = CaptureFunction.apply(call.forward_pass.token_for(data), call, *data)  # type: ignore[no-untyped-call]
    if layout is not None:
        for tensor in (out,) if isinstance(out, Tensor) else out:
            tag(tensor, layout)
    return out
