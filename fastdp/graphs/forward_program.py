"""A recorded forward, and its backward from the gradients of its outputs: replayed apart, with the user's loss between.

The step that is recorded is forward, a weighted sum of the outputs as each sample's loss, and backward; all that is
checked of whole steps is checked of it. What is replayed of it are two parts: the forward, and what the backward makes
of the outputs' gradients. The weights, and the loss, are no part of either.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..batch_axis.layout import Layout, tag_of
from ..engine.gradients import Gradients
from ..engine.per_sample import PerSampleGradients
from ..engine.repeated_backward import Repeated
from ..errors import GraphError
from ..ops.common import autocast_kinds
from . import _RECORDING
from .batches import Batch, odd_leaf
from .guards import Guards
from .program import Cut, Program
from .python_code import Source, slots_in
from .recorder import Seam, Slot, memory_of
from .steps import StepProgram


class Outputs:
    """What a forward gave: how it is made, and the layout of each tensor. batch: its samples.

    kinds: shape, type and device of each tensor; reached: the numbers of those that a backward has come to.

    Raises GraphError where a replay cannot make it.
    """

    def __init__(self, out: Any, batch: int) -> None:
        self._leaves, self._spec = tree_flatten(out)
        self.batch, self.reached = batch, set[int]()
        self._places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        tensors = [self._leaves[place] for place in self._places]
        for place in self._places:
            self._leaves[place] = None
        if odd := odd_leaf(self._leaves):
            remedy = " (set model.config.use_cache = False)" if "Cache" in odd else ""
            raise GraphError(f"the forward gives a {odd}, which a replay cannot make{remedy}")
        self.kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self.requires_grad = [tensor.requires_grad for tensor in tensors]
        self.layouts = [_layout_of(tensor, batch) for tensor in tensors]

    def dim(self, number: int) -> int | None:
        """The dimension of a tensor along which the samples lie; None of a loss that the model computes."""
        layout = self.layouts[number]
        assert layout is not None
        return None if layout.mixed else layout.dim

    def watched(self, tensors: Sequence[Tensor]) -> Any:
        """The same, of copies that tell whether a backward comes to them: the model may have gone on with what it
        gives. (Of a view that is written to, a hook is lost.)"""
        apart = [tensor.clone() if tensor.requires_grad else tensor for tensor in tensors]
        for number, tensor in enumerate(apart):
            if tensor.requires_grad:
                _watch(tensor, self.reached, number)
        return self.tree(apart)

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """What a forward gives whose tensors are these."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._spec)


def _watch(tensor: Tensor, reached: set[int], number: int) -> None:
    """Note whether a backward comes to a tensor."""
    with torch._C.DisableTorchFunction():
        tensor.register_hook(lambda grad: reached.add(number))


def _layout_of(tensor: Tensor, batch: int) -> Layout | None:
    """The layout of an output, None if it is of no sample."""
    layout = tag_of(tensor, batch)
    if layout is None and not tensor.requires_grad:
        return None
    if layout is not None and layout.total and not tensor.dim():
        return layout  # a loss
    if layout is None or layout._replace(dim=0, inner=1) != Layout(batch):
        why = "whose rows lie in no order of the samples" if layout is None or not layout.mixed else layout.mixed
        raise GraphError(f"the forward gives a tensor of shape {tuple(tensor.shape)}: {why}")
    return layout


class Halves(NamedTuple):
    """The two parts of a program, as functions."""

    forward: Callable[..., Any]  # (*inputs) -> [outputs and what is saved], whether all that Python read is as it was
    backward: Callable[..., Any]  # (*gradients, [saved, inputs]) -> [data of uses], True
    inputs: list[int]  # numbers of the inputs that the backward takes
    written: set[int]  # numbers of the outputs into whose gradients the backward writes
    kept: set[int]  # numbers of the outputs whose memory the backward takes


class ForwardProgram(StepProgram):
    """A recorded forward of one size.

    module: what is called; example: what it gave, `tensors` the tensors of that; batch, leaves: an example of its
    arguments, (args, kwargs).

    Raises GraphError, by name, where the forward is not a function of its arguments and the parameters alone.
    """

    def __init__(
        self, engine: PerSampleGradients, module: Callable[..., Any], example: Outputs, batch: Batch,
        leaves: Sequence[Any], mean: bool,
    ) -> None:  # fmt: skip
        self._module, self.example, self.arguments = module, example, batch
        self.reached = sorted(example.reached)
        generator, weights = torch.Generator().manual_seed(0), []
        for number in self.reached:
            shape, dtype, device = example.kinds[number]
            rows = () if example.dim(number) is None else (batch.size, shape.numel() // example.batch)
            weights.append(torch.randn(rows, generator=generator).to(device, dtype))
        spec = tree_flatten((batch.tree(leaves), weights))[1]
        whole = Batch(spec, (*batch.by_sample, *(weight.dim() > 0 for weight in weights)), batch.size)
        super().__init__(engine, module, whole, [*leaves, *weights], mean)
        constants = {memory_of(self.program.held[number]) for number in self.program.constants}
        self.guards = Guards(engine.model, constants, self.written)
        self.halves = self._halves(sum(isinstance(leaf, Tensor) for leaf in leaves))

    def _losses(self, leaves: Sequence[Any]) -> Tensor:
        """Each sample's weighted sum of the outputs (else that of the model's losses), after its backward, which knows
        no autocast."""
        (args, kwargs), weights = self.batch.tree(leaves)
        torch.clear_autocast_cache()  # or weights that were cast before would pass for constants
        out = tensors_of(self._module(*args, **kwargs))
        seam = _RECORDING[-1].begin_backward(out) if _RECORDING else None
        with contextlib.ExitStack() as stack:
            for kind in autocast_kinds():
                stack.enter_context(torch.autocast(kind, enabled=False))
            parts: list[Tensor] = []
            totals: list[Tensor] = []
            for number, weight in zip(self.reached, weights, strict=True):
                apart = out[number].view_as(out[number])  # its gradient is of the loss alone
                if seam is not None:
                    _note(apart, seam, number)
                if (dim := self.example.dim(number)) is None:
                    totals.append(apart * weight)
                else:
                    parts.append((apart.movedim(dim, 0).reshape(weight.shape) * weight).sum(1))
            if parts:
                losses = sum(parts[1:], parts[0])
                totals.append(losses.mean() if self.mean else losses.sum())
            loss = sum(totals[1:], totals[0])
            loss.backward()  # type: ignore[no-untyped-call]
        return losses if parts else loss

    def _differs_padded(self, leaves: Sequence[Any], samples: int) -> str:
        if any(self.example.dim(number) is None for number in self.reached):
            return "the model computes a loss of all samples"
        return super()._differs_padded(leaves, samples)

    def _halves(self, inputs: int) -> Halves:
        program, cut = self.program, self.program.cut
        assert cut is not None
        seam, data = bisect.bisect_left(program.recorded, cut.place), len(cut.results)
        results, outputs = program.outputs[:data][1:], program.outputs[data:]
        gradients = [cut.gradients[number] for number in self.reached]
        places = _needed(program, seam, results, cut)
        operations = [program.operations[place] for place in places]
        source = Source(program.operations, program.read, program.held, program.device)
        taken = {slot.number for slot in (*results, *slots_in(*((op.args, op.kwargs) for op in operations)))}
        made = {slot.number for op in program.operations[:seam] for slot in slots_in(op.out)}
        saved = sorted(number for number in taken & made if not source.is_fixed(number))
        of_inputs = sorted(taken & set(range(inputs)))
        forward = source.function(range(seam), range(inputs), [*outputs, *map(Slot, saved)])
        backward = source.function(places, [each.slot for each in gradients], results, taken=[*saved, *of_inputs])
        memory = frozenset().union(*(op.reads for op in operations), cut.results[1:])
        writes = frozenset().union(*(op.writes for op in operations))
        written = {number for number, gradient in cut.gradients.items() if gradient.memory in writes}
        return Halves(forward, backward, of_inputs, written, {k for k, own in enumerate(cut.outputs) if own in memory})

    def of_backward(self, data: Sequence[Tensor], samples: int) -> Gradients:
        """The gradients of the first samples, from what the backward gave for a loss of so many samples."""
        scale = float(samples) if self.mean else 1.0
        found = Repeated(self.templates, data, samples, self.batch.size, scale, self._of, self._arranged)
        found.plan = self.plan
        return found


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors that a forward gives."""
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def _note(tensor: Tensor, seam: Seam, number: int) -> None:
    """Note the gradient that comes to a tensor."""

    def arrived(grad: Tensor) -> None:
        seam.gradients[number] = grad

    with torch._C.DisableTorchFunction():
        tensor.register_hook(arrived)


def _needed(program: Program, seam: int, results: Sequence[Slot], cut: Cut) -> list[int]:
    """The places behind the seam of operations that the results depend on, but for what made the outputs' gradients.

    Raises GraphError where Python read numbers there.
    """
    given = {gradient.slot for gradient in cut.gradients.values()}
    slots, memory = {slot.number for slot in results} - given, set(cut.results[1:])
    found = []
    for place in reversed(range(seam, len(program.operations))):
        operation = program.operations[place]
        made = {slot.number for slot in slots_in(operation.out)}
        if made & slots or operation.writes & memory or operation.draws:
            found.append(place)
            slots |= {slot.number for slot in slots_in(operation.args, operation.kwargs)} - given
            memory |= operation.reads
    if read := next((each for each in program.read if each.operation in found), None):
        raise GraphError(f"Python reads {read.value!r} in the backward, which a replay cannot take back")
    return found[::-1]
