"""A private step whose forward and backward are replayed: what `optimizer.graphed` returns.

What makes a step private is the code of every other step: norms, factors, sums, noise and ledger. What is replayed is
only what autograd would have computed for them, the losses and each use's data.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..batch_axis.inputs import mark_of
from ..data import loop_checks
from ..engine.gradients import Gradients
from ..errors import FastDPError, GraphError, StepError, VerificationError
from ..graphs.batches import Batch, copies, odd_leaf
from ..graphs.cuda_graph import Pool, device_of
from ..graphs.execution import tolerances
from ..graphs.guards import Guards
from ..graphs.recorder import memory_of
from ..graphs.steps import OTHER_ROWS, LossFn, StepProgram, check_losses, close, device_of_model
from ..ops.common import exactly
from ..utils.rng_state import States, random_states, set_random_states
from .graphed_loss import Begun, ReplayedSteps
from .private_step import PrivateStep

_RECORDINGS = 8  # of one step, at most: what changes every time is not worth one
_TOLERANCE = 1e-4


class GraphedStep(ReplayedSteps):
    """`step(*batch)` makes one private step and returns its loss, detached: the mean (or sum) over the samples.

    fixed: the places of tensors in the batch that are not of the samples, though they may have as many rows.
    replayed, eager: how many batches went either way; reasons: why those did not, by how many.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, privacy: PrivateStep, loss_fn: LossFn, example_batch: Sequence[Any],
        sizes: Iterable[int] | None, verify_every: int, fixed: Collection[int] = (),
        compile: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, privacy.loss_reduction == "mean")
        self._privacy, self._loss_fn = privacy, loss_fn
        self._verify_every, self._compile = verify_every, compile
        self._known: list[tuple[Guards, dict[int, StepProgram]]] = []  # the recordings, each of a state of the model
        self.replayed = self.eager = 0
        self.reasons: dict[str, int] = {}
        if privacy.engine.planner.memory_budget is not None:
            raise GraphError("memory_budget= runs blocks again within backward, which is not recorded: leave it out")
        if privacy.engine.profile:
            raise GraphError("explain(profile=True) measures every use of a step: graph before, or without it")
        leaves, spec = tree_flatten(tuple(example_batch))
        size = _size(leaves)
        by_sample = [isinstance(t, Tensor) and t.dim() > 0 and t.size(0) == size for t in leaves]
        self._batch = Batch(spec, tuple(by and place not in fixed for place, by in enumerate(by_sample)), size)
        self._example = copies(leaves)
        self.sizes = sorted(set(sizes or (size,)))
        if self.sizes[0] < 1 or not all(isinstance(size, int) for size in self.sizes):
            raise ValueError(f"sizes must be whole numbers of samples, 1 or more, not {self.sizes}")
        self._programs: dict[int, StepProgram] = {}
        self._device = device_of_model(privacy.engine)
        device = device_of(self._device)
        self._pool = None if device is None else Pool(device)
        self._guards = Guards(privacy.engine.model)
        self._record()

    def _turn(self) -> None:
        """The model is not as it was when the step was recorded: as for another recording, or for a new one."""
        for guards, programs in self._known:
            if not guards.changed():
                self._guards, self._programs = guards, programs
                return
        self._record()

    def _record(self) -> None:
        """Record the step of each size; if that fails, all stays as it was."""
        privacy = self._privacy
        if len(self._known) == _RECORDINGS:
            raise GraphError(
                f"the step was recorded {_RECORDINGS} times, and is another again ({self._guards.changed()}): make one "
                "graphed step for each way, or train without"
            )
        if others := privacy.engine.others():
            raise GraphError(
                f"{len(others)} parameter(s) require grad and are not this optimizer's ({others[0]}): a replay has "
                "no gradients for them. Freeze them, or give them to this optimizer"
            )
        if not torch.is_grad_enabled():
            raise StepError("a step was called with gradients switched off")
        if privacy.pending():
            raise StepError("a step cannot be recorded between a backward and its step")
        programs = {}
        for size in self.sizes:
            batch = self._batch._replace(size=size)
            try:
                programs[size] = StepProgram(
                    privacy.engine, self._loss_fn, batch, self._example, self._mean, self._compile, self._pool
                )
            except (RuntimeError, ValueError, IndexError) as problem:
                if isinstance(problem, FastDPError) or size == self._batch.size:
                    raise
                raise GraphError(
                    f"the step fails on a batch of {size} samples made of the example's {self._batch.size}: {problem}. "
                    "An argument with as many rows as the example has samples is taken to be of the samples: if one is "
                    "not, give an example of another size"
                ) from problem
        constants = {
            memory_of(program.program.held[number])
            for program in programs.values() for number in program.program.constants
        }  # fmt: skip
        written = [note for program in programs.values() for note in program.written]
        read = {attribute for program in programs.values() for attribute in program.read}
        self._guards, self._programs = Guards(privacy.engine.model, constants, written, read), programs
        self._known.append((self._guards, programs))

    @property
    def compiled(self) -> bool:
        """Whether Inductor's code is what replays (`compile=True`), for every size."""
        return all(program.way.compiled for program in self._programs.values())

    @property
    def captured(self) -> bool:
        """Whether replays are launches of a CUDA graph, for every size."""
        return all(program.way.captured is not None for program in self._programs.values())

    # ------------------------------------------------------------------ the step

    def _begin(self, batch: tuple[Any, ...]) -> Begun:
        if self._privacy.detached:
            raise StepError(loop_checks.gone(self._privacy.replaced_by))
        leaves, spec = tree_flatten(batch)
        why, samples = self._unlike(leaves, spec)
        if why:
            return self._eagerly(batch, why)
        if self._guards.changed():
            self._turn()
        if samples == 0:
            return self.begin_nothing(batch)
        fits = [size for size in self.sizes if size >= samples and (size == samples or not self._programs[size].only)]
        if not fits:
            why = next(program.only for size, program in self._programs.items() if size >= samples)
            return self._eagerly(batch, f"the step is another for other numbers of samples: {why}")
        size, program = fits[0], self._programs[fits[0]]
        if not program.may_take(leaves, samples):
            return self._eagerly(batch, OTHER_ROWS)
        returns = program.program.draws and (program.program.read or self._verify_every)
        draws = random_states(self._device) if returns else None
        found = program.replay(self._batch.of_size(leaves, size), samples)
        if found is None:
            if draws is not None:
                set_random_states(draws)
            return self._eagerly(batch, "Python decides by the numbers of this batch another way")
        losses, gradients = found
        if self._verify_every and self.replayed % self._verify_every == 0 and (draws is None or size == samples):
            self._verify(batch, samples, gradients, draws, program)
        self.replayed += 1
        return losses, functools.partial(self._hand_over, batch, gradients, program)

    def begin_nothing(self, batch: tuple[Any, ...]) -> Begun:
        """Of a batch without samples."""
        program = self._programs[self.sizes[0]]
        return torch.zeros(0, device=self._device), functools.partial(self._hand_over, batch, program.none(), program)

    def _hand_over(self, batch: Any, gradients: Gradients, program: StepProgram) -> None:
        """To the engine, as a backward does: norms are taken, and clipped sums."""
        gradients.plan = program.plan
        self._privacy.engine.replayed(batch, gradients)

    def _unlike(self, leaves: list[Any], spec: Any) -> tuple[str, int]:
        """Why a batch does not fit the recording, "" if it does, and its samples."""
        if spec != self._batch.spec:
            raise GraphError(f"the batch is made of other parts than the example: {spec}, not {self._batch.spec}")
        if self._privacy.engine.grouped() or any(isinstance(leaf, Tensor) and mark_of(leaf) for leaf in leaves):
            raise GraphError("group_by() and mark_rows() say of each batch whose its rows are: train without graphed()")
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise GraphError("a tensor of the batch requires grad, which a replay does not compute: detach() it")
        samples = {len(leaf) for leaf, by in zip(leaves, self._batch.by_sample, strict=True) if by}
        if len(samples) != 1:
            raise GraphError(f"the tensors of the batch have {sorted(samples)} rows: one for each sample is needed")
        count = samples.pop()
        for leaf, known, by in zip(leaves, self._example, self._batch.by_sample, strict=True):
            if not isinstance(known, Tensor):
                if type(leaf) is not type(known) or leaf != known:
                    return "an argument that is no tensor differs from the example's", count
            elif leaf.dtype != known.dtype or leaf.device != known.device or leaf.shape[by:] != known.shape[by:]:
                return f"a tensor of shape {tuple(leaf.shape)} {leaf.dtype} is not as the example's", count
        if count > self.sizes[-1]:
            return f"the batch has more samples than the largest size, {self.sizes[-1]}", count
        return "", count

    def _eagerly(self, batch: Any, why: str) -> Begun:
        """Of a batch that no recording fits."""
        kind = why.split(" of shape")[0]
        if kind not in self.reasons:
            warnings.warn(f"a batch is not replayed but goes through Python: {why}", stacklevel=5)
        self.reasons[kind] = self.reasons.get(kind, 0) + 1
        self.eager += 1
        return losses_of(self._privacy.engine.model, self._loss_fn, batch), None

    def _verify(self, batch: Any, samples: int, gradients: Gradients, draws: States | None,
                program: StepProgram) -> None:  # fmt: skip
        """Raises VerificationError where the replay is not what Python makes of the same batch."""
        after = random_states(self._device)
        with contextlib.ExitStack() as stack:
            if draws is not None:
                set_random_states(draws)
                stack.callback(set_random_states, after)
            found = stack.enter_context(self._privacy.engine.collecting())
            again = losses_of(self._privacy.engine.model, self._loss_fn, batch)
            (again.mean() if self._mean else again.sum()).backward()
        params, ones = self._privacy.engine.parameters(), torch.ones(samples, device=self._device)
        with torch.no_grad(), exactly():
            norms = [each.norm_sq(params).sqrt() for each in (gradients, found[0])]
            sums = [each.clipped_sum(ones, params) for each in (gradients, found[0])]
        # Inductor rounds 16-bit numbers in another order
        off = max(_TOLERANCE, tolerances(program.program, ())[0] / 10) if program.way.compiled else _TOLERANCE
        wrong = [] if close(off, *norms) else ["norms"]
        wrong += [name for name, p in self._privacy.engine.named_parameters().items()
                  if not close(off, *(each.get(id(p), torch.zeros_like(p)) for each in sums))]  # fmt: skip
        if wrong:
            raise VerificationError(
                f"the replayed step is not the one that Python makes of this batch: {', '.join(wrong[:5])} differ. The "
                "forward or the loss depends on something beside its batch and the parameters (a counter, an attribute "
                "that changes): pass it as an argument, or train without graphed()"
            )


def losses_of(model: nn.Module, loss_fn: LossFn, batch: Any) -> Tensor:
    """The losses of a batch by Python, for autograd."""
    losses = loss_fn(model, *batch)
    check_losses(losses, losses.size(0) if isinstance(losses, Tensor) and losses.dim() else 0)
    return losses


def _size(leaves: Sequence[Any]) -> int:
    """The samples of the example: rows of its first tensor."""
    size = next((leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if odd := odd_leaf(leaves):
        raise GraphError(
            f"the batch holds a {odd}: a replay takes tensors, numbers and words, in lists, tuples and dicts "
            "(dict(batch) of a BatchEncoding)"
        )
    if size < 2:
        raise GraphError(
            "the example batch must hold a tensor with a row for each sample, of two samples or more: of one alone, "
            "nothing tells samples from constants"
        )
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        raise GraphError("a tensor of the example batch requires grad: detach() it")
    return size
