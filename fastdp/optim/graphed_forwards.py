"""Forwards and backwards that are recorded and replayed in a loop of the user's own (`graphed=True`)."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_flatten

from ..batch_axis.inputs import mark_of
from ..distributed.world import refuse_several
from ..engine import loss_tracking
from ..engine.module_hooks import ModuleHook
from ..engine.per_sample import PerSampleGradients
from ..engine.state import ENGINES
from ..errors import BatchReadWarning, GraphError, LossReductionWarning
from ..graphs import making
from ..graphs.batches import Batch, copies, odd_leaf, shape_of
from ..graphs.cuda_graph import Pool, device_of
from ..graphs.forward_program import ForwardProgram, Leftovers, Outputs, StaleExample, node_number
from ..graphs.guards import GLOBAL_HOOKS
from ..graphs.replayed_forward import Replay
from ..graphs.steps import OTHER_ROWS, device_of_model
from ..utils.pytree import tensors_of
from .forward_shapes import CHANGES, Shape

PAYS = 100  # forwards for each recording beyond the first: one costs some twenty of them
RECORDINGS = 24  # at most: each holds a forward and backward of one shape
_FIRST = "a shape that was not met before, or not often"
_CHECK = "compared with a replay"
_UNSEEN = (
    "Python gives other outputs than a replay, so the forward depends on something that changes beside its arguments, "
    "parameters and buffers (a number kept outside of the modules, say): pass it as an argument"
)
_NOT_RETURNED = (
    "the forward leaves tensors behind that it does not return{shapes}, in a list or a class, perhaps, for the loss to "
    "take: a replay would not make them. Return them"
)
_SHAPES = 256  # of which it is noted how often they are met


class GraphedCall:
    """What torch calls for a module (in the place where it keeps compiled code, which copies do not have)."""

    of_fastdp = True

    def __init__(self, graphed: GraphedForwards, path: str, module: nn.Module) -> None:
        self._graphed, self._path, self._module = graphed, path, weakref.ref(module)
        known = module._compiled_call_impl
        self.before = None if isinstance(known, GraphedCall) else known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        prepared = self._graphed.prepared(self._path, module, args, kwargs)
        if prepared is None:
            return module._call_impl(*args, **kwargs)
        own, plain = module.__dict__.get("forward"), module.forward

        def back() -> None:
            if own is not None:
                module.__dict__["forward"] = own
            else:
                module.__dict__.pop("forward", None)

        def forward(*args: Any, **kwargs: Any) -> Any:
            back()
            return self._graphed.forward(prepared, plain, args, kwargs)

        module.__dict__["forward"] = forward  # for this call: hooks run around it
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            back()


class Prepared(NamedTuple):
    """What is known of a forward when it begins."""

    shape: Shape
    leaves: Sequence[Any]
    samples: int
    program: ForwardProgram | None


class GraphedForwards:
    """Replays the outermost forwards of a model and what their backwards make of the outputs' gradients.

    A forward is recorded when its shape is met again. What does not fit goes through Python.

    replayed, eager: how many forwards went either way; reasons: why those did not, by how many. free: whether no
    backward waits for its step.
    """

    def __init__(self, engine: PerSampleGradients, mean: bool, free: Callable[[], bool]) -> None:
        self._engine, self._mean, self._free = engine, mean, free
        self._device = device_of_model(engine)
        if engine.planner.memory_budget is not None:
            raise GraphError("memory_budget= runs blocks again within backward, which is not recorded: leave it out")
        device = device_of(self._device)
        self._pool = None if device is None else Pool(device)
        self._forward = engine.graph_forwards(self)
        self._shapes: dict[Any, Shape] = {}
        self._fixed: dict[str, set[int]] = {}
        self._calls: dict[int, tuple[nn.Module, GraphedCall]] = {}
        self._last: Outputs | None = None  # what the last forward by Python gave
        self.replayed = self.eager = self._tried = 0
        self.reasons = Counter[str]()

    def remove(self) -> None:
        """Let torch call the modules again."""
        for module, call in self._calls.values():
            if module._compiled_call_impl is call:
                del module._compiled_call_impl
                if call.before is not None:
                    module._compiled_call_impl = call.before
        self._calls = {}
        self._shapes = {}
        self._forward.graphed = None

    def told(self) -> str:
        """How many forwards were replayed, and why others were not."""
        lines = [f"replayed: {self.replayed} forwards of {self.replayed + self.eager}"]
        lines += [f"  through Python: {count} ({why})" for why, count in self.reasons.most_common()]
        return "\n".join(lines)

    # ------------------------------------------------------------------ before a forward

    def seen(self, path: str, module: nn.Module) -> None:
        """An outermost forward of a module begins: replay those that follow."""
        if id(module) in self._calls or making() or self._forward.runs_again():
            return
        known = module._compiled_call_impl
        if known in (None, module._call_impl) or isinstance(known, GraphedCall):
            call = GraphedCall(self, path, module)
            self._calls[id(module)] = module, call
            module._compiled_call_impl = call
            self._goes_eagerly(_FIRST, warns=False)
        else:
            self._goes_eagerly("module.compile() stands in a replay's place: use model = torch.compile(model)")

    def prepared(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Prepared | None:
        """What is known of a call of a module, after it was recorded if it is time to. None where it is not replayed,
        whatever it is given."""
        if making() or self._forward not in ENGINES or not self._forward.begins_pass() or _transformed():
            return None
        try:
            for engine in list(ENGINES):  # (of another model, too, if all the forwards of a loop have one backward)
                if engine.graphed is not None:
                    engine.graphed.record_due()
            return self._known(path, module, args, kwargs)
        except GraphError as why:
            self._goes_eagerly(str(why))
            return None

    def _known(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Prepared | None:
        leaves, spec = tree_flatten((args, kwargs))
        self._check(module, leaves)
        samples = self._forward.batching.samples(args, kwargs)
        if samples < 2:
            self._goes_eagerly("of one sample alone, nothing tells samples from constants", warns=False)
            return None
        key = (path, spec, shape_of(leaves, samples, self._fixed.setdefault(path, set())))
        if len(self._shapes) > _SHAPES:  # of arguments that change every time, mostly
            self._shapes = {key: shape for key, shape in self._shapes.items() if shape.programs}
        shape = self._shapes.setdefault(key, Shape())
        if shape.is_refused():
            raise GraphError(shape.refused)
        program = shape.fitting(samples)
        if program is None:
            if shape.example is not None and shape.example.hooked:
                raise GraphError("an output has a hook, or retains its gradient, of which a replay has only a part")
            size = shape.size_to_record(samples)
            if size and shape.example is not None:
                by_sample = [isinstance(leaf, Tensor) and kind[2] for leaf, kind in zip(leaves, key[2], strict=True)]
                own = Batch(spec, tuple(by_sample), size)
                if self._may_record():
                    found = self._recorded(module, shape, own, leaves)
                    program = found if size == samples or not found.only else None
                else:
                    shape.due = functools.partial(self._recorded, module, shape, own, copies(leaves))
        return Prepared(shape, leaves, samples, program)

    def _check(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        if self._forward.batching.dim or self._forward.batching.size or self._forward.batching.rows_per_sample > 1:
            raise GraphError("batch_first=False, batch_size= and rows_per_sample= are not replayed")
        if self._engine.grouped() or any(isinstance(leaf, Tensor) and mark_of(leaf) for leaf in leaves):
            raise GraphError("group_by() and mark_rows() say of each batch whose its rows are")
        if self._engine.profile:
            raise GraphError("explain(profile=True) measures every use")
        if odd := odd_leaf(leaves):
            raise GraphError(f"the model is given a {odd}")
        tensors = tensors_of(leaves)
        if any(tensor.requires_grad for tensor in tensors):
            raise GraphError("the model is given a tensor that requires grad")
        if any(tensor.layout != torch.strided for tensor in tensors):
            raise GraphError("the model is given sparse numbers")
        if any(type(t) is not Tensor or any(not name.startswith("_fastdp") for name in t.__dict__) for t in tensors):
            raise GraphError("the model is given a tensor of a class of its own, or with attributes")

    def _may_record(self) -> bool:
        if self._tried * PAYS > self.replayed + self.eager:
            return False
        return self._free() and not loss_tracking.waits()

    def record_due(self) -> None:
        """Record what was to be, when a backward waited for its step or a forward for its backward."""
        for shape in list(self._shapes.values()):
            if shape.due is not None and self._forward.begins_pass() and self._may_record():
                due, shape.due = shape.due, None
                if shape.example is not None and not shape.refused:
                    with contextlib.suppress(GraphError):  # which is noted
                        due()

    def _recorded(self, module: nn.Module, shape: Shape, batch: Batch, leaves: Sequence[Any]) -> ForwardProgram:
        """A recording of this size. Raises GraphError where there is none, and notes that."""
        assert shape.example is not None
        if sum(len(each.programs) for each in self._shapes.values()) >= RECORDINGS:
            raise GraphError(f"{RECORDINGS} forwards are recorded, and there are more: pad to fewer lengths")
        self._tried += 1
        followed = loss_tracking.set_aside()
        try:
            _check_hooks(module)
            if others := self._engine.others():
                raise GraphError(f"'{others[0]}' requires grad and is not this optimizer's")
            example, leftovers = batch.of_size(copies(leaves), batch.size), Leftovers()
            with warnings.catch_warnings():
                for kind in (LossReductionWarning, BatchReadWarning):  # of the loss of a recording
                    warnings.simplefilter("ignore", kind)
                program = ForwardProgram(self._engine, module, shape.example, batch, example, self._mean, self._pool)
            for _ in range(3):  # (what autograd's nodes hold is garbage once they are gone)
                if not leftovers.found():
                    break
                gc.collect()
            else:
                if left := leftovers.found():
                    shapes = ", ".join(str(list(each.shape)) for each in left[:3])
                    raise GraphError(_NOT_RETURNED.format(shapes=f" (of shapes {shapes})"))
        except StaleExample:
            shape.example = None
            raise
        except Exception as problem:
            shape.refused = str(problem)
            raise GraphError(shape.refused) from problem
        finally:
            loss_tracking.take_up(followed)
        shape.recorded(program)
        return program

    # ------------------------------------------------------------------ the forward

    def forward(self, prepared: Prepared, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the forward that was prepared. plain: the module's own."""
        active, shape, program = self._forward.running.active, prepared.shape, prepared.program
        if active is None:
            return plain(*args, **kwargs)
        if program is not None and not program.may_take(prepared.leaves, prepared.samples, tagged=True):
            self._goes_eagerly(OTHER_ROWS)
            return plain(*args, **kwargs)
        if program is None:
            self._goes_eagerly(shape.changed or _FIRST, warns=False)
            return self._noted(prepared, plain, args, kwargs)
        again = functools.partial(self._takes_others, shape)
        replay = Replay(program, active, plain, (args, kwargs), prepared.leaves, prepared.samples, again)
        program.count += 1
        if program.count in (8, 64) or program.count % 256 == 0:  # by Python, and compared
            self._goes_eagerly(_CHECK, warns=False)
            wanted, out = replay.outputs(), plain(*args, **kwargs)
            if wanted is not None and not replay.gives(wanted, out):
                shape.programs, shape.refused = [], _UNSEEN
                warnings.warn(f"forwards are replayed no longer: {_UNSEEN}", stacklevel=6)
            return out
        out = replay.run()
        if out is None:
            self._goes_eagerly("Python decides another way, by numbers of the batch or of a buffer")
            shape.missed()
            return self._noted(prepared, plain, args, kwargs)
        shape.misses = 0
        self.replayed += 1
        return out

    def _noted(self, prepared: Prepared, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What Python's forward gives, which is noted until its backward."""
        shape, begin = prepared.shape, node_number()
        out = plain(*args, **kwargs)
        try:
            with torch._C.DisableTorchFunction():
                example = Outputs(out, prepared.samples, tensors_of((args, kwargs)), begin)
                now = tree_flatten((args, kwargs))[0]
                if len(now) != len(prepared.leaves) or any(
                    a is not b for a, b in zip(now, prepared.leaves, strict=True)
                ):
                    raise GraphError("the forward changes its arguments")
        except GraphError as why:
            if not shape.programs:
                shape.refused = str(why)
            return out
        shape.note(example)
        self._last = example
        return out

    def backward_begins(self, roots: Sequence[Tensor]) -> None:
        """A backward begins, at these tensors."""
        for shape in self._shapes.values():
            for noted in shape.noted:
                noted.look(roots)
                if noted.inner:
                    shape.refused, shape.programs, shape.example = _NOT_RETURNED.format(shapes=""), [], None
                elif noted.reached:
                    shape.example = noted
            # (another model's backward may come before its own)
            shape.noted = [each for each in shape.noted if not (each.reached or each.passed)]
            for noted in shape.noted:
                noted.passed = True

    def gradients_asked(self) -> None:
        """torch.autograd.grad was called, of outputs perhaps, between which a replay has no graph."""
        if self._last is not None:
            self._last.hooked = True

    def _takes_others(self, shape: Shape) -> None:
        """The loss took other outputs than when the shape was recorded: record it anew, unless that goes on."""
        self.replayed -= 1
        self._goes_eagerly("the loss took other outputs than before", warns=False)
        shape.again += 1
        shape.programs, shape.example = [], None
        if shape.again > CHANGES:
            shape.refused = "the loss takes now these outputs, now others"

    def _goes_eagerly(self, why: str, warns: bool = True) -> None:
        if warns and why not in self.reasons:
            warnings.warn(f"a forward is not replayed but goes through Python: {why}", stacklevel=6)
        self.reasons[why] += 1
        self.eager += 1


def graph_forwards(privacy: Any) -> GraphedForwards:
    """Replay the forwards of a `PrivateStep`, whose engine was attached. Raises GraphError where none could be."""
    refuse_several(privacy.world, "graphed=True", "train without it")
    privacy.replica.refuse_parts("graphed=True")
    return GraphedForwards(privacy.engine, privacy.loss_reduction == "mean", lambda: not privacy.pending())


def _transformed() -> bool:
    """Whether torch traces what it calls, or transforms it (vmap, jvp)."""
    traced = torch._C._get_tracing_state() is not None
    return traced or torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _check_hooks(module: nn.Module) -> None:
    """Raises GraphError where a module has hooks beside the engine's, or all modules have."""
    if any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
        raise GraphError("all modules have a hook (register_module_forward_hook), which a replay would not call")
    for path, each in module.named_modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            if any(
                not isinstance(getattr(hook, "__self__", None), ModuleHook) for hook in getattr(each, name).values()
            ):
                raise GraphError(f"module '{path}' has a hook, which a replay would not call")
