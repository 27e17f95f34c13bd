"""Recording the forward, loss and backward of a batch of one size, twice, and replaying it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from ..engine.bundle import Arrangement
from ..engine.explain import Plan
from ..engine.gradients import Gradients
from ..engine.per_sample import PerSampleGradients
from ..errors import GraphError
from ..ops.common import exactly
from . import _RECORDING
from .guards import Guards, Outside
from .program import Program, recording_of
from .recorder import Recorder, Watch
from .templates import Template, filled, store, templates_of

LossFn = Callable[..., Tensor]  # (model, *batch) -> losses [B]
_REHEARSALS = 2  # real passes before the recording, for what is found out once


class Batch(NamedTuple):
    """How a batch is made: its leaves, of which some have a row for each sample."""

    spec: TreeSpec
    by_sample: tuple[bool, ...]
    size: int

    def tree(self, leaves: Sequence[Any]) -> Any:
        return tree_unflatten(list(leaves), self.spec)


class StepProgram:
    """A recorded step of one size. leaves: an example of its batch, of that size.

    Raises GraphError, by name, where the step is not a function of the batch and the parameters alone.
    """

    def __init__(
        self, engine: PerSampleGradients, loss_fn: LossFn, batch: Batch, leaves: Sequence[Any], mean: bool
    ) -> None:
        self.batch, self.mean = batch, mean
        self._engine, self._loss_fn = engine, loss_fn
        self._arranged: dict[tuple[int, ...], Arrangement] = {}
        held = Guards(engine.model).held()
        outside = Outside(held)
        try:
            for _ in range(_REHEARSALS):
                self._pass(leaves)
            self.program, self.templates, self.plan = self._recorded(leaves, held)
            others = [self._recorded(self._changed(leaves, change), held)[0] for change in (_in_turn, _one_twice)]
            outside.check()
        finally:
            outside.restore()
        self._check_same(*others)
        for number in self.program.constants:
            shape = tuple(self.program.held[number].shape)
            if batch.size > 1 and batch.size in shape:
                raise GraphError(
                    f"the step takes a tensor of shape {shape} that is neither of its batch nor made of it: if it is "
                    "of the samples, pass it as an argument of the loss function"
                )

    def _changed(self, leaves: Sequence[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
        return [change(leaf) if by else leaf for leaf, by in zip(leaves, self.batch.by_sample, strict=True)]

    def _check_same(self, in_turn: Program, one_twice: Program) -> None:
        """Raises GraphError unless recordings of other batches are the same program."""
        difference = self.program.difference(in_turn)
        if not difference and not self.program.went_another_way(one_twice):
            difference = self.program.difference(one_twice)
        if difference:
            raise GraphError(
                f"the step is not the same for two batches of one size: {difference}. What Python decides by the "
                "numbers of a batch cannot be replayed"
            )

    def _pass(self, leaves: Sequence[Any]) -> tuple[Tensor, Gradients]:
        """A real forward and backward, whose gradients nobody else hears of."""
        with self._engine.collecting() as found:
            losses = self._losses(_copies(leaves))
        if len(found) != 1:
            raise GraphError("the backward of the losses met no trained parameter, or several backwards ran")
        return losses, found[0]

    def _losses(self, leaves: Sequence[Any]) -> Tensor:
        losses = self._loss_fn(self._engine.model, *self.batch.tree(leaves))
        check_losses(losses, self.batch.size)
        (losses.mean() if self.mean else losses.sum()).backward()
        return losses

    def _recorded(self, leaves: Sequence[Any], held: dict[str, Tensor]) -> tuple[Program, list[Template], Plan]:
        given = _copies(leaves)
        inputs = [leaf for leaf in given if isinstance(leaf, Tensor)]
        recorder = Recorder(inputs, held)
        _RECORDING.append(recorder)
        try:
            with self._engine.collecting() as found, Watch(recorder), recorder:
                losses = self._losses(given)
                for gradients in found:
                    with torch.no_grad(), exactly():
                        store(gradients)
        finally:
            _RECORDING.pop()
        if len(found) != 1:
            raise GraphError("the backward of the losses met no trained parameter, or several backwards ran")
        templates, data = templates_of(found[0])
        return Program(recording_of(recorder, len(inputs), [losses, *data])), templates, Plan(found[0])

    def replay(self, leaves: Sequence[Any], samples: int) -> tuple[Tensor, Gradients] | None:
        """The losses [samples] and gradients of the first samples; None where the numbers of the batch decide another
        way than that of the recording."""
        inputs = [_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        found, same = self.program.run(inputs)
        if not same:
            return None
        losses, *data = found
        return losses[:samples], self.gradients(data, samples)

    def gradients(self, data: Sequence[Tensor], samples: int) -> Gradients:
        """The gradients of the first samples, from what a replay gave."""
        return filled(self.templates, data, samples, float(self.batch.size) if self.mean else 1.0, self._arranged)

    def none(self) -> Gradients:
        """The gradients of no sample."""
        return self.gradients([torch.empty(0)] * sum(len(t.places) for t in self.templates), 0)


def _plain(leaf: Tensor) -> Tensor:
    """With its numbers one after the other from the begin of its memory, as they were when the step was recorded."""
    plain = leaf.is_contiguous() and leaf.storage_offset() == 0
    return leaf if plain else leaf.clone(memory_format=torch.contiguous_format)


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """The batch in memory of its own."""
    copied = torch.contiguous_format
    return [leaf.detach().clone(memory_format=copied) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _in_turn(leaf: Tensor) -> Tensor:
    """The same samples in another order."""
    return leaf.roll(1, 0)


def _one_twice(leaf: Tensor) -> Tensor:
    """One sample is missing, another there twice: a number beside torch that Python makes of a batch shows by it."""
    if leaf.size(0) > 1:
        return torch.cat([leaf[1:], leaf[-1:]])
    return leaf * 0.5 if leaf.is_floating_point() else leaf


def check_losses(losses: Any, size: int) -> None:
    """Raises GraphError unless it is a tensor of one loss for each sample."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise GraphError(
            f"loss_fn(model, *batch) must return the loss of each sample, [{size}]; it returned {found}. Compute "
            'losses with reduction="none", and one number per sample'
        )
