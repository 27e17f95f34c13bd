"""A captured call: the forward runs with the parameters detached, so that autograd computes input gradients only; the
backward hands the output gradient to the call, which records a `ParameterUse` for each parameter.

What follows from the kind of the call is in a `Captured`, what is of one step in a `Context` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..batch_axis.deferred_checks import DeferredCheck
from ..batch_axis.layout import Layout, tag
from ..errors import StepError, UncapturedUseError
from ..ops.common import exactly
from .checkpoint_regions import check_same, fingerprints
from .forward_pass import ForwardPass


class Context:
    """One application of a captured call, from its forward to its backward.

    operands: the parameters (or tensors derived from them) and constants of the call, None for those left out.
    values: the same, as the forward uses them: detached, and cast perhaps.
    learned: which of them are parameters or derived from parameters.
    wanted: which of the data want a gradient.
    """

    wanted: Sequence[bool] = ()
    made: tuple[Tensor, ...] = ()  # by the forward beside its result: saved behind what `saved` gives
    inner: tuple[list[Tensor], Any] | None = None  # the graph for the input gradients
    again: tuple[str, torch.dtype, bool] | None = None  # autocast, if backward runs it again: no graph is kept
    found: list[Tensor | None] | None = None  # input gradients, if `record_uses` computed them, too
    doubt: DeferredCheck | None = None  # of the call, which stands if the backward goes through it
    stored = 0  # of so many samples the gradients are kept (`head_loss`)
    saved_count = 0  # what is saved beside the data, where these are saved to run again
    fingerprints: list[Tensor] | None = None  # of what is saved, where hooks of the user's may change it
    _kept: Sequence[tuple[Tensor, int]] = ()

    def __init__(self, forward_pass: ForwardPass, *operands: Any) -> None:
        self.forward_pass, self.operands = forward_pass, operands
        self.values: list[Any] = [None if t is None else t.detach() for t in operands]
        self.learned = [t is not None and forward_pass.is_parameter(t) for t in operands]

    @classmethod
    def repeated(cls, forward_pass: ForwardPass, operands: Sequence[Any], learned: list[bool]) -> Context:
        """Of operands of which it is known which are parameters."""
        ctx = cls.__new__(cls)
        ctx.forward_pass, ctx.operands, ctx.learned = forward_pass, tuple(operands), learned
        ctx.values = [None if t is None else t.detach() for t in operands]
        return ctx

    def keep(self, *values: Tensor | None) -> None:
        """Note tensors beside the data whose numbers the backward reads: autograd does not watch over these."""
        self._kept = [*self._kept, *[(t, t._version) for t in values if t is not None and not t.is_inference()]]

    def check_kept(self, call: Captured) -> None:
        """Raises StepError where a kept tensor has been written to since."""
        if any(tensor._version != version for tensor, version in self._kept):
            raise StepError(
                f"{call.name}() in module '{call.path}': a parameter (or a constant beside it) was written to between "
                "its use in the forward and the backward, by an optimizer's step, a moving average or a normalisation "
                "in place perhaps, so the gradients would be of other numbers. Write after the step, or use a clone()."
            )


FEW = 1 << 14  # numbers of a call that are not worth an operation of their own
Given = tuple[Context, tuple[Tensor, ...], tuple[Tensor, ...]]  # what a backward gives a native call


class Captured:
    """A captured call. Rules subclass it: `run` is the forward, `record_uses` the backward.

    layout: where the samples lie in the data. The data of `run` are the tensors that carry samples, differentiable or
    not. Nothing here changes once the call is made.
    """

    by_shapes = False  # whether all that its rule looked at follows from shapes, types and layouts of the arguments
    fresh = False  # whether the result is one tensor, of memory that is no argument's
    by_rows = False  # whether its uses are known by rows of data (`rows`)
    native = False  # whether torch's own node for the call, with parameters detached, gives the input gradient

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout) -> None:
        self.name, self.path, self.layout = name, forward_pass.path, layout

    @property
    def batch(self) -> int:
        return self.layout.batch

    def run(self, ctx: Context, *data: Tensor) -> Any:
        """The function's value from the data; parameters detached."""
        raise NotImplementedError

    def saved(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        """What `record_uses` needs of the data."""
        return data

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        """Record the uses."""
        self.record_rows(ctx, self.rows(ctx, saved, grads))

    def rows(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The data of the uses that `record_rows` makes of them, each by sample."""
        raise NotImplementedError

    def record_rows(self, ctx: Context, rows: tuple[Tensor, ...]) -> None:
        """Record the uses of these rows."""
        raise NotImplementedError

    def rows_together(self, given: Sequence[Given]) -> list[tuple[Tensor, ...]]:
        """`rows` of several calls that are alike, as they may differ in the parameters only."""
        raise NotImplementedError

    def together(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Any:
        """What calls must have in common for `rows_together`; None: each call is worth an operation of its own."""
        return None

    def as_computed(self, x: Tensor) -> Tensor:
        """The data of a native call in the type that torch computes it in."""
        return x

    def run_native(self, ctx: Context, x: Tensor) -> Tensor | None:
        """The result of a native call, by autograd's own node; None where the torch function itself gives it."""
        return None

    def forward(self, ctx: Context, *data: Tensor) -> Any:
        """Run, keeping a graph for the input gradients. Fast rules override this and `input_grads`."""
        if not any(ctx.wanted):
            return self.run(ctx, *data)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # under checkpointing a graph of its own would have the whole region computed anew, once for each call
            ctx.again = autocast_of(data[0])
            return self.run(ctx, *data)
        out = self.with_graph(ctx, data)
        return out.detach() if isinstance(out, Tensor) else tuple(t.detach() for t in out)

    def with_graph(self, ctx: Context, data: tuple[Tensor, ...]) -> Any:
        """Run on the data, keeping the graph."""
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(w) for t, w in zip(data, ctx.wanted, strict=True)]
            out = self.run(ctx, *inputs)
        outs = (out,) if isinstance(out, Tensor) else tuple(out)
        # the edges, not the tensors: nothing but what the inner graph saved stays in memory
        edges = [torch.autograd.graph.get_gradient_edge(t) if t.requires_grad else None for t in outs]
        ctx.inner = (inputs, edges)
        return out

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Gradients of the data, if any are wanted."""
        if not any(ctx.wanted):
            return []
        if ctx.inner is None:
            raise StepError(
                f"{self.name}() in module '{self.path}': a second backward through a graph that was freed. Call the "
                "backward before with retain_graph=True."
            )
        inputs, edges = ctx.inner
        kept = torch._C._autograd._get_current_graph_task_keep_graph()  # for another backward (of chosen tensors)
        pairs = [(edge, g) for edge, g in zip(edges, grads, strict=True) if edge is not None]
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(
            torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], kept, allow_unused=True)
            if pairs
            else [None] * len(wanted)
        )
        ctx.inner = ctx.inner if kept else None
        return [next(found) if t.requires_grad else None for t in inputs]


_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def _owned(out: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    """The result as no view of anything, so that an activation may write into it."""
    if not out._is_view():
        return out
    storage = out.untyped_storage()._cdata  # (on the meta device all memory has one address)
    if any(t.untyped_storage()._cdata == storage for t in given):
        return out.clone()
    return _UNSAFE_VIEW(out, out.shape)


def autocast_of(tensor: Tensor) -> tuple[str, torch.dtype, bool]:
    """The arguments of torch.autocast as it is now, where this tensor lies."""
    kind = tensor.device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


class CaptureFunction(torch.autograd.Function):
    """The autograd node of every captured call: input gradients go on, uses are recorded."""

    @staticmethod
    def forward(node: Any, token: Tensor, call: Captured, ctx: Context, *data: Tensor) -> Any:
        node.call, node.context = call, ctx
        ctx.wanted = [t.requires_grad for t in data]
        out = call.forward(ctx, *data)
        saved, ctx.made = (*call.saved(ctx, *data), *ctx.made), ()
        if ctx.again is not None:
            ctx.saved_count, saved = len(saved), (*saved, *data)
        ctx.fingerprints = fingerprints(saved)
        node.save_for_backward(*saved)
        if call.fresh:
            return _UNSAFE_VIEW(out, out.shape) if out._is_view() else out
        given = (*data, *(value for value in ctx.values if value is not None))
        return _owned(out, given) if isinstance(out, Tensor) else tuple(_owned(t, given) for t in out)

    @staticmethod
    def backward(node: Any, *grads: Tensor) -> Any:
        call: Captured = node.call
        ctx: Context = node.context
        asked = ctx.forward_pass.begin_record(call.path)
        ctx.check_kept(call)
        saved, data = node.saved_tensors, ()
        check_same(saved, ctx.fingerprints, call.name, call.path)
        if ctx.again is not None:
            saved, data = saved[: ctx.saved_count], saved[ctx.saved_count :]
        if ctx.forward_pass.batch and asked:
            with exactly():
                call.record_uses(ctx, saved, grads)
        if ctx.again is not None:
            with torch.autocast(*ctx.again):
                call.with_graph(ctx, data)
        inputs, ctx.found = ctx.found, None
        if inputs is None:
            inputs = call.input_grads(ctx, saved, grads)
        inputs += [None] * (len(ctx.wanted) - len(inputs))
        return (None, None, None, *inputs)


class Native(Context):
    """A native call (`csrc/python/native_call.cpp` makes it) from its forward to its backward: a pre-hook on the node
    that autograd made for it, which takes the output gradient to the uses.

    Until then it holds what they need of the data, as autograd holds it for gradients of parameters. A node's pre-hooks
    come after the hooks of its result (`Tensor.register_hook`), and after writes in place to the result and its views.
    """

    call: Captured
    shape: torch.Size  # of the result
    saved: tuple[Tensor, ...]  # of the data, if uses need it, and what was made beside the result
    version: int  # of the data

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        call, forward_pass, saved, grad = self.call, self.forward_pass, self.saved, grads[0]
        asked = forward_pass.begin_record(call.path)
        if self._kept:
            self.check_kept(call)
        if saved and saved[0]._version != self.version:
            raise StepError(
                f"{call.name}() in module '{call.path}': its input was modified by an inplace operation between the "
                "forward and the backward (one behind it, or as a buffer for the next batch), so the gradients would "
                "be of other numbers. Write into a clone()."
            )
        if not (asked and forward_pass.batch):
            return
        self.saved, self.made = (), ()
        if grad is None:
            return
        with exactly():
            whole = (grad if grad.shape == self.shape else grad.reshape(self.shape),)
            if call.by_rows:
                forward_pass.arrived(call, (self, saved, whole))
            else:
                call.record_uses(self, saved, whole)


class Applied(NamedTuple):
    """One application of a captured call."""

    call: Captured
    ctx: Context
    data: tuple[Tensor, ...]
    out: Any


def applied(call: Captured, ctx: Context, *data: Tensor) -> Any:
    """The result of a captured call."""
    out = CaptureFunction.apply(ctx.forward_pass.token, call, ctx, *data)  # type: ignore[no-untyped-call]
    ctx.forward_pass.note_applied(Applied(call, ctx, data, out))
    return out


def capture(call: Captured, ctx: Context, *data: Tensor) -> Any:
    """The result of a captured call, in which the samples lie as in its data."""
    out = applied(call, ctx, *data)
    tag(out, call.layout)
    return out


class Nest:
    """The form of a result that is no single tensor: where its tensors stand among its leaves.

    Raises UncapturedUseError where it has none, or holds numbers: these would not be followed by sample.
    """

    def __init__(self, out: Any, place: str) -> None:
        self.leaves, self.form = tree_flatten(tuple(out) if type(out).__module__ == "torch.return_types" else out)
        self.kind = type(out)
        self.places = [n for n, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        odd = [leaf for leaf in self.leaves if not isinstance(leaf, Tensor | str | None)]
        if odd or not self.places:
            what = f"a {type(odd[0]).__name__} among its results" if odd else "no tensor"
            raise UncapturedUseError(
                f"{place} returns {what}: only tensors (and None) can be followed by sample. Return tensors, or "
                "register the functions within that take the parameters"
            )
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The result with these tensors."""
        out = tree_unflatten(self._placed(tensors, self.leaves), self.form)
        return self.kind(out) if self.kind.__module__ == "torch.return_types" else out

    def aligned(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """One value for each leaf: of the tensors these, None of the others."""
        return tuple(self._placed(values, [None] * len(self.leaves)))

    def _placed(self, values: Sequence[Any], among: Sequence[Any]) -> list[Any]:
        found = list(among)
        for place, value in zip(self.places, values, strict=True):
            found[place] = value
        return found
