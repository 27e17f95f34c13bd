"""One replay of a recorded forward: its outputs, as autograd sees them, and its backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.inputs import nested_tensors
from ..batch_axis.layout import tag, tag_of
from ..engine.capture import Pass
from ..errors import StepError
from ..ops.common import autocast_kinds, exactly
from ..utils.pytree import tensors_of
from ..utils.rng_state import States, random_states, set_random_states
from .batches import plain
from .execution import differing
from .forward_program import ForwardProgram, leaves_of
from .halves import Saved


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
        self._told_again = again
        kinds = [kind for kind in autocast_kinds() if torch.is_autocast_enabled(kind)]
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
        self._random: States | None = random_states(program.device) if program.program.draws else None
        self._saved: Saved | int = 0  # what the backward takes, or the number of the CUDA graph's launch
        self.over = False  # the backward has run

    def run(self) -> Any:
        """What the forward gives; None where Python decides by the numbers of this batch another way."""
        example = self.program.example
        with torch._C.DisableTorchFunction():
            found = self._found()
            if found is None:
                if self._random is not None:
                    set_random_states(self._random)
                return None
            outputs = [self._cut(number, tensor) for number, tensor in enumerate(found)]
            del found
            self._before, self._all_before = self._versions(), self._versions_of_all()
            differ = [outputs[number] for number, wants in enumerate(example.requires_grad) if wants]
            _Replayed.apply(self._pass.token, self, differ)  # type: ignore[no-untyped-call]
            for own, layout, notes in zip(outputs, example.layouts, example.notes, strict=True):
                tag(own, None if layout is None else layout._replace(batch=self._samples))
                own.__dict__.update(notes)
        self._pass.backward.counted = False  # uses are known when the backward comes
        return self.program.tree(outputs)

    def outputs(self) -> list[Tensor] | None:
        """The outputs alone, as numbers; the generators are as they were. None where Python decides another way."""
        before = random_states(self.program.device)
        with torch._C.DisableTorchFunction():
            outputs, _, same = self.program.halves.forward(self._inputs)
            set_random_states(before)
            return [self._cut(number, tensor).clone() for number, tensor in enumerate(outputs)] if same else None

    def gives(self, outputs: Sequence[Tensor], out: Any) -> bool:
        """Whether outputs of a replay are what Python gave, within rounding."""
        with torch._C.DisableTorchFunction():
            own = [tensor.detach() for tensor in tensors_of(out)]
            if [tensor.shape for tensor in own] != [tensor.shape for tensor in outputs]:
                return False
            rows = [[tensor.contiguous() for tensor in each] for each in (outputs, own)]
            return not differing(self.program.program, *rows) and self.program.leaves == leaves_of(out)

    def _found(self) -> list[Tensor] | None:
        captured = self.program.captured
        if captured is None or not captured.free():  # the memory of the graphs is another replay's yet
            outputs, self._saved, same = self.program.halves.forward(self._inputs)
            return outputs if same else None
        outputs, same = captured.forward(self._inputs, self)
        self._saved = captured.number
        return outputs if same else None

    def _versions(self) -> list[int]:
        """Of what the backward takes of the model and of the batch."""
        taken = [self._inputs[number] for number in self.program.halves.of_inputs]
        return _versions_of((*self.program.halves.fixed, *taken))

    def _versions_of_all(self) -> list[int]:
        """Of all that the forward took."""
        return _versions_of((*self.program.program.held.values(), *tensors_of(self._given)))

    def _cut(self, number: int, tensor: Tensor) -> Tensor:
        """An output without padding, in memory that the backward does not take, and no view."""
        layout = self.program.example.layouts[number]
        with torch.no_grad():
            if layout is not None and self._samples < self.program.batch.size:
                tensor = tensor.narrow(layout.dim, 0, self._samples * layout.inner)
            if number in self.program.halves.kept and isinstance(self._saved, list):
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
        program, self.over = self.program, True
        differ = [number for number, wants in enumerate(program.example.requires_grad) if wants]
        by_number = {number: grad for number, grad in zip(differ, grads, strict=True) if grad is not None}
        if sorted(by_number) != program.reached:
            self._saved = 0
            self._again(by_number)
            return
        with torch.no_grad(), exactly():
            dims = map(program.example.dim, program.reached)
            given = [program.halves.laid(k, by_number[k], dim) for k, dim in zip(program.reached, dims, strict=True)]
            saved, lasting, self._inputs = self._saved, None, []
            self._saved = 0
            if isinstance(saved, list):
                data = program.halves.backward(given, saved)
            else:
                assert program.captured is not None
                data = program.captured.backward(given, saved)
                lasting = functools.partial(program.captured.check, program.captured.number)
            self._given = None
        backward.take(program.of_backward(data, self._samples, lasting))

    def _again(self, grads: dict[int, Tensor]) -> None:
        """Run the forward again by Python, as checkpointing does, and go through that."""
        self._told_again()
        changed = "a tensor was written to" if self._versions_of_all() != self._all_before else ""
        if changed := changed or self.program.guards.model_changed():
            raise StepError(
                "the loss takes other outputs of the model than before, and its forward cannot be made again, as "
                f"it was changed since ({changed}). Change it after the backward"
            )
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


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


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
