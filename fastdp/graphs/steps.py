"""Records the forward, loss and backward of one batch size twice, and replays them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch_axis import tensor_notes
from ..batch_axis.aliasing import look, shares
from ..batch_axis.layout import Layout, is_stale, tag, tag_of
from ..batch_axis.tensor_notes import was_filled
from ..engine.explain import Plan
from ..engine.gradients import Arranged, Gradients, places_of
from ..engine.per_sample import PerSampleGradients
from ..engine.repeated_backward import Lasting, Repeated, Template
from ..errors import GraphError
from ..ops.common import exactly
from ..ops.registry import watched
from ..utils.rng_state import States, random_states, set_random_states
from . import _MAKING, _RECORDING
from .batches import Batch, copies, in_turn, one_twice, plain
from .cuda_graph import Pool
from .execution import Example, Way, differing, way_of
from .guards import Guards, Outside, changed_notes, notes_of
from .module_state import AttributeReads, ModuleState
from .program import Program, recording_of
from .recorder import KeepsParameters, Recorder, Watch
from .use_templates import store, templates_of

LossFn = Callable[..., Tensor]  # (model, *batch) -> losses [B]
REPLAYED = {"cpu", "cuda"}
OTHER_ROWS = "fastdp knows of other rows than one for each sample, in what it is given or in the model's memory"
_AS_PADDED = 1e-3  # losses and norms of padded batches are within rounding of those of batches as they come


class Recorded(NamedTuple):
    """A recording, and what the very step gave. random: the states of the generators when it began."""

    program: Program
    templates: list[Template]
    plan: Plan
    inputs: list[Tensor]
    outputs: list[Tensor]
    random: States


def _layout_of_input(tensor: Tensor, samples: int) -> Layout | None:
    if tensor_notes.INPUT in tensor.__dict__ and is_stale(tensor):
        tag(tensor, None)  # the same input again, in another step
    return look(tensor, tag_of(tensor, samples), samples)


class StepProgram:
    """A recorded step of one size. leaves: an example of its batch.

    compile: replay what Inductor makes of the recording; pool: as CUDA graphs. Where either does not go, a warning says
    why.

    only: why it takes batches of exactly its size; "" if smaller ones may be padded. way: how it is replayed.

    Raises GraphError, by name, where the step is not a function of the batch and the parameters alone.
    """

    writes_nothing = False  # whether the forward must not write to attributes of modules

    def __init__(
        self, engine: PerSampleGradients, loss_fn: LossFn, batch: Batch, leaves: Sequence[Any], mean: bool,
        compile: bool = False, pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self.batch, self.mean = batch, mean
        self.device = device_of_model(engine)
        self._engine, self._loss_fn = engine, loss_fn
        self._arranged: Arranged = {}
        held = Guards(engine.model).held()
        outside, state = Outside(engine.model, held, self.device), ModuleState(engine.model)
        self._reads = AttributeReads(engine.model)
        own = batch.of_size(leaves, batch.size)
        _MAKING.append(self)
        try:
            with KeepsParameters(held):
                self._pass(own)
            before = notes_of(engine.model)
            self._pass(own)
            self._check_uncounted(changed_notes(before, notes_of(engine.model)))
            record = self._recorded(own, held)
            others = [self._recorded(batch.changed(own, in_turn), held)]
            with contextlib.suppress(Exception):  # of the user's code: no such batch, perhaps
                others.append(self._recorded(batch.changed(own, one_twice), held))
            self.program, self.templates, self.plan = record.program, record.templates, record.plan
            self.way = Way(self.program.run)
            self._of = places_of([template.use for template in self.templates])
            constants = [self.program.held[number] for number in self.program.constants]
            self._suspects = [each for each in constants if batch.size in each.shape[: None if batch.size > 1 else 1]]
            comparable = self._check_same(record, *others)
            sizes = sorted({2, batch.size + 1} - {batch.size})
            self.only = next((why for size in sizes if (why := self._differs_at(leaves, size, held))), "")
            fewer = sorted({1, 2, batch.size - 1})
            self.only = self.only or next((why for n in fewer if (why := self._differs_padded(leaves, n))), "")
            self._check_constants()
            self.read, self.written = self._reads.read, changed_notes(before, notes_of(engine.model))
            if self.writes_nothing and (changed := state.changed()):
                raise GraphError(
                    f"the forward writes to {changed}, which a replay would not: give it as an "
                    "output, and keep what is made once for each size (a cache) out of the modules (functools.cache)"
                )
            outside.check()
            self.examples = [Example(each.inputs, each.outputs, each.random) for each in comparable]
            self._choose_way(compile, pool)
        finally:
            _MAKING.pop()
            self.examples = list[Example]()  # which hold a step's data
            outside.restore()
            state.restore()

    def may_take(self, leaves: Sequence[Any], samples: int, tagged: bool = False) -> bool:
        """Whether, by what is known of memory, a batch holds one row for each sample, and constants, as it did when it
        was recorded; and the model's buffers, constants and parameters nothing of a batch. tagged: all its rows are
        known, as in a forward."""
        with torch._C.DisableTorchFunction():
            for leaf, by in zip(leaves, self.batch.by_sample, strict=False):
                known = _layout_of_input(leaf, samples) if isinstance(leaf, Tensor) else None
                if known is None and by and tagged:
                    return False
                if known is not None and not (by and known == Layout(samples)):
                    return False
            held = self.program.held.values()
            if was_filled() and any(shares(t) for t in held if isinstance(t, nn.Parameter)):
                return False
            others = [t for t in held if not isinstance(t, nn.Parameter)]
            return all(look(tensor, tag_of(tensor, samples), samples) is None for tensor in others)

    def _choose_way(self, compile: bool, pool: Pool | None) -> None:
        """How it is replayed, compared with the recorded examples."""
        self.way = way_of(self.program, self.examples, compile, pool)

    def _check_uncounted(self, notes: list[tuple[int, str]]) -> None:
        """Raises GraphError where a forward leaves something behind that is another after each."""
        if notes:
            number, name = notes[0]
            path = [path for path, _ in self._engine.model.named_modules()][number]
            raise GraphError(
                f"the forward of module '{path or type(self._engine.model).__name__}' changes its '{name}' each time "
                "(a counter, a list that grows): a replay would not, and the next step may depend on it. Pass it as "
                "an argument of the loss function, or leave it out while training"
            )

    def _check_constants(self) -> None:
        """Raises GraphError where a constant may be of the samples: it has their number, and the step was not the same
        with it for another number."""
        for constant in self._suspects:
            raise GraphError(
                f"the step takes a tensor of shape {tuple(constant.shape)} that is neither of its batch nor made of "
                "it: if it is of the samples, pass it as an argument of the loss function"
            )

    def _check_same(self, record: Recorded, in_turn: Recorded, one_twice: Recorded | None = None) -> list[Recorded]:
        """The recordings that the program gives what they gave. Raises GraphError unless other batches give the same
        program, and that does."""
        difference = self.program.difference(in_turn.program)
        comparable = [record, in_turn]
        if one_twice is not None and not difference and not self.program.went_another_way(one_twice.program):
            difference = self.program.difference(one_twice.program)
            comparable.append(one_twice)
        if difference:
            raise GraphError(
                f"the step is not the same for two batches of one size: {difference}. What Python decides by the "
                "numbers of a batch cannot be replayed"
            )
        for each in (record, *comparable):
            set_random_states(each.random)
            found, same = self.program.run(each.inputs)
            if not same or not self._is_same(found, each.outputs):
                raise GraphError(
                    "a replay does not give what the recorded step gave: something in it goes past torch's dispatcher "
                    "(a constant that is written to, a generator that is seeded anew, numbers changed by Python)"
                )
        return comparable

    def _is_same(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
        """Bit by bit; on a device, where sums may be taken in any order, within rounding."""
        if self.device.type != "cpu":
            return not differing(self.program, found, wanted)
        return all(_same_bits(a, b) for a, b in zip(found, wanted, strict=True))

    def _differs_at(self, leaves: Sequence[Any], size: int, held: dict[str, Tensor]) -> str:
        """Why the step is another for another number of samples; "" if it is not."""
        other = self.batch._replace(size=size)
        mine, self.batch = self.batch, other
        try:
            recorded = self._recorded(other.of_size(leaves, size), held)
        except Exception as problem:  # noqa: BLE001  (of the user's code)
            return f"it fails for {size} samples ({problem})"
        finally:
            self.batch = mine
        if why := self.program.difference_in_numbers(recorded.program):
            return why
        mine_with, with_it = self.program.calls_with, recorded.program.calls_with
        self._suspects = [constant for constant in self._suspects if mine_with(constant) != with_it(constant)]
        return ""

    def _differs_padded(self, leaves: Sequence[Any], samples: int) -> str:
        """Why losses or norms of so many samples are others if these are padded; "" if they are not."""
        if self.program.draws or samples < 1 or samples >= self.batch.size:
            return ""
        replayed = self.replay(self.batch.of_size(leaves, self.batch.size), samples)
        mine, self.batch = self.batch, self.batch._replace(size=samples)
        try:
            with self._engine.collecting() as found:
                losses = self._losses(copies(self.batch.of_size(leaves, samples))).detach()
        except Exception:  # noqa: BLE001
            return ""  # as without a replay, then
        finally:
            self.batch = mine
        if replayed is None or len(found) != 1:
            return ""
        params = self._engine.parameters()
        with torch.no_grad(), exactly():
            norms = [each.norm_sq(params).sqrt() for each in (replayed[1], found[0])]
        for what, (a, b) in (("losses", (replayed[0], losses)), ("norms", norms)):
            if not close(_AS_PADDED, a, b):
                return f"the {what} of {samples} samples are others if these are padded"
        return ""

    def _pass(self, leaves: Sequence[Any]) -> None:
        """A real forward and backward, whose gradients nobody else hears of."""
        with self._engine.collecting() as found:
            self._losses(copies(leaves))
        _check_one(found)

    def _losses(self, leaves: Sequence[Any]) -> Tensor:
        losses = self._loss_fn(self._engine.model, *self.batch.tree(leaves))
        check_losses(losses, self.batch.size)
        (losses.mean() if self.mean else losses.sum()).backward()
        return losses

    def _recorded(self, leaves: Sequence[Any], held: dict[str, Tensor]) -> Recorded:
        given, random = copies(leaves), random_states(self.device)
        inputs = [leaf for leaf in given if isinstance(leaf, Tensor)]
        recorder = Recorder(inputs, held, self.device)
        _RECORDING.append(recorder)
        try:
            with self._engine.collecting() as found, watched(), self._reads, Watch(recorder), recorder:
                losses = self._losses(given)
                for gradients in found:
                    with torch.no_grad(), exactly():
                        store(gradients)
        finally:
            _RECORDING.pop()
        _check_one(found)
        templates, data = templates_of(found[0], self.batch.size, recorder)
        seam = recorder.seam
        outputs = [losses.detach(), *data, *(() if seam is None else (t.detach() for t in seam.outputs))]
        program = Program(recording_of(recorder, len(inputs), [losses, *data]))
        return Recorded(program, templates, Plan(found[0]), inputs, outputs, random)

    def replay(self, leaves: Sequence[Any], samples: int) -> tuple[Tensor, Gradients] | None:
        """The losses [samples] and gradients of the first samples; None where the numbers of the batch decide another
        way than that of the recording. The losses of a CUDA graph stand until the next replay; its gradients then raise
        an error."""
        inputs = [plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        found, same = self.way.run(inputs)
        if not same:
            return None
        losses, *data = found
        return losses[:samples], self.gradients(data, samples, self.way.lasting())

    def gradients(self, data: Sequence[Tensor], samples: int, lasting: Lasting | None = None) -> Gradients:
        """The gradients of the first samples, from what a replay gave."""
        scale = float(self.batch.size) if self.mean else 1.0
        return Repeated(self.templates, data, samples, self.batch.size, scale, self._of, self._arranged, lasting)

    def none(self) -> Gradients:
        """The gradients of no sample."""
        return self.gradients([torch.empty(0)] * sum(len(t.places) for t in self.templates), 0)


def device_of_model(engine: PerSampleGradients) -> torch.device:
    """Where the model lies. Raises GraphError for devices whose steps are not replayed."""
    devices = list(dict.fromkeys(p.device for p in engine.parameters())) or [torch.device("cpu")]
    if len(devices) > 1:
        raise GraphError(
            f"the model lies on {', '.join(map(str, devices))}: steps are recorded on one device alone. Leave the "
            "recording out (graphed), or put the model on one device."
        )
    found = devices[0]
    if found.type not in REPLAYED:
        raise GraphError(f"the model lies on {found}: steps are recorded on the CPU and on CUDA")
    return found


def _check_one(found: list[Gradients]) -> None:
    if len(found) != 1:
        raise GraphError("the backward of the losses met no trained parameter, or several backwards ran")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def check_losses(losses: Any, size: int) -> None:
    """Raises GraphError unless it is a tensor of one loss for each sample."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise GraphError(
            f"loss_fn(model, *batch) must return the loss of each sample, [{size}]; it returned {found}. Compute "
            'losses with reduction="none", and one number per sample'
        )


def close(off: float, a: Tensor, b: Tensor) -> bool:
    """Whether numbers are the same within this share of the largest; of a sample that is not finite, NaN is as NaN."""
    largest = float(b.abs().nan_to_num(0.0, 0.0).max()) if b.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=off, atol=off * largest, equal_nan=True)
