"""One replay of a recorded forward: its outputs, as autograd sees them, and its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.inputs import nested_tensors
from ..batch_axis.layout import tag, tag_of
from ..engine.capture import Pass
from ..errors import StepError
from ..ops.common import autocast_kinds, exactly
from ..utils.rng_state import States, random_states, set_random_states
from .batches import plain
from .forward_program import ForwardProgram, tensors_of


class Replay:
    """A replay of `program` within a pass.

    call: the module's own forward; given: its (args, kwargs), with these leaves; samples: in the batch, which may be
    less than the program's. again: told if the loss takes other outputs than when the forward was recorded.
    """

    def __init__(
        self, program: ForwardProgram, forward_pass: Pass, call: Callable[..., Any], given: Any, leaves: Sequence[Any],
        samples: int, again: Callable[[], None],
    ) -> None:  # fmt: skip
        self.program, self._pass, self._call = program, forward_pass, call
        self._given, self._samples, self._path = given, samples, forward_pass.path
        padded = program.arguments.of_size(leaves, program.batch.size)
        self._inputs = [plain(leaf) for leaf in padded if isinstance(leaf, Tensor)]
        self._told_again, self._autocast = (
            again,
            {kind: torch.get_autocast_dtype(kind) for kind in autocast_kinds() if torch.is_autocast_enabled(kind)},
        )
        self._random: States | None = random_states(program.device) if program.program.draws else None
        self._saved: list[Tensor] = []

    def run(self) -> Any:
        """What the forward gives; None where Python decides by the numbers of this batch another way."""
        program, example = self.program, self.program.example
        with torch._C.DisableTorchFunction(), torch.no_grad():
            found, same = program.halves.forward(*self._inputs)
            if not same:
                if self._random is not None:
                    set_random_states(self._random)
                return None
            count = len(example.kinds)
            self._saved = found[count:]
            outputs = [self._cut(number, tensor) for number, tensor in enumerate(found[:count])]
            del found
            self._before = self._versions()
        differ = [outputs[number] for number, wants in enumerate(example.requires_grad) if wants]
        with torch._C.DisableTorchFunction():
            _Replayed.apply(self._pass.token, self, differ)  # type: ignore[no-untyped-call]
            for own, layout in zip(outputs, example.layouts, strict=True):
                tag(own, None if layout is None else layout._replace(batch=self._samples))
        self._pass.backward.replays_forward()
        return example.tree(outputs)

    def _versions(self) -> list[int]:
        """Of the parameters, and of what the backward takes of the batch."""
        taken = [self._inputs[number] for number in self.program.halves.inputs]
        return [t._version for t in (*self.program.program.held.values(), *taken) if not t.is_inference()]

    def _cut(self, number: int, tensor: Tensor) -> Tensor:
        """An output without padding, in memory that the backward does not take, and no view."""
        layout = self.program.example.layouts[number]
        if layout is not None and self._samples < self.program.batch.size:
            tensor = tensor.narrow(layout.dim, 0, self._samples * layout.inner)
        if number in self.program.halves.kept:
            return tensor.clone()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor)  # type: ignore[call-overload]

    # ------------------------------------------------------------------ its backward

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        """Hand the gradients of parameters to the engine, from those of the outputs that require grad."""
        backward = self._pass.backward
        if not self._pass.begin_record(self._path):
            return
        if self._versions() != self._before:
            raise StepError(
                "the parameters, or the batch, were written to between a replayed forward and its backward: its "
                "gradients are of what they were. Make the step before the next forward, and write into a clone()"
            )
        differ = [number for number, wants in enumerate(self.program.example.requires_grad) if wants]
        by_number = {number: grad for number, grad in zip(differ, grads, strict=True) if grad is not None}
        saved, self._saved = self._saved, []
        if sorted(by_number) != self.program.reached:
            self._again(by_number)
            return
        with torch.no_grad(), exactly():
            given = [self._laid(number, by_number[number]) for number in self.program.reached]
            saved += [self._inputs[number] for number in self.program.halves.inputs]
            self._inputs = []
            data, _ = self.program.halves.backward(*given, *([saved] if saved else []))
        backward.take(self.program.of_backward(data, self._samples))

    def _laid(self, number: int, grad: Tensor) -> Tensor:
        """The gradient of an output as it lay in the recording, with zeros for the samples of the padding."""
        assert self.program.program.cut is not None
        known = self.program.program.cut.gradients[number]
        if grad.shape == known.shape and grad.stride() == known.stride:
            return grad.clone() if number in self.program.halves.written else grad
        laid = torch.empty_strided(known.shape, known.stride, dtype=grad.dtype, device=grad.device)
        if (dim := self.program.example.dim(number)) is None:
            return laid.copy_(grad)
        laid.narrow(dim, 0, grad.size(dim)).copy_(grad)
        laid.narrow(dim, grad.size(dim), laid.size(dim) - grad.size(dim)).zero_()
        return laid

    def _again(self, grads: dict[int, Tensor]) -> None:
        """Run the forward again by Python, as checkpointing does, and go through that."""
        self._told_again()
        args, kwargs = self._given
        layouts = [tag_of(tensor, self._pass.batch) for tensor in nested_tensors(self._given)]
        forward: Any = self._pass.engine
        after = random_states(self.program.device)
        if self._random is not None:
            set_random_states(self._random)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for kind, dtype in self._autocast.items():
                    stack.enter_context(torch.autocast(kind, dtype))
                own = self._path, self._pass.batch, self._given, layouts, self._pass.moment
                stack.enter_context(forward.again(*own))
                out = tensors_of(self._call(*args, **kwargs))
        finally:
            set_random_states(after)
        torch.autograd.backward([out[number] for number in grads], list(grads.values()))


class _Replayed(torch.autograd.Function):
    """Makes the outputs of a replay differentiable."""

    of_fastdp = True

    @staticmethod
    def forward(ctx: Any, token: Tensor, replay: Replay, outputs: Sequence[Tensor]) -> Any:
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.replay.backward(grads)
        return None, None, None
