"""Hooks on the model's modules: begins and ends the capture pass of each outermost forward."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.aliasing import look
from ..batch_axis.batch_slices import BESIDE, WRITTEN
from ..batch_axis.generations import Generation, Token, set_generation
from ..batch_axis.inputs import (
    Batching,
    lists_of_numbers,
    nested_tensors,
    outputs_apart,
    packed_sequences,
    tag_inputs,
    tag_packed,
)
from ..batch_axis.layout import Layout, generation_of, layout_on, tag_of
from ..batch_axis.own_numbers import DRAWN, OWN_NUMBERS
from ..batch_axis.tensor_notes import note_parameter, was_filled
from ..errors import FastDPError, StepError
from ..grad_sample import device_streams
from ..grad_sample.parameter_links import link_of
from ..utils.autograd_graph import on_gradient
from ..utils.garbage_collection import COLLECTOR
from . import later_copies, loss_tracking
from .attach_checks import is_stateless, refuse_hooks
from .backward import Arrival, Backward
from .buffer_checks import Stateful, is_held, refuse_filled, states_of, warn_of_states
from .capture import Pass
from .checkpointing import watch_region
from .compile_stance import PLAINLY, CompiledModules
from .forward_record import caller_of, joined_error
from .forward_threads import Turn
from .loader_tracking import given_to_model, handed_out_in, loader_of, read_in, refuse_more_rows, refuse_rows_apart
from .memory_budget import Block
from .mode_stack import end, leave
from .module_hooks import ENTER, LEAVE, InnerCalls, ModuleHook, numbered
from .multiple_forwards import Given
from .public_forward import PublicBlock, PublicForward
from .state import ENGINES, Engine, attached, drop_interrupted
from .tracked_loss import Evaluation


class Forward(Engine):
    """Enters a pass where the model (or a module of it, called alone) begins, and leaves it where that ends."""

    def __init__(self, model: nn.Module, backward: Backward, batching: Batching) -> None:
        super().__init__(model, backward, batching)
        self._moments: list[Generation] = []  # of forwards that no backward has gone through
        self._ended: list[Generation] = []  # that of the forward before
        self._turn = Turn()
        self._argument_layouts: dict[str, list[Layout | None]] = {}
        self._handles: list[Any] = []
        self._hooks: dict[str, ModuleHook] = {}  # the same ones again, so that recordings stay those of this model
        self._warned = set[str]()  # buffers that hold data
        self._buffers = states_of(self.model)
        self._writing = set[str]()  # modules that write buffers in eval mode
        self._states: dict[str, list[tuple[nn.Module, str, str]]] = {}  # of modules called without gradients
        self._compiled: CompiledModules | None = None
        backward.ended = self.backward_ended

    # ------------------------------------------------------------------ on the model and off it

    def attach(self) -> None:
        """Put hooks on every module."""
        self._compiled = CompiledModules(self.model)
        for path, module in self.model.named_modules():
            hook = self._hooks.setdefault(path, ModuleHook(self, path))
            before = module.register_forward_pre_hook(hook.enter, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(hook.leave, with_kwargs=True, always_call=True)
            self._handles += [numbered(before, ENTER, first=True), numbered(after, LEAVE)]
        self._inner = InnerCalls(self.model, self.running)
        self._handles.append(self._inner)
        for parameter in self.model.parameters():
            note_parameter(self.backward.tracked.whole(parameter))
        attached(self)

    def detach(self) -> None:
        """Take every hook off the model."""
        self.drop_interrupted()
        loss_tracking.stop(self)
        self.take_off()

    def take_off(self) -> None:
        """Take the hooks off the model; what is open stays open."""
        ENGINES.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._compiled is not None:
            self._compiled.restore()

    @contextlib.contextmanager
    def public(self) -> Iterator[None]:
        """Within it, forwards and backwards are ordinary ones: hooks do nothing, and no batch is followed."""
        if self.running.active is not None or torch._C._current_graph_task_id() != -1:
            raise StepError("public() within a forward or backward of the model: begin it before, or after")
        followed = loss_tracking.set_aside()
        self.backward.public += 1
        try:
            with PublicBlock(self.backward):
                yield
        finally:
            self.backward.public -= 1
            loss_tracking.take_up(followed)
            self.backward.others.begin()

    # ------------------------------------------------------------------ a module's forward

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not path:
            self.drop_interrupted()
        here = self.running
        if self.graphed is not None and self.begins_pass() and not (path and _is_no_pass(module, args, kwargs)):
            self.graphed.seen(path, module)
        here.entered.append(None)
        if self.backward.public:
            if len(here.entered) == 1 and torch.is_grad_enabled():
                here.entered[-1] = PublicForward(self.backward, (args, kwargs))
        elif here.active is not None:
            self._enter_inner(here.active, path, module, args, kwargs)
        elif torch.is_grad_enabled() and not (path and _is_no_pass(module, args, kwargs)):
            try:
                with self.backward.tracked.steady():
                    here.entered[-1] = here.active = self._begin_pass(path, args, kwargs)
            except FastDPError as error:
                self.backward.refused(error)
                raise
        elif not torch.is_grad_enabled() and len(here.entered) == 1:
            here.entered[-1] = self._without_gradients(path, module, args, kwargs)

    def begins_pass(self) -> bool:
        """Whether a forward that begins now is an outermost one, which a backward may follow."""
        return (
            not self.running.entered and torch.is_grad_enabled() and not self.backward.public and not self.runs_again()
        )

    def _without_gradients(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Evaluation | Stateful | None:
        """A forward without gradients: while a loss is computed, of a target for it, perhaps."""
        later_copies.end()
        evaluation, followed = None, None if path else loss_tracking.present()
        if followed is not None and followed.batch > 1 and followed.what.engine() is self:
            with contextlib.suppress(FastDPError):  # of inputs that hold no samples
                if self.batching.samples(args, kwargs) == followed.batch:
                    evaluation = followed.evaluates((args, kwargs), self.batching.dim, self.batching.folded)
        if watch := path not in self._states or path in self._writing:
            self._states[path] = states_of(module, path)
        if not (states := self._states[path]):
            return evaluation
        return Stateful(self.model, states, watch, evaluation, lambda: self._writing.add(path))

    def _enter_inner(self, active: Pass, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        active.stack.append(path)
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            return  # no checkpointing around this call: nothing will be computed again
        block = self.backward.replays.entered(path, module) if self._begins_block(active) else None
        with torch._C.DisableTorchFunction():  # the mode is on
            self._remember_layouts(active, path, [tag_of(t, self.batch) for t in nested_tensors((args, kwargs))])
        if block is not None:
            self.running.entered[-1] = block
            block.inputs = [weakref.ref(t) for t in nested_tensors((args, kwargs))]
            block.inner.__enter__()

    def _begin_pass(self, path: str, args: Any, kwargs: Any) -> Pass:
        """The outermost forward; also of a module that checkpointing computes again."""
        backward = self.backward
        recomputing = self.runs_again()
        drop_interrupted()
        followed = loss_tracking.present()
        if not recomputing:
            loss_tracking.pause()  # before all else: what is done here is not the user's
            self._turn.take(backward.thread())
        if not recomputing or not path:
            self.batch = self._samples(args, kwargs)
            backward.whose.given(loader_of(nested_tensors((args, kwargs))))
            self.people = backward.whose.of_batch(self.batch)
        if not recomputing:
            if not path:
                backward.tracked.check_complete()
            backward.forward_begins()
            backward.looks_at((args, kwargs))
        named = backward.tracked.named()
        refuse_hooks(named)
        if backward.tracked.is_sharded:
            refuse_hooks({name: backward.tracked.part(p) for name, p in named.items()})
        tracked = {id(p): name for name, p in named.items()}
        if recomputing and backward.replays.collect is None and path in backward.replays.blocks:
            backward.replays.blocks[path].computed_again(args, kwargs)
        moments = self._moments or self._ended
        moment = moments[-1] if recomputing and moments else None  # of the forward that is computed again
        active = Pass(self, self.batch, tracked, not recomputing or not path, self.people, moment)
        active.recomputes = recomputing
        if not recomputing:
            self._note_batch(active, path, nested_tensors((args, kwargs)), followed)
        set_generation(active.moment)
        self.sizes.begin()
        OWN_NUMBERS.clear()
        OWN_NUMBERS.given(lists_of_numbers((args, kwargs), self.batch))
        WRITTEN.clear()
        BESIDE.clear()
        active.stack.append(path)
        known = self._argument_layouts.get(path) if recomputing and path else None
        constants = None if recomputing else self.batching.constants
        tag_inputs((args, kwargs), self.batch, self.batching.dim, known, self.batching.folded, constants)
        tag_packed((args, kwargs), self.batch)
        device_streams.keep(nested_tensors((args, kwargs)))
        active.caller = caller_of(sys._getframe(1))
        active.mode.__enter__()
        COLLECTOR.begin(backward)
        PLAINLY.begin()
        self._inner.begin()
        return active

    def _samples(self, args: Any, kwargs: Any) -> int:
        """The number of samples: of the batch of which a forward before made an argument (of `model.encode(x)`, whose
        modules are called one by one), else what sizes and marks say."""
        for tensor in nested_tensors((args, kwargs)) if self._moments else ():
            layout, moment = layout_on(tensor), generation_of(tensor)
            if layout is not None and moment is not None and any(moment is mine for mine in self._moments):
                return layout.batch
        return self.batching.samples(args, kwargs)

    def _note_batch(self, active: Pass, path: str, tensors: list[Tensor], followed: Any) -> None:
        """What a new pass must know of its batch: its generation, the loader's batch, and numbers read of it before."""
        active.moment.before = handed_out_in(followed, self.batch)
        if not active.moment.before:
            OWN_NUMBERS.loaded(())  # of another batch
            DRAWN.clear()
        given_to_model(self, tensors)
        refuse_rows_apart(self.batch, self.batching.rows_per_sample, tensors)
        self._moments.append(active.moment)
        active.moment.token = Token()
        active.read, unknown = read_in(followed, self.batch, tensors)
        if unknown:
            self.reads.note(unknown, None)
        hand, one = self.backward.whose.in_hand, self.batching.size == 1
        if hand is None:
            refuse_more_rows(followed, self.batch, tensors)
        active.given = Given(path, tensors, self.batch, self.batching.dim, hand, one, active.moment)

    def runs_again(self) -> bool:
        """Whether a forward is computed again, by checkpointing or for a second backward of a block."""
        return torch._C._current_graph_task_id() != -1 or self.backward.replays.collect is not None

    @contextlib.contextmanager
    def again(
        self, path: str, batch: int, values: Any, layouts: list[Layout | None], moment: Generation
    ) -> Iterator[None]:
        if self.running.active is not None or not torch.is_grad_enabled():
            yield
            return
        self.batch = batch
        tracked = {id(p): name for name, p in self.backward.tracked.named().items()}
        set_generation(moment)
        active = self.running.active = Pass(self, batch, tracked, False, self.people, moment)
        active.recomputes = True
        active.stack.append(path)
        tag_inputs(values, batch, self.batching.dim, layouts, self.batching.folded)
        try:
            with active.mode:
                yield
        finally:
            self.running.active = None
            active.let_go()
        active.check_unwritten()

    def _begins_block(self, active: Pass) -> bool:
        """Whether a checkpointed region begins that a budget may want to run again."""
        if self.planner.memory_budget is None or not active.count:
            return False
        return torch.is_grad_enabled() and not any(isinstance(e, Block) for e in self.running.entered)

    def _remember_layouts(self, active: Pass, path: str, layouts: list[Layout | None]) -> None:
        """For recomputation under checkpointing, which calls inner modules on tensors without layouts."""
        if not active.count:
            return  # what the first forward saw stands
        before = self._argument_layouts.get(path)
        if path in active.called and before is not None and _differ(before, layouts):
            alone = not torch.is_grad_enabled() and any(
                layout is not None and layout.alone >= 0 for layout in (*before, *layouts)
            )
            why = f"module '{path}' is called for each sample under reentrant checkpointing (use_reentrant=False)"
            watch_region(self, active.path, self.batch, active.moment, calls=1)
            # called in two ways: which is recomputed cannot be told; a sample's rows must not pass for samples
            # (without reentrance the first forward's records stand, and layouts do not matter)
            layouts = [Layout(self.batch, mixed=why) if alone else None] * len(layouts)
        active.called.add(path)
        self._argument_layouts[path] = layouts

    def leave(self, out: Any) -> Any:
        here = self.running
        if not here.entered:
            return None
        started = here.entered.pop()
        if isinstance(started, Pass):
            if out is None and isinstance(error := sys.exc_info()[1], FastDPError):
                self.backward.refused(error)
            try:
                return self._leave_pass(started, out)
            except FastDPError as error:
                self.backward.refused(error)
                raise
        if here.active is not None and here.active.stack:
            here.active.stack.pop()
        if started is not None:
            started.leave(out)
        if not here.entered and not torch.is_grad_enabled() and loss_tracking.present() is None:
            later_copies.begin()
        return None

    def _leave_pass(self, started: Pass, out: Any) -> Any:
        """The outermost forward ends. Returns what to put in place of its result, or None."""
        self._inner.end()
        PLAINLY.end()
        leave(started.mode)
        started.let_go()
        self.running.active = None
        self._turn.give()
        if out is not None:
            started.check_unwritten()
            self.judge_writes()
            if started.count and ((filled := was_filled(started.filled)) or is_held(self._buffers)):
                warn_of_states(self.model, self.batch, self._warned)
                if filled:
                    refuse_filled(self.model)
        if not any(tensor.requires_grad for tensor in nested_tensors(out)):
            COLLECTOR.end(self.backward)  # no backward will
        if self.backward.replays.collect is not None:
            return None
        apart = outputs_apart(out, self._is_guess)
        unseen = Layout(self.batch, mixed=started.unseen) if started.unseen else None
        layouts: list[Layout] = []
        arrivals: list[Arrival] = []
        for tensor in nested_tensors(out if apart is None else apart):
            # (leaves, and what is made of parameters alone, need no watch: no sample's gradient arrives there)
            if tensor.requires_grad and not tensor.is_leaf and link_of(tensor) is None:
                layout = look(tensor, tag_of(tensor, self.batch), self.batch) or unseen
                arrivals.append(Arrival(self.backward, layout))
                on_gradient(tensor, arrivals[-1])
                layouts += [] if layout is None else [layout]
        if out is not None and not self.runs_again():
            loss_tracking.start(self.batch, started.moment, self, layouts, arrivals, started)
        return apart

    def backward_ended(self) -> None:
        """A backward went through forwards: what is kept of their batches belongs to the past."""
        reached = [moment for moment in self._moments if moment.reached]
        for moment in self._moments:
            moment.alive = moment.alive and not (moment.reached or moment.survived)
            moment.survived = True
        self._ended = self._moments[-1:] or self._ended  # norms and sums may compute parts of it again
        self._moments = [moment for moment in self._moments if moment.alive]
        why = next((why for moment in reached for other, why in moment.doubts.items() if other.reached), "")
        if why:
            raise joined_error(why)

    def _is_guess(self, tensor: Tensor) -> bool:
        """Whether it matters if the loss takes this output itself, or only what the model goes on to make of it."""
        layout = tag_of(tensor, self.batch)
        return tensor.requires_grad and layout is not None and bool(layout.inferred)

    def drop_interrupted(self) -> None:
        """A pass is on whose forward, or one that a backward computed again, was ended by Ctrl-C."""
        if self.running.entered and isinstance(watched := self.running.entered[0], Stateful):
            watched.stop()
            self.running.entered.clear()
        if self.running.active is None or ("" not in self.running.active.stack and self.runs_again()):
            return
        end(self.running.active.let_go(), *(e.inner for e in self.running.entered if isinstance(e, Block)))
        self._inner.end()
        PLAINLY.end()
        COLLECTOR.end(self.backward)
        self._turn.give()
        self.running.active = None
        self.running.entered.clear()


def _is_no_pass(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call meets neither data nor what is trained (an absent context's embedding, called on its own), or is
    of a module without parameters in the forward of another model, which has it, too."""
    tensors = nested_tensors((args, kwargs)) or packed_sequences((args, kwargs))
    constant = not tensors and not any(p.requires_grad for p in module.parameters())
    return constant or is_stateless(module) and any(engine.running.active is not None for engine in ENGINES)


def _differ(a: list[Layout | None], b: list[Layout | None]) -> bool:
    plain = [
        [None if layout is None else layout._replace(owner=None, order=None) for layout in items] for items in (a, b)
    ]
    routed = any(layout is not None and layout.owner is not None for layout in (*a, *b))
    return routed or plain[0] != plain[1]
