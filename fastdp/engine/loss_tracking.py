"""Follows the calls from the model's outputs to the loss, and checks the loss at `backward()`.

In practice it is the loss that couples samples: contrastive losses over the batch, means over the tokens of the batch,
class weights, shapes that broadcast to [B, B]. So after a forward (and, of batches that a `fastdp.poisson_loader` hands
out, before it) a function mode stays on until `backward()`. It changes nothing; it carries layouts on, and looks at
what backward is called on: that must be a total over the samples (`batch_axis.totals`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..batch_axis import tensor_notes
from ..batch_axis.aliasing import look, shares
from ..batch_axis.batch_slices import NOTED, stamp
from ..batch_axis.calls import Call
from ..batch_axis.generations import LOADERS, Generation, is_over, set_generation
from ..batch_axis.inputs import tag_inputs
from ..batch_axis.layout import Layout, generation_of, generation_of_output, lies_in_output, tag, tag_of
from ..batch_axis.operator_table import REACHING_GRAPH, TELLING_SIZES
from ..batch_axis.probing import keep_target
from ..batch_axis.propagate import propagate
from ..batch_axis.tensor_notes import is_of_model, note_parameter, was_filled
from ..batch_axis.totals import by_size
from ..batch_axis.written_constants import note_constant
from ..errors import FastDPError, SampleMixingError
from ..utils.pytree import map_tensors, tensors_in
from . import later_copies
from .activation_hooks import guard_graph, hooked
from .backward import Arrival
from .buffer_checks import refuse_filled
from .call_cache import inquires
from .capture import Pass
from .compile_stance import PLAINLY
from .host_reads import NumbersRead
from .mode_stack import insert, moving, remove
from .state import ENGINES, Engine
from .tracked_loss import Evaluation, TrackedLoss, captured, problem_of, takes

_HERE = threading.local()
_GRADIENTS = frozenset((Tensor.grad.__get__, Tensor.grad.__set__))  # type: ignore[union-attr]
_WAITING = 4  # batches, at most, that are followed later on


class LossTracking(TorchFunctionMode):
    """Follows one batch outside of forwards. waiting: others, before it, whose backward has not come yet."""

    def __init__(self, what: TrackedLoss, waiting: list[TrackedLoss]) -> None:
        super().__init__()
        self.thread, self.waiting = threading.get_ident(), waiting
        self.over = False  # backward has begun
        self._turn_to(what)
        PLAINLY.begin()

    def _turn_to(self, what: TrackedLoss) -> None:
        self.what, what.gone = what, weakref.WeakMethod(self._is_gone)
        self.batch, self.moment, self.memo, self.sizes = what.batch, what.moment, what.memo, what.sizes
        self.labels, self.numbers = what.labels, NumbersRead(what.batch, what.read)
        set_generation(self.moment)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.over or func is torch.autograd.grad:
            engine = self.what.engine()
            if not self.over and engine is not None and engine.graphed is not None:
                engine.graphed.gradients_asked()
            return func(*args, **kwargs) if self.over else later_copies.differentiated(func, args, kwargs, self)
        if self.batch <= 1 and self.waiting:
            self._choose(tensors_in((args, kwargs)))
        if self.batch <= 1 and func is not Tensor.backward and func is not torch.autograd.backward:
            return self._of_one(func, args, kwargs)
        if args and isinstance(args[0], nn.Parameter):
            if func in _GRADIENTS:
                return func(*args, **kwargs)  # zero_grad(), clipping, logging
            note_parameter(args[0])
        if inquires(func):
            out = func(*args, **kwargs)
            if func in TELLING_SIZES:
                self.sizes.asked(args[0], out, self.batch, *args[1:2], **kwargs)
                if tensor_notes.COUNTED in args[0].__dict__:
                    self._note_read(
                        "one_hot() is as wide as the largest label of the batch asks for: give num_classes="
                    )
            return out
        if func is Tensor.backward or func is torch.autograd.backward:
            return self._backward(func, args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        if func in REACHING_GRAPH and not (args[0].is_leaf and args[0].requires_grad) and not self._is_made(args[0]):
            return hooked(self.moment.owner, "", func, args, kwargs)
        return self._call(func, args, kwargs)

    def _of_one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of one sample's loss: parameters, and samples of earlier batches, may take part in it."""
        given = () if inquires(func) else tensors_in((args, kwargs))
        if any(self._is_made(tensor) for tensor in given):
            return captured(self.what.forward(), Call(func, args, kwargs, self.batch))  # type: ignore[arg-type]
        stale = next((found for tensor in given if (found := tag_of(tensor, self.batch)) and found.mixed), None)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out) if stale else ():
            tag(tensor, stale)
        return out

    def _is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of parameters alone."""
        forward = self.what.forward()
        return forward is not None and takes(forward, tensor)

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        roots = args[0] if args else kwargs.get("tensors", ())
        given = args[1] if len(args) > 1 else kwargs.get("gradient", kwargs.get("grad_tensors"))
        self._choose(tensors_in(roots))
        engine, problem = self.what.engine(), None
        forward = self.what.forward()
        if forward is not None and forward.in_loss:
            forward.check_unwritten()
        if engine is not None:
            engine.judge_writes()
            if self.what.filled is not None and was_filled(self.what.filled):
                refuse_filled(engine.model)
        if engine is not None:
            one = [root for root in tensors_in(roots) if tag_of(root, self.batch) is not None]
            weighted = one if self.batch <= 1 else self._weighted(roots, given)
            problem = problem_of(
                weighted, self.batch, self.what.mixed, self.labels, engine.people is not None, engine.mean
            )
        engines = list(ENGINES)
        guard_graph([each.owner for each in engines], roots)
        for each in engines:
            each.backward_begins(problem, list(tensors_in(roots)), self.batch)
        failed: BaseException | None = None
        try:
            return func(*args, **kwargs)
        except BaseException as error:
            failed = error
            raise
        finally:
            reached = [each for each in engines if each.backward.was_reached()]
            if isinstance(failed, Exception):
                for each in reached or ([] if engine is None else [engine]):
                    each.backward.broken(failed)
            if isinstance(failed, FastDPError):
                for each in reached:
                    each.backward.refused(failed)
            # if it was of nothing else
            if reached and (failed is not None or self.moment.owner is LOADERS or not self.what.waits()):
                self.turn()

    def _choose(self, roots: Sequence[Tensor]) -> None:
        """Follow the one, of the batches that wait, whose outputs these are."""
        moments = {id(generation_of(root)) for root in roots if generation_of_output((root,), self.moment)}
        if len(moments) > 1 and self.batch > 1:  # (single samples, which forwards of one each meet, may be two records)
            self._note_joined(roots)
        found = next((what for what in self.waiting if id(what.moment) in moments), None)
        if found is not None and id(self.moment) not in moments:
            self.waiting[self.waiting.index(found)] = self.what
            self._turn_to(found)

    def _note_joined(self, roots: Sequence[Tensor]) -> None:
        """What forwards made of their samples is joined one by one: these are the same samples."""
        layouts = ((tag_of(root, self.batch), generation_of(root)) for root in roots)
        met = [moment for layout, moment in layouts if layout is not None and moment is not None and not layout.total]
        joined = set().union(*(moment.joined for moment in met))
        for moment in met:
            moment.joined = joined

    def evaluates(self, values: Any, dim: int, folded: bool) -> Evaluation | None:
        """The model runs without gradients on as many samples: they are taken for the batch's, as labels are."""
        if self.moment.owner is LOADERS:
            return None
        with torch._C.DisableTorchFunction():
            tag_inputs(values, self.batch, dim, folded=folded)
        return Evaluation(self.labels)

    def turn(self) -> None:
        """This batch is done: follow the one before it, if it waits and only this backward has passed it by."""
        ended = [what.token and what.token() for what in (*self.waiting, self.what) if not what.waits()]
        for what in self.waiting:
            what.passed += 1
        self.waiting = [what for what in self.waiting if what.waits() and what.passed < 2]
        if self.over or not self.waiting:
            self.finish()
            later_copies.begin(*ended)
        else:
            self._turn_to(self.waiting.pop())

    def _is_gone(self, what: TrackedLoss) -> None:
        """The graph of a batch is gone: follow no longer, unless another one waits."""
        if self.what is not what or what.waits() or any(w.waits() for w in self.waiting):
            return
        self.finish()
        if threading is not None and self.thread == threading.get_ident() and not moving():  # (None: Python ends)
            later_copies.begin()

    def finish(self) -> None:
        """Follow no longer, though the mode may still be on the stack: torch puts it back after a call that it saw."""
        if not self.over:
            self.over = True
            PLAINLY.end()

    def __del__(self) -> None:
        self.finish()  # its thread has ended without a backward

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_in((args, kwargs))
        if self.waiting:
            self._choose(given)
        call, forward = Call(func, args, kwargs, self.batch), self.what.forward()
        of_parameters = forward is not None and any(takes(forward, tensor) for tensor in given)
        self.labels.presume(call, of_parameters)
        origin = self.labels.before(call)
        out = captured(forward, call) if forward is not None and of_parameters else self._followed(call)
        if origin is not None:
            self.labels.after(origin, call)
        return out

    def _followed(self, call: Call) -> Any:
        given, moment = call.tensors, self.moment
        kept = later_copies.kept_output(given) if moment.owner is LOADERS else None
        if kept is not None and (of := generation_of(kept)) is not None and is_over(of):
            return later_copies.carried(call.func, *call.given, kept)
        if not any([tag_of(t, self.batch) or (shares(t) and look(t, None, self.batch)) for t in given]):
            of_model = bool(given) and all(is_of_model(tensor) for tensor in given)
            out = call.run()
            self.sizes.note_number(call)
            self.numbers.made(call)
            for tensor in call.results() if of_model else ():
                note_parameter(tensor)
            note_constant(call, lambda t: isinstance(t, nn.Parameter), self.sizes.is_batch)
            return out
        of = generation_of_output(given, moment)
        if of is None and (moment.owner is LOADERS or lies_in_output(given)):
            of = moment
        if of is moment:
            moment.token = None if self.what.token is None else self.what.token()
        else:
            set_generation(of or moment.beside())  # another engine's that is over; inputs and labels alone
        try:
            return self._carry(call)
        finally:
            set_generation(moment)
            moment.token = None

    def _carry(self, call: Call) -> Any:
        if self.numbers:
            self._note_read(self.numbers.meets(call, self.sizes))
        signature = self.memo.signature(call.func, *call.given, self.batch, {})
        known = self.memo.layouts(signature)
        if known is not None:
            out = call.run()
            for tensor, layout in zip(call.results(), known, strict=True):
                tag(tensor, layout)
            return out
        keep_target(call)
        out = call.run()
        self.numbers.after(call)
        try:
            propagate(call)
            self._judge_sizes(call)
            self.sizes.note_number(call)
        except SampleMixingError as problem:  # of another network's layers: it matters if a gradient goes through it
            why = problem.mixed or str(problem)
            map_tensors(out, lambda tensor: tag(tensor, Layout(self.batch, mixed=why)))
        note_constant(call, lambda t: isinstance(t, nn.Parameter), self.sizes.is_batch)
        stamp(call)
        if NOTED:
            self._note_read(NOTED.pop())
            NOTED.clear()
        if signature is not None and not (isinstance(out, Tensor) and tensor_notes.SHARE in out.__dict__):
            self.memo.learn(signature, call)
        return out

    def _judge_sizes(self, call: Call) -> None:
        """Of what the loss is scaled by: the number of samples makes a mean of a sum; others of sizes do harm."""
        by_size(call, self.sizes.has_told)
        why, certain = self.sizes.problem_of_loss(call)
        if certain:
            tag(call.out, Layout(self.batch, mixed=f"{why}, which changes from batch to batch"))
        else:
            self._note_read(why or self.sizes.changing_divisor(call))

    def _note_read(self, what: str) -> None:
        """Warn of a number that Python has read of several samples."""
        if what and (engine := self.what.engine()) is not None:
            engine.reads.note(what, None)

    def _weighted(self, roots: Any, weights: Any) -> list[Tensor]:
        """What backward from these tensors, with these gradients, is the gradient of."""
        found = []
        given = list(weights) if isinstance(weights, tuple | list) else [weights]
        for number, root in enumerate(tensors_in(roots)):
            weight = given[number] if number < len(given) else None
            if isinstance(weight, Tensor) and root.dim():
                even = not weight.requires_grad and bool((weight * self.batch == 1).all())
                root = self._call(Tensor.sum, (self._call(Tensor.__mul__, (root, weight), {}),), {})
                if even and (layout := tag_of(root, self.batch)) is not None and layout.total:
                    tag(root, layout._replace(total="mean"))
            found.append(root)
        return found


def start(batch: int, moment: Generation, engine: Engine, outputs: list[Layout], arrivals: Sequence[Arrival] = (),
          forward: Pass | None = None) -> None:  # fmt: skip
    """Follow a batch (that went through this forward) until `stop` or its backward, or until its graph is gone."""
    pause()
    waiting: list[TrackedLoss] = _HERE.waiting
    _HERE.waiting = []
    if not PLAINLY.possible():
        return
    if batch > 1 or forward is not None:
        mixed = [layout for layout in outputs if layout.mixed and not layout.total]
        waiting.append(TrackedLoss(batch, moment, engine, mixed, arrivals, forward))
    _follow(waiting)


def _follow(waiting: list[TrackedLoss]) -> None:
    """Follow the last of these, while the others wait."""
    if waiting:
        _HERE.following = LossTracking(waiting.pop(), waiting)
        insert(_HERE.following)


def pause() -> None:
    """A forward begins: what is followed now waits until it has ended. (What loaders hand out ends there.)"""
    found = present()
    waiting: list[TrackedLoss] = getattr(_HERE, "waiting", [])
    if found is not None:
        waiting = [*found.waiting, found.what]
        found.finish()
    _HERE.waiting = [what for what in waiting if what.moment.owner is not LOADERS and what.waits()][-_WAITING:]
    sweep()


def present() -> LossTracking | None:
    """What is followed in this thread and not over."""
    found: LossTracking | None = getattr(_HERE, "following", None)
    return None if found is None or found.over else found


def waits() -> bool:
    """Whether a backward may come, in this thread, through a forward that has ended."""
    found, waiting = present(), getattr(_HERE, "waiting", [])
    every = waiting if found is None else [*waiting, *found.waiting, found.what]
    return any(what.moment.owner is not LOADERS and what.waits() for what in every)


def set_aside() -> LossTracking | None:
    """Follow nothing for now: what is done is of no private batch."""
    found = present()
    if found is not None:
        _HERE.following = None
        remove(found)
    return found


def take_up(found: LossTracking | None) -> None:
    """Go on following what was set aside."""
    if found is None or found.over:
        return
    if (other := present()) is not None:  # of another model, meanwhile
        other.waiting.append(found.what)
        found.finish()
        return
    _HERE.following = found
    set_generation(found.moment)
    insert(found)


def sweep() -> None:
    """Take away what a backward has ended, and what follows copies after it."""
    later_copies.end()
    if present() is None:
        _HERE.following = None


@contextlib.contextmanager
def swept() -> Iterator[None]:
    sweep()
    try:
        yield  # work that is not the user's
    finally:
        if present() is None:
            later_copies.begin()


def stop(engine: Engine | None = None) -> None:
    """Follow no longer in this thread: an engine's batches, or all."""
    pause()
    others = [what for what in _HERE.waiting if engine is not None and what.engine() is not engine]
    _HERE.waiting = []
    _follow(others)
