"""One backward pass: records parameter uses, checks the loss, and hands norms and sums to the optimizer."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..batch_axis.current_batch import SampleGroups
from ..batch_axis.deferred_checks import Inbox
from ..batch_axis.layout import Layout
from ..errors import BatchLayoutError, FastDPError, LossNotFollowedWarning, SampleMixingError, StepError
from ..grad_sample.captured_call import Captured, Given
from ..grad_sample.checkpoint_regions import leaves_out
from ..grad_sample.parameter_use import ParameterUse
from ..grad_sample.planner import Planner
from ..ops.common import exactly
from ..utils.garbage_collection import COLLECTOR
from .activation_hooks import UNGUARDED, Owner
from .explain import Plan
from .forward_record import PRIVATE_GRAPH, UNSEEN, Expected, ForwardRecord, PassRecord, inferred_error, mixing_error
from .forward_threads import two_backwards
from .gradients import Gradients, check_unwritten
from .layerwise import ByGroup, LayerwiseSums
from .memory_budget import Replays
from .multiple_forwards import MultipleForwards
from .ordinary_gradients import ForeignParameters, UncapturedUses
from .repeated_backward import Arrived, Like, begin, keep, like, record_call, record_kept, settle
from .tracked_parameters import Tracked
from .unused_batches import Known
from .unused_batches import of as batch_taken


class Arrival:
    """Waits in the graph for the gradient of an output of the model, which lies as `layout` says."""

    __slots__ = ("backward", "layout", "__weakref__")

    def __init__(self, backward: Backward, layout: Layout | None) -> None:
        self.backward, self.layout = backward, layout

    def __call__(self, grad: Tensor) -> None:
        self.backward.reached(self.layout, grad)


_BEGUN = [0]  # backwards so far, of all engines, those that are gone too


def backwards() -> int:
    """How many backwards through a model with an engine there were in this process."""
    return _BEGUN[0]


class Backward:
    """Records the uses of parameters that a backward goes through; at its end they become `gradients`.

    mean: whether the loss is the mean of the samples' losses. on_end: called with the gradients at the end of every
    backward; they are then not kept.
    """

    def __init__(
        self, tracked: Tracked, planner: Planner, mean: bool, on_end: Callable[[Gradients], None] | None = None
    ) -> None:
        self.tracked, self.planner, self.mean, self.on_end = tracked, planner, mean, on_end
        self.owner: Owner | None = None  # of the forwards, whose hooks must not change gradients
        self._expected: dict[int, Expected] = {}  # what backward was called on, by thread
        self.ended: Callable[[], None] = lambda: None  # told of every backward that went through forwards
        self.begins: Callable[[], None] = lambda: None  # told of every forward that a backward may follow
        self.refused: Callable[[BaseException], None] = lambda error: None  # told of what forwards and backwards raise
        self.broken: Callable[[BaseException], None] = lambda error: None  # told of what ends backwards, of the user's
        self.whose, self.others, self.uncaptured = SampleGroups(), ForeignParameters(tracked), UncapturedUses(tracked)
        self.several = MultipleForwards()
        self.taken: Known | None = None  # the batch of the last forward, taken out of its loader before
        self.public = 0  # within so many `public()`: nothing is recorded
        self.profile = False  # measure the time of each use on a device too
        self.gradients: Gradients | None = None  # of the last backward
        self.replays = Replays()
        # which elements captured calls used of each parameter since the last backward
        self.uses_of: dict[int, list[tuple[int, int]]] = {}
        self.counted = False  # whether these are all, of the forwards that no backward has gone through
        self.by_group: ByGroup | None = None  # how groups of parameters are taken within backward
        self.clips: Callable[[Gradients], None] | None = None  # what takes them at its end, if nobody watches
        self._early_plans: dict[int, Plan] = {}
        self.last_use_of: dict[int, str] = {}  # where parameters were last used by way of derived tensors
        self._tape: ForwardRecord | None = None
        self._before: Like | None = None  # what the last backward was, if one like it needs only its data
        self._doubts = Inbox()
        self._lock = threading.Lock()  # backwards may begin in the threads of several devices
        self.open_forwards = 0  # that no backward has gone through yet
        self._recording = ""  # the module of the call that is recorded
        # the end of this backward waits for others'; only gradients of others than parameters are asked for
        self._ended_once = self._unasked = False

    def forward_begins(self) -> None:
        """A forward that a backward may follow; of a backward before that failed nothing is left."""
        if self.owner is not None:
            self.owner.begins(self.open_forwards == 0)
        self.counted = self.counted or (self.open_forwards == 0 and not self.uses_of)
        if self._tape is not None:
            self._doubts.take()  # of a backward that failed
        self.open_forwards += 1
        self._tape = None
        self.uncaptured.note_grads()
        self.others.begin()
        self.begins()

    def looks_at(self, given: object) -> None:
        """What a forward is given: what made it, and which batch it is."""
        self.others.inputs(given)
        self.taken = batch_taken(given)

    def replayed(self, given: object, gradients: Gradients) -> None:
        """A forward and backward were replayed on this batch, with these gradients."""
        self.looks_at(given)
        _BEGUN[0] += 1
        self._hand_over(gradients)

    def take(self, gradients: Gradients) -> None:
        """The gradients of a replayed forward, within the backward that goes through it."""
        assert self._tape is not None
        self._tape.replayed.append(gradients)

    def is_running(self) -> bool:
        """Whether a backward has reached the model (or has failed there, and no forward followed)."""
        return self._tape is not None

    def thread(self) -> int | None:
        """The thread of the forwards that the backward goes through that runs, or has failed; None where none does."""
        return None if self._tape is None else self._tape.thread

    def forget(self) -> None:
        """Drop what the last backward left."""
        self.gradients, self._tape = None, None

    # ------------------------------------------------------------------ while it runs

    def reached(self, layout: Layout | None, grad: Tensor) -> None:
        """A gradient arrives at an output of the model."""
        tape = self._begin()
        if layout is not None and layout.mixed and not layout.total:
            self._fail(tape, mixing_error(layout))
        elif layout is not None and layout.inferred:
            self._fail(tape, inferred_error(layout))

    def _fail(self, tape: ForwardRecord, problem: FastDPError) -> None:
        """Of this backward nothing is kept. Raises the problem: of a sharded model at its end, as other processes wait
        for the parts of parameters that this one gathers on the way."""
        tape.failed = True
        if not self.tracked.is_sharded:
            raise problem
        tape.problem = tape.problem or problem

    def expect(self, problem: SampleMixingError | Warning | None) -> None:
        """A backward is called, in this thread, on something with this problem, of this engine or of none."""
        self._expected[threading.get_ident()] = Expected(problem)

    def was_reached(self) -> bool:
        """Whether the backward since `expect` was of this engine."""
        expected = self._expected.pop(threading.get_ident(), None)
        return expected is not None and expected.reached

    def _of_this_backward(self) -> Expected | None:
        """What was expected of the backward that runs: in this thread, or in one that autograd has for a device."""
        me = threading.get_ident()
        if not self._expected or me in self._expected:
            return self._expected.get(me)
        if any(thread.ident == me for thread in threading.enumerate()):
            return None  # nobody followed what this thread called backward on
        return next(iter(self._expected.values()), None)

    def _begin(self) -> ForwardRecord:
        if self.public:
            raise StepError(PRIVATE_GRAPH)
        expected, problem = self._of_this_backward(), None
        if expected is not None:
            expected.reached = True
            problem, expected.problem = expected.problem, None
        if self.owner is not None and self.owner.changed is not None:
            problem, self.owner.changed = self.owner.changed, None
        if isinstance(problem, Warning):
            warnings.warn(problem, stacklevel=2)
        elif problem is not None and not self.tracked.is_sharded:
            self.gradients = None
            raise problem
        tape = self._tape
        if tape is None:
            with self._lock:
                tape = self._tape
                if tape is None:
                    _BEGUN[0] += 1
                    tape = ForwardRecord(_BEGUN[0])
                    tape.judged = expected is not None
                    self.gradients, self._ended_once = None, False  # of the backward before, if this one is refused
                    self.planner.begin()
                    self.several.begin()
                    tape.early = self._early()
                    begin(tape, self._before, not self.profile and self.planner.memory_budget is None)
                    torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
                    self._tape = tape
        if isinstance(problem, FastDPError):
            self._fail(tape, problem)
        return tape

    def begin_record(self, forward_pass: PassRecord, path: str) -> bool:
        """A captured call's backward begins: check that it means what it should. Returns whether its uses count."""
        if self.replays.collect is not None:
            return True  # a block runs again
        self._recording = path
        known, task = self._tape, torch._C._current_graph_task_id()
        if known is not None and known.checked is forward_pass and known.task == task and not torch.is_grad_enabled():
            self._unasked = leaves_out(self.tracked.named, forward_pass.recomputes)
            return not self._unasked
        tape = self._begin()
        self._unasked = leaves_out(self.tracked.named, forward_pass.recomputes)
        if self._unasked and not torch.is_grad_enabled():
            return False
        problem = self._problem_of(forward_pass, tape, task)
        if problem is not None:
            if not self.tracked.is_sharded:
                self.refused(problem)
            self._fail(tape, problem)
            return False
        if not tape.judged and forward_pass.batch > 1:
            warnings.warn(LossNotFollowedWarning(UNSEEN), stacklevel=2)
            tape.judged = True
        forward_pass.backward_id, tape.batch, tape.people = tape.number, forward_pass.batch, forward_pass.people
        tape.thread = forward_pass.thread if forward_pass.count else tape.thread
        tape.checked = forward_pass if forward_pass.count else None
        tape.task = task if not forward_pass.recomputes else tape.task
        forward_pass.moment.reached = True
        return True

    def _problem_of(self, forward_pass: PassRecord, tape: ForwardRecord, task: int) -> FastDPError | None:
        """Why this backward through a forward has no private meaning, if it has none."""
        if torch.is_grad_enabled():
            return StepError(
                "backward with create_graph=True: the gradient of a gradient is not of one sample each. Call "
                "loss.backward() without it (a gradient penalty works within optimizer.public(), on generated samples)."
            )
        if not forward_pass.recomputes and tape.task not in (None, task):
            return StepError(
                "a backward within a backward (called by a hook): each would be clipped with the other as one, and its "
                "loss was not looked at. Call backward outside of hooks."
            )
        if forward_pass.backward_id not in (0, tape.number) or self._repeats(forward_pass, tape):
            return StepError(
                "backward twice through one forward: each would be clipped on its own, so one sample could "
                "contribute twice the clipping norm. Add the losses and call backward once."
            )
        if forward_pass.count and tape.thread not in (None, forward_pass.thread):
            return two_backwards()
        if tape.batch not in (None, forward_pass.batch):
            return BatchLayoutError(
                f"one backward through forwards of {tape.batch} and of {forward_pass.batch} samples. Call backward for "
                "each forward, or give the model batches of one size."
            )
        if forward_pass.batch > 1 and self.owner is not None and self.owner.nodes and not self.owner.guarded:
            return StepError(UNGUARDED)
        if forward_pass.people is not None and forward_pass.people.problem:
            return StepError(forward_pass.people.problem)
        if tape.batch is not None and tape.people != forward_pass.people:
            return StepError(
                "one backward through forwards of batches of different persons: call backward for each of them"
            )
        if forward_pass.given is not None:
            given, forward_pass.given = forward_pass.given, None
            return self.several.add(given)
        return None

    def _repeats(self, forward_pass: PassRecord, tape: ForwardRecord) -> bool:
        """Whether a forward that reentrant checkpointing repeats was gone through before (each time it is new)."""
        first = not forward_pass.count and not tape.recomputed
        tape.recomputed = tape.recomputed or first
        return first and self.open_forwards < 1

    def record(self, use: ParameterUse) -> None:
        """Keep a use until the end of backward."""
        if self.replays.collect is not None:
            with torch.no_grad():
                self.replays.collect(use)
            return
        if self._unasked:  # torch.autograd.grad(loss, inputs), say, which leaves parameters' .grad alone
            return
        assert self._tape is not None
        if self.planner.memory_budget is not None and self.planner.exceeds(self.planner.adds(*use.data())):
            use = self.replays.drop_data(use, self._recording, self.uses_of)
        tape = self._tape
        if keep(tape, use, None, self.record):
            return
        if tape.calls is not None:
            tape.calls.append(Arrived(use, 1, None))
        tape.uses.append(use)
        tape.versions.append(use.versions())
        tape.streams.note(use, use.operand.device)
        if self._tape.early is None:
            if self.planner.memory_budget is not None or not use.is_small:
                self.planner.hold(use.data())
        else:  # which drops data before the end
            self._tape.early.recorded(self._tape, use)

    def arrived(self, call: Captured, given: Given) -> None:
        """The backward of a call whose uses are known by rows of these data."""
        tape = self._tape
        if tape is None or self.replays.collect is not None:
            call.record_rows(given[0], call.rows(*given))
        elif not keep(tape, call, given, self.record):
            record_call(tape, call, given, call.rows(*given))

    def _early(self) -> LayerwiseSums | None:
        """What takes groups of parameters within this backward, if that can be."""
        wanted = self.by_group is not None and self.on_end == self.clips and self.counted and not self.profile
        if not wanted or self.planner.memory_budget is not None:
            return None
        assert self.by_group is not None
        groups = self.by_group.groups()
        plans = self._early_plans
        return LayerwiseSums(self.by_group, groups, self.uses_of, self.planner, self.mean, plans) if groups else None

    # ------------------------------------------------------------------ its end

    def _end(self) -> None:
        if self.tracked.is_sharded and not self._ended_once:
            # what gathers the parameters' parts ends its own backward first
            self._ended_once = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
            return
        self._ended_once = False
        try:
            with self.tracked.steady():
                gradients = self._finish()
                if gradients is not None:
                    self._hand_over(gradients)
        except FastDPError as error:
            self.refused(error)
            raise
        finally:
            COLLECTOR.end(self)

    def _finish(self) -> Gradients | None:
        tape, self._tape = self._tape, None
        self.replays.begin()
        self.uses_of, self.counted = {}, False
        self.open_forwards, doubts = max(0, self.open_forwards - 1), self._doubts.take()
        if self.owner is not None:
            self.owner.guarded = False
        if tape is not None and tape.problem is not None:
            raise tape.problem
        if tape is None or tape.failed:
            return None
        if tape.batch is not None:
            self.several.end()
            self.ended()
        self.uncaptured.check(self.last_use_of)
        check_unwritten(tape.kept, [each.version for each in tape.kept])
        settle(tape)  # (which compares, too)
        if tape.like is not None and (tape.replayed or not tape.like.is_whole(tape, self.tracked.current())):
            self._tape = tape  # (the next forward drops it, should this fail)
            record_kept(tape, self.record)
            self._tape = None
        uses = [use for use in tape.uses if use is not None]
        if tape.like is None:
            self.uncaptured.check_owned(uses)
        check_unwritten(uses, [v for use, v in zip(tape.uses, tape.versions, strict=True) if use is not None])
        tape.streams.join()
        if tape.batch is None:
            return None  # a backward that met no tracked parameter
        self.whose.use(tape.people)
        with torch.no_grad(), exactly():
            gradients = self._joined(tape, uses, tape.batch)
            gradients.doubts = doubts
            if tape.early is not None:
                gradients.taken = tape.early.taken
                self._early_plans = {number: each.plan for number, each in tape.early.taken.items() if each.plan}
            del uses, tape  # nobody else holds the data of a backward
            if self.on_end is not None:
                self.others.end()
        return gradients

    def _joined(self, tape: ForwardRecord, uses: list[ParameterUse], batch: int) -> Gradients:
        if len(tape.replayed) == 1 and not uses:
            return tape.replayed[0]  # type: ignore[no-any-return]
        scale = float(batch) if self.mean else 1.0
        if tape.like is not None:
            return tape.like.gradients(tape.kept, scale)  # type: ignore[no-any-return]
        uses += [use for gradients in tape.replayed for use in gradients.uses]
        device = (uses[0].operand if uses else self.tracked.tensors()[0]).device
        found = Gradients(uses, batch, scale, device, self.planner, self.profile, tape.people)
        self._before = like(tape, found)
        return found

    def _hand_over(self, gradients: Gradients) -> None:
        with torch.no_grad(), exactly():
            if self.on_end is not None:
                gradients.watched = self.on_end != self.clips
                self.on_end(gradients)
            else:
                self.gradients = gradients
