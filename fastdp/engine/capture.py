"""The pass of a forward: a `TorchFunctionMode` that sees every torch function call and dispatches it.

Calls on data alone propagate layouts (`batch_axis.propagate`); calls on parameters alone make derived parameters
(`grad_sample.parameter_links`); calls that combine the two go to a rule (`grad_sample`), or to the generic one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import grad_sample as _use_rules  # noqa: F401  (registers the rules of uses)
from ..batch_axis.aliasing import keep_apart, versions_of, write_unaccounted
from ..batch_axis.batch_slices import NOTED, stamp
from ..batch_axis.calls import Call
from ..batch_axis.generations import Generation
from ..batch_axis.layout import Layout, tag, tag_of
from ..batch_axis.operator_table import BASE, COMPUTING, REACHING_GRAPH, SHAPED, TAKING_A_TYPE, TELLING_SIZES
from ..batch_axis.probing import keep_target
from ..batch_axis.propagate import format_of, propagate
from ..batch_axis.python_reads import GIVING, EscapedValues
from ..batch_axis.row_groups import People
from ..batch_axis.tensor_notes import HOLDING, UNTRACKED
from ..batch_axis.totals import by_size
from ..batch_axis.written_constants import note_constant
from ..errors import SampleMixingError, UncapturedUseError
from ..grad_sample.attention import COMPOSITES
from ..grad_sample.captured_call import Applied
from ..grad_sample.forward_pass import ForwardPass
from ..grad_sample.generic import capture_generic, capture_in_format
from ..grad_sample.one_sample import one_sample_of
from ..grad_sample.parameter_links import Unwritten, leaves_of, link_of, mark_derived, span_of
from ..grad_sample.parameter_use import ParameterUse
from ..grad_sample.repeated_parameters import note_repeated, with_rows
from ..grad_sample.routed_rows import PRODUCTS, gathered_of
from ..grad_sample.rules import USE_RULES
from .activation_hooks import hooked, refuse_node
from .call_cache import inquires, tag_results
from .call_checks import (
    IN_PARTS,
    LEFT_OUT,
    look_beneath,
    of_no_samples,
    poisoned,
    refuse_numbers_of_data,
    roles_of,
    unmoved,
)
from .checkpointing import watch_region
from .forward_record import PassRecord
from .known_calls import MISSED, captured_by
from .parameter_slices import FOLLOWED, follow, note_parts
from .state import ENGINES, Engine


class Pass(PassRecord):
    """One outermost forward of the model (or of one of its modules)."""

    watcher = None  # known_calls.cpp asks for it

    def __init__(
        self,
        engine: Engine,
        batch: int,
        tracked: dict[int, str],
        count: bool = True,
        people: People | None = None,
        moment: Generation | None = None,
    ) -> None:
        super().__init__(batch, people, count, moment or Generation(engine.owner))
        self.engine, self.backward, self.tracked = engine, engine.backward, tracked
        self.arrived, self.memo, self.planner = engine.backward.arrived, engine.memo, engine.planner
        self.token, self.lowers, self.root = engine.token, engine.backward.tracked.lowers, type(engine.model).__name__
        self.stack, self.called = list[str](), set[str]()  # module paths, innermost last; of all called so far
        self.unseen, self.filled = "", HOLDING.turn  # what took data out of sight, if something did; as of its begin
        self.mode: Any = _CaptureMode(self)  # None once the forward has ended
        self._applied: list[Applied] | None = None  # captured calls, within a rule
        self.unaccounted = False  # the last call wrote to tensors that its rule does not speak of
        self.known_calls = self.memo.calls_of(batch, tracked, self.stack, engine.sizes) if batch > 1 else None
        self.by_nodes = engine.planner.memory_budget is None  # captured calls may be autograd's own nodes
        if self.known_calls is not None:
            self.known_calls.serve(self.mode)
        self.made_data: dict[int, Any] = {}
        engine.owned.begin()
        self.exposed, self.reads = EscapedValues(batch, engine.model), engine.reads
        self.taken, self.used = Unwritten(), Unwritten()  # of joined rows; tensors made of parameters, by uses

    @property
    def path(self) -> str:
        return (self.stack[-1] if self.stack else "") or self.root

    def place(self, name: str) -> str:
        return f"{name}() in module '{self.path}'"

    def names_of(self, tensors: Iterable[Tensor]) -> str:
        """The parameters that these tensors are, or are made of, for messages."""
        names = [self.tracked.get(id(leaf), "?") for tensor in tensors for leaf in leaves_of(tensor)]
        return ", ".join(f"'{name}'" for name in dict.fromkeys(names))

    def begin_record(self, path: str) -> bool:
        return self.backward.begin_record(self, path)

    def regrouped(self, use: ParameterUse) -> ParameterUse:
        people = self.people  # a use of theirs already, or of a record each
        return use if people is None or use.batch == people.count else use.regroup(people)

    def record(self, use: ParameterUse) -> None:
        self.backward.record(self.regrouped(use))

    def is_tracked(self, tensor: Tensor) -> bool:
        return id(tensor) in self.tracked

    def infer_layout(self, tensor: Tensor) -> Layout | None:
        """Layout of data of unseen origin: the only dimension of the batch's size, with none before it of several."""
        if self.unseen:
            return None
        if self.batch <= 1:
            return Layout(self.batch)
        dims = [dim for dim, size in enumerate(tensor.shape) if size == self.batch]
        if len(dims) != 1 or any(size % self.batch == 0 for size in tensor.shape[: dims[0]]):
            return None
        warnings.warn(
            f"module '{self.path}' takes a tensor of shape {tuple(tensor.shape)} that no torch function made in sight "
            f"of fastdp: its samples are taken to lie in dimension {dims[0]}, each by itself. Check it with "
            "fastdp.verify.",
            stacklevel=2,
        )
        return Layout(self.batch, dims[0])

    def is_only_use(self, operand: Tensor) -> bool:
        uses = self.backward.uses_of.get(id(operand), ())
        return len(uses) == 1 and not self.backward.tracked.is_sharded and self.is_tracked(operand)

    def note_use(self, parameter: Tensor, where: str) -> None:
        for leaf in leaves_of(parameter):
            self.backward.last_use_of[id(leaf)] = where

    def is_parameter(self, tensor: Tensor) -> bool:
        """A tracked parameter, or a tensor derived from tracked parameters."""
        if not tensor.requires_grad:
            return False
        link = link_of(tensor)
        if link is not None and link.version != tensor._version:
            raise UncapturedUseError(
                f"module '{self.path}': a tensor made of parameters was written to through a view of it, which cannot "
                "be followed. Write into the tensor itself, or use torch.cat, torch.where or torch.stack."
            )
        return link is not None or id(tensor) in self.tracked

    def is_data(self, tensor: Tensor) -> bool:
        """Carries samples: tagged, or a differentiable result of unseen origin."""
        if tag_of(tensor, self.batch) is not None:
            return True
        return tensor.requires_grad and not tensor.is_leaf and UNTRACKED not in tensor.__dict__

    def traced(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function made of torch calls with its calls seen, from within a rule."""
        with self.mode or _CaptureMode(self):
            return function(*args, **kwargs)

    def let_go(self) -> Any:
        """The forward has ended: no cycle of the mode, returned, and the pass keeps its tensors until Python looks."""
        mode, self.mode, self.caller = self.mode, None, None
        mode.__dict__.clear()
        return mode

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function call."""
        if inquires(func) or (func == BASE and self._is_around_another()):
            out = func(*args, **kwargs)
            if func in TELLING_SIZES:
                self.engine.sizes.asked(args[0], out, self.batch, *args[1:2], **kwargs)
            return out
        if func in REACHING_GRAPH and not (self.is_parameter(args[0]) and refuse_node(self, func, args[0])):
            return hooked(self.engine.owner, self.path, func, args, kwargs)
        return follow(self, func, args, kwargs) if func in FOLLOWED else self.make(func, args, kwargs)

    def _is_around_another(self) -> bool:
        """Whether the forward of another private model runs within this one: what asks for memory is that."""
        others = (engine.running.active for engine in ENGINES)
        return any(other is not None and other.moment.number > self.moment.number for other in others)

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, by what is known of it, or by what is asked."""
        asked = bool(self.exposed)  # every call, once data has left torch
        signature = None if asked else self.memo.signature(func, args, kwargs, self.batch, self.tracked)
        known = self.memo.layouts(signature)
        if known is not None:
            return tag_results(func(*args, **kwargs), known)
        self.unaccounted = False
        call = Call(func, args, kwargs, self.batch, self.path)
        out = self._ask(call)
        call.forget()
        stamp(call)
        if NOTED:
            self.reads.note(NOTED.pop(), None)
            NOTED.clear()
        if signature is not None and not self.unaccounted:
            self.memo.learn(signature, call)
        return out

    def _ask(self, call: Call) -> Any:
        """A call of a kind not seen before, or with a parameter among its arguments."""
        self.exposed.check(call.tensors)
        parameters, has_data = roles_of(self, call)
        if parameters and not torch.is_grad_enabled():
            # what a module makes of parameters alone (position embeddings) meets data out of it, in the region
            calls = 0 if has_data else len(self.stack)
            watch_region(self.engine, self.path, self.batch, self.moment, calls, parameters)
            self.count_uses(parameters * 2)  # of a region that is computed again, perhaps: not the only use
            for parameter in parameters:
                self.note_use(
                    parameter,
                    f"{self.place(call.name)}, without grad, as in the forward of a torch.autograd.Function (which "
                    "fastdp.register_rule makes seen)",
                )
        elif parameters:
            watch_region(self.engine, self.path, self.batch, self.moment)
            if (other := with_rows(self, call, has_data)) is not None:
                return call.returned(self._ask(other))
            return self._combined(call, parameters) if has_data else self._derived(call, parameters)
        if has_data and call.func in COMPOSITES:
            return call.returned(COMPOSITES[call.func](self, call.func, *call.given))
        if has_data and call.func in PRODUCTS and torch.is_grad_enabled():
            one = one_sample_of(self, call)
            out = PRODUCTS[call.func](self if one is None else one, call.func, *call.given)
            if out is not NotImplemented:
                call.returned(out)
                if one is not None:
                    one.tag_results(call)
                self.count_uses([found[0].operand for t in call.tensors if (found := gathered_of(t)) is not None])
                return out
        return self._carry(call) if has_data else self._made(call)

    def _combined(self, call: Call, parameters: list[Tensor]) -> Any:
        """A call that combines parameters with data: captured."""
        refuse_numbers_of_data(self, call, parameters)
        target = call.args[0] if call.in_place and call.args else None
        for parameter in parameters:
            if link_of(parameter) is not None and parameter is not target:
                self.used.add(parameter)
        try:
            one = one_sample_of(self, call)
            around, self._applied = self._applied, []
            try:
                out = call.returned(self._by_rule(self if one is None else one, call))
            finally:
                applied, self._applied = self._applied, around
            if one is not None:
                one.tag_results(call)
            if not (call.name in COMPUTING and self._judge_sizes(call)) and one is None:
                self._learn_capture(call, applied)
        except SampleMixingError as problem:
            if not problem.mixed or call.in_place:
                raise
            out = call.returned(poisoned(self, call, problem))
        if isinstance(out, Tensor) and link_of(out) is not None:  # w.expand_as(x); w[e], e found in the data: a slice
            note_repeated(call, self.engine.sizes.is_batch)
        else:
            self.count_uses(parameters)
        note_parts(call, self.is_parameter)
        return out

    def _learn_capture(self, call: Call, applied: Sequence[Applied]) -> None:
        """Know the captured call that a rule has just made, the next time."""
        if self.known_calls is not None and not self.exposed and (known := captured_by(call, applied)) is not None:
            signature = self.known_calls.signature(call.func, *call.given)
            if signature is not MISSED:
                self.memo.learn_capture(signature, known)

    def note_applied(self, applied: Applied) -> None:
        if self._applied is not None:
            self._applied.append(applied)

    def _by_rule(self, forward_pass: ForwardPass, call: Call) -> Any:
        func, (args, kwargs) = call.func, call.given
        if kept := next((found for tensor in call.tensors if (found := format_of(tensor))), ""):
            return capture_in_format(forward_pass, func, args, kwargs, kept)
        registered = USE_RULES.get(func)
        if registered is not None and not any(tensor.is_complex() for tensor in call.tensors):
            out = registered(forward_pass, func, args, kwargs)
            if out is not NotImplemented:
                return out
        return capture_generic(forward_pass, func, args, kwargs)

    def _derived(self, call: Call, parameters: list[Tensor]) -> Any:
        """A call on parameters, and constants perhaps: autograd's own."""
        out = call.run()
        note_constant(call, self.engine.owned.__contains__)
        if call.name in COMPUTING:
            self._judge_sizes(call, of_parameters=True)
        for leaf in mark_derived(call, self, parameters):
            self.note_use(leaf, self.place(call.name))
        note_repeated(call, self.engine.sizes.is_batch)
        return out

    def _carry(self, call: Call) -> Any:
        """A call on data alone: its results carry layouts on."""
        moved = unmoved(call)
        if moved is None:
            keep_target(call)
        versions = versions_of(call.tensors)
        out = call.run()
        self._expose(call)
        if moved is not None:
            moved.returned(out)
            propagate(moved)
            return out
        read = propagate(call)
        if read:
            self.reads.note(read, out)
        self._judge_sizes(call)
        self.engine.sizes.note_number(call)
        note_constant(call, self.engine.owned.__contains__)
        if call.name in SHAPED | TAKING_A_TYPE:
            note_repeated(call, self.engine.sizes.is_batch)
        self.unaccounted = write_unaccounted(call, versions)
        return out

    def _made(self, call: Call) -> Any:
        """A call on constants alone, or with gradients switched off."""
        out = call.run()
        self._expose(call)
        self.engine.sizes.note_number(call)
        note_constant(call, self.engine.owned.__contains__)
        note_repeated(call, self.engine.sizes.is_batch)
        for tensor in call.results():
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.__dict__[UNTRACKED] = True
        keep_apart(call.results(), call.tensors)
        self.exposed.made(call)
        return out

    def _expose(self, call: Call) -> None:
        if (call.func in GIVING or self.exposed) and (giving := self.exposed.after(call)):
            self.reads.note(giving, None)

    def _judge_sizes(self, call: Call, of_parameters: bool = False) -> bool:
        """Numbers that sizes told must not be computed with: warned of at first, refused once that is certain. Returns
        whether there are any."""
        by_size(call, self.engine.sizes.has_told)
        why, certain = self.engine.sizes.problem(call)
        if why and not certain:
            self.reads.note(why, None)
        elif why and of_parameters:
            raise SampleMixingError(f"{why}, which changes from batch to batch: use a constant", why)
        elif why:
            for tensor in call.results():
                tag(tensor, Layout(self.batch, mixed=f"{why}, which changes from batch to batch"))
        return bool(why)

    def check_unwritten(self) -> None:
        """Raises UncapturedUseError where what the pass relies on was written to after it was used or taken."""
        self.exposed.check(None)
        if self.used.written():
            raise UncapturedUseError(
                f"module '{self.root}': a tensor made of parameters was written to in place after it had been used, "
                "which cannot be followed. Make a new tensor (w = w * 2, not w *= 2)."
            )
        if self.taken.written():
            raise UncapturedUseError(
                f"module '{self.root}' writes in place into rows taken out of a joined tensor that are made of "
                "parameters alone. Write into the joined tensor (x[:, :1] = ...), or into a clone()."
            )

    def count_uses(self, parameters: Iterable[Tensor]) -> None:
        """A captured call takes these parameters."""
        for parameter in parameters if self.count else ():
            for leaf in leaves_of(parameter):
                self.backward.uses_of.setdefault(id(leaf), []).append(span_of(parameter, leaf))


class _CaptureMode(TorchFunctionMode):
    over = False  # though torch puts it back after the call in which it ended

    def __init__(self, forward_pass: Pass) -> None:
        super().__init__()
        self.forward_pass = forward_pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            return func(*args, **(kwargs or {}))
        kwargs, active = kwargs or {}, self.forward_pass
        if active.is_interrupted():
            active.engine.drop_interrupted()
            return func(*args, **kwargs)
        if active.lowers is not None and (out := active.lowers(active, func, args, kwargs)) is not NotImplemented:
            return out
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside vmap: masks, mostly
            look_beneath(active, func, args, kwargs)
            return func(*args, **kwargs)
        if not active.batch:
            remedy = IN_PARTS if active.backward.tracked.is_sharded else LEFT_OUT
            return of_no_samples(active, active.dispatch, func, args, kwargs, remedy)
        return active.dispatch(func, args, kwargs)
