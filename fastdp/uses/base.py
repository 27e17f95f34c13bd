"""What a use of a parameter is, and what a captured call does.

A *rule* turns a torch function call that combines parameters with data into a `Capture`: the forward runs
with the parameters detached, so autograd computes input gradients only; the backward hands the output
gradient to the rule, which records a `Use` for each parameter: enough to give the norms of the per-sample
gradients and their clipped sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BatchLayoutError, SampleMixingError, StepError
from ..layouts.calls import tensors_in
from ..layouts.layout import Layout, tag, tag_of
from ..layouts.positions import WHY, by_place, is_random, rows_alike
from ..layouts.rearranged import samplewise
from ..ops.bounds import enlarged
from ..ops.common import accumulate, chunks, exactly
from ..ops.rows import square_sum, weighted_sum
from .costs import Segments, Shape
from .forward_pass import Recorder
from .links import link_of
from .planner import Planner
from .saved import check_same, fingerprints
from .timing import Clock


class Use:
    """A recorded use of `operand` (a parameter, or a tensor derived from parameters) by one batch.

    Subclasses give the gradients with respect to the operand; all of a use's numbers are float32 or float64.
    """

    route = "materialise"
    overwrites = False  # whether clipped_sum can write into memory it is given
    shared = False  # whether a parameter of it has other uses
    shape: Shape | None = None  # as a matrix product, where it is one
    clock: Clock | None = None  # measures norm_sq and clipped_sum, where profiling is on

    def __init__(self, operand: Tensor, batch: int, name: str) -> None:
        self.operand, self.batch, self.name = operand, batch, name

    def plan(self, planner: Planner) -> None:
        """Take the route that the planner chooses."""

    def per_sample(self, low: int, high: int) -> Tensor:
        """Gradients of samples [low, high): [high - low, *operand.shape]."""
        raise NotImplementedError

    def chunks(self) -> Iterable[tuple[int, int]]:
        return chunks(self.batch, 4 * self.operand.numel())

    def norm_sq(self) -> Tensor:
        """Squared norms [B], enlarged where terms cancel, for the sums to stay within them."""
        parts = [square_sum(self.per_sample(low, high)) for low, high in self.chunks()]
        return enlarged(torch.cat(parts), self.rounding())

    def rounding(self) -> Tensor | None:
        """How far `clipped_sum` may be off a sample's gradient times its factor, for each factor: [B] float64.

        None: it is a sum of the very numbers that `per_sample` gives.
        """
        return None

    def clipped_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        """sum_b c_b gradient_b, of the operand's shape; samples with c_b = 0 are not read as numbers.

        into: float32 memory of that shape on the CPU which the result may take, contents lost.
        """
        total = None
        for low, high in self.chunks():
            part = weighted_sum(self.per_sample(low, high), c[low:high])
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def data(self) -> tuple[Tensor, ...]:
        """The tensors that the use holds until the end of backward."""
        return tuple(v for v in vars(self).values() if isinstance(v, Tensor) and v is not self.operand)

    def holds(self) -> tuple[Tensor, ...]:
        """These, and what functions hold that the use is to call."""
        return self.data()

    def versions(self) -> int:
        """Grows with every write in place to what the use holds."""
        return sum([t._version for t in self.holds() if not t.is_inference()])

    @property
    def short(self) -> bool:
        """Whether it holds 16-bit numbers."""
        return any(t.dtype in (torch.bfloat16, torch.float16) for t in self.data())

    def held_bytes(self) -> int:
        """Memory that the use holds until the end of backward."""
        return sum(t.nbytes for t in self.data())

    def segments(self) -> Segments | None:
        """Of routed rows: for the table, without the rows."""
        return None


class Direct(Use):
    """Per-sample gradients that are small enough to keep: biases, norm layers, broadcast parameters."""

    route = "kept"

    def __init__(self, operand: Tensor, grads: Tensor, name: str, shape: Shape | None = None) -> None:
        super().__init__(operand, grads.size(0), name)
        self.grads = accumulate(grads)  # [B, *operand.shape]
        if shape is not None:  # of a product that the planner chose to materialise
            self.shape, self.route = shape, "materialise"
        assert grads.shape[1:] == operand.shape, (name, grads.shape, operand.shape)

    def data(self) -> tuple[Tensor, ...]:
        return (self.grads,)

    def per_sample(self, low: int, high: int) -> Tensor:
        return self.grads[low:high]

    def norm_sq(self) -> Tensor:
        return square_sum(self.grads)

    def clipped_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        return weighted_sum(self.grads, c)


class Lazy(Use):
    """Per-sample gradients computed when asked for, in chunks of samples."""

    def __init__(self, operand: Tensor, batch: int, name: str, compute: Callable[[int, int], Tensor]) -> None:
        super().__init__(operand, batch, name)
        self.compute = compute

    def holds(self) -> tuple[Tensor, ...]:
        cells = [cell.cell_contents for cell in getattr(self.compute, "__closure__", None) or ()]
        found = tensors_in([*cells, *getattr(self.compute, "args", ())])
        return tuple(tensor for tensor in found if tensor is not self.operand)

    def per_sample(self, low: int, high: int) -> Tensor:
        return accumulate(self.compute(low, high))


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
    """One captured call. Rules subclass it: `run` is the forward, `back` the backward.

    data: the tensors that carry samples, differentiable or not; what is saved for backward.
    """

    def __init__(self, recorder: Recorder, name: str, path: str) -> None:
        self.recorder, self.name, self.path = recorder, name, path
        self.inner: tuple[list[Tensor], Any] | None = None
        self.again: _Again | None = None  # the call runs once more in backward, instead of keeping a graph
        self._kept: list[tuple[Tensor, int]] = []

    @property
    def batch(self) -> int:
        return self.recorder.batch

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
        """What `back` needs of the data."""
        return data

    def back(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
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
        asked = call.recorder.begin_record(call.path)
        call.check_kept()
        kept = ctx.saved_tensors
        check_same(kept, ctx.fingerprints, call.name, call.path)
        saved, data = kept[: ctx.saved_count], kept[ctx.saved_count :]
        if call.batch and asked:
            with exactly():
                call.back(saved, grads)
        if call.again is not None:
            call.run_again(data)
        inputs = call.input_grads(saved, grads)
        inputs += [None] * (ctx.count - len(inputs))
        return (None, None, *inputs)


def capture(call: Captured, *data: Tensor, layout: Layout | None) -> Any:
    """Run a captured call and tag its result."""
    out = CaptureFunction.apply(call.recorder.token_for(data), call, *data)  # type: ignore[no-untyped-call]
    if layout is not None:
        for tensor in (out,) if isinstance(out, Tensor) else out:
            tag(tensor, layout)
    return out


# --------------------------------------------------------------------------- rules

Rule = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions: rule(recorder, function, args, kwargs) -> result, or NotImplemented."""

    def register(function: Rule) -> Rule:
        for torch_function in functions:
            RULES[torch_function] = function
        return function

    return register


def sample_layout(recorder: Recorder, tensor: Tensor, name: str) -> Layout:
    """The layout of data that meets a parameter; refuses what cannot be attributed to samples."""
    layout = tag_of(tensor, recorder.batch) or recorder.guess_layout(tensor)
    place = recorder.place(name)
    if layout is None:
        raise BatchLayoutError(
            f"{place}: cannot tell which rows of an input of shape {tuple(tensor.shape)} belong to which of the "
            f"{recorder.batch} samples: its origin was not seen (a custom autograd function, perhaps). Call the "
            "model with the samples along the first dimension, or give batch_size= and batch_first=."
        )
    if layout.batch > 1 and not layout.mixed and tensor.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        raise BatchLayoutError(
            f"{place}: an input of shape {tuple(tensor.shape)} was believed to hold {layout.rows} rows along "
            f"dimension {layout.dim}: a gap in fastdp's layout rules. Please report the model."
        )
    if layout.mixed:
        raise SampleMixingError(
            f"{place}: its input depends on several samples: {layout.mixed}. Per-sample gradients do not exist "
            "for such a model; remove the operation, or use one that works on each sample alone.",
            layout.mixed,
        )
    if layout.places and layout.batch > 1:
        raise SampleMixingError(
            f"{place}: takes the places of rows in the batch, which depend on the other samples, for data. Use "
            "positions within a sample.",
            f"{place} takes places of rows for data",
        )
    return layout


def refuse_contraction(recorder: Recorder, layout: Layout, dim: int, name: str) -> None:
    """A product that sums over the dimension in which the samples lie."""
    if layout.batch > 1 and layout.dim == dim:
        raise SampleMixingError(
            f"{recorder.place(name)}: sums over dimension {dim}, along which the samples lie: each output depends on "
            "all samples. If the model takes samples along another dimension, transpose its input, or give "
            "batch_first=False."
        )


def refuse_by_position(recorder: Recorder, operand: Tensor, layout: Layout, ndim: int, name: str) -> None:
    """A parameter with numbers for each row, beside rows whose order other samples decide."""
    dim = layout.dim - ndim + operand.dim()
    if layout.batch <= 1 or not 0 <= dim < operand.dim() or operand.size(dim) == 1:
        return
    place = recorder.place(name)
    if layout.order is None and by_place(operand, dim, layout):
        what = "a parameter" if recorder.is_parameter(operand) else "a constant"
        raise SampleMixingError(f"{place}: {what} {WHY}.", f"{place}: {what} {WHY}")
    if (
        layout.order is None
        and recorder.is_parameter(operand)
        and layout.alone < 0
        and not is_random(operand)
        and not _alike(operand, dim, layout)
    ):
        raise SampleMixingError(f"{place}: a parameter {WHY}.", f"{place}: a parameter {WHY}")
    if layout.order is not None:
        raise SampleMixingError(
            f"{place}: a parameter meets rows by their position, in an order that depends on other samples. Restore "
            "the order first.",
            f"{place} meets a parameter with rows whose order depends on the data",
        )


def _alike(operand: Tensor, dim: int, layout: Layout) -> bool:
    """Whether a parameter, or what is made of it, has the same numbers for all rows of a dimension."""
    link = link_of(operand)
    if link is not None and link.kind == "broadcast":
        above = dim - operand.dim() + link.parent.dim()
        return above < 0 or link.parent.size(above) == 1 or _alike(link.parent, above, layout)
    if link is not None and link.kind == "lookup" and link.ids is not None and dim < link.ids.dim():
        return rows_alike(link.ids, dim, layout)
    if link is None or link.isometric:  # numbers of its own for each row, also while they happen to be equal
        return operand.stride(dim) == 0
    return rows_alike(operand, dim, layout, computed=True)


def cut(tensor: Tensor, layout: Layout) -> Tensor:
    """`samplewise`, also in a batch of one, where every row belongs to the one sample."""
    return tensor.unsqueeze(0) if layout.batch == 1 else samplewise(tensor, layout)
