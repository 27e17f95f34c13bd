"""Forwards and backwards that are recorded and replayed in a loop of the user's own (`graphed=True`)."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..batch_axis.inputs import mark_of
from ..distributed.world import refuse_several
from ..engine import loss_tracking
from ..engine.module_hooks import ModuleHook
from ..engine.per_sample import PerSampleGradients
from ..errors import FastDPError, GraphError
from ..graphs import recording
from ..graphs.batches import Batch, copies, odd_leaf, ordered, shape_of
from ..graphs.cuda_graph import Pool, device_of
from ..graphs.forward_program import ForwardProgram, Outputs, tensors_of
from ..graphs.replayed_forward import Replay
from ..graphs.steps import device_of_model

RECORDINGS = 24  # at most: each holds a forward and backward of one shape
_FIRST = "a shape that was not met before, or not often"
_ENOUGH = 2  # a shape is recorded when it is met that often
_CHANGES = 3  # times, at most, that a shape is recorded anew as the loss takes other outputs
_FILLED = 0.75  # of a recorded size, at least, so that its padding is worth less than a recording of its own


class Shape:
    """Forwards whose arguments differ in the number of samples alone."""

    def __init__(self) -> None:
        self.met = Counter[int]()  # by the size that would be recorded
        self.example: Outputs | None = None  # what the last forward gave
        self.programs: list[ForwardProgram] = []
        self.exactly = False  # whether batches of other sizes are not to be padded
        self.refused = ""  # why it is not recorded
        self.due: Callable[[], ForwardProgram] | None = None  # to be recorded, once no backward waits
        self.again = 0  # how often the loss took other outputs than before


class GraphedForward:
    """Stands in the place of a module's `forward`, whose signature it has. Copies and pickles have the module's own."""

    def __init__(self, graphed: GraphedForwards, module: nn.Module) -> None:
        functools.update_wrapper(self, module.forward)
        self.plain, self._graphed, self._module = module.forward, graphed, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._graphed.forward(self, args, kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "forward")  # of a copy that is not made yet: its class's


class Prepared:
    """What is known of a forward when it begins."""

    def __init__(self, shape: Shape, leaves: Sequence[Any], samples: int, program: ForwardProgram | None) -> None:
        self.shape, self.leaves, self.samples, self.program = shape, leaves, samples, program


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
        self._placed: dict[int, GraphedForward] = {}
        self._prepared: Prepared | None = None
        self._busy = False
        self.replayed = self.eager = 0
        self.reasons = Counter[str]()

    def remove(self) -> None:
        """Give the modules their own forwards."""
        for placed in self._placed.values():
            module = placed._module()
            if module is not None and module.__dict__.get("forward") is placed:
                del module.forward
                if module.forward != placed.plain:
                    module.forward = placed.plain
        self._placed = {}
        self._forward.graphed = None

    def told(self) -> str:
        """How many forwards were replayed, and why others were not."""
        lines = [f"replayed: {self.replayed} forwards of {self.replayed + self.eager}"]
        lines += [f"  through Python: {count} ({why})" for why, count in self.reasons.most_common()]
        return "\n".join(lines)

    # ------------------------------------------------------------------ before a forward

    def prepare(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """An outermost forward is about to begin: record it, if it is time to."""
        self._prepared = None
        if self._busy or recording() or self._forward.runs_again():
            return
        try:
            self._record_due()
            self._prepared = self._known(path, module, args, kwargs)
        except GraphError as why:
            self._goes_eagerly(str(why))

    def _known(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Prepared | None:
        leaves, spec = tree_flatten(ordered((args, kwargs)))
        self._check(module, leaves)
        samples = self._forward.batching.samples(args, kwargs)
        if samples < 2:
            raise GraphError("of one sample alone, nothing tells samples from constants")
        fixed = self._fixed.setdefault(path, set())
        key = (path, spec, shape_of(leaves, samples, fixed))
        shape = self._shapes.setdefault(key, Shape())
        if id(module) not in self._placed:
            self._placed[id(module)] = GraphedForward(self, module)
            module.forward = self._placed[id(module)]
            self._goes_eagerly(_FIRST, warns=False)  # (torch has looked up the module's forward already)
            return None
        if shape.refused:
            raise GraphError(shape.refused)
        program = self._fitting(shape, samples)
        if program is None:
            size = samples if shape.exactly else bucket(samples)
            shape.met[size] += 1
            if shape.met[size] >= _ENOUGH and shape.example is not None and shape.example.reached:
                by_sample = [isinstance(leaf, Tensor) and kind[2] for leaf, kind in zip(leaves, key[2], strict=True)]
                own = Batch(spec, tuple(by_sample), size)
                if self._may_record():
                    program = self._recorded(module, shape, own, leaves)
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
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise GraphError("the model is given a tensor that requires grad")

    def _fitting(self, shape: Shape, samples: int) -> ForwardProgram | None:
        for program in shape.programs:
            size = program.batch.size
            if size == samples or (not program.only and size > samples >= _FILLED * size):
                if not program.guards.changed():
                    return program
        return None

    def _may_record(self) -> bool:
        return self._free() and not self._engine.waits_for_backward()

    def _record_due(self) -> None:
        """Record what was to be, when a backward waited for its step or a forward for its backward."""
        for shape in list(self._shapes.values()):
            if shape.due is not None and self._may_record():
                due, shape.due = shape.due, None
                if shape.example is not None and not shape.refused:
                    with contextlib.suppress(GraphError):  # which is noted
                        due()

    def _recorded(self, module: nn.Module, shape: Shape, batch: Batch, leaves: Sequence[Any]) -> ForwardProgram:
        """A recording of this size. Raises GraphError where there is none, and notes that."""
        assert shape.example is not None
        if sum(len(each.programs) for each in self._shapes.values()) >= RECORDINGS:
            raise GraphError(f"{RECORDINGS} forwards are recorded, and there are more: pad to fewer lengths")
        self._busy, followed = True, loss_tracking.set_aside()
        try:
            _check_hooks(module)
            if others := self._engine.others():
                raise GraphError(f"'{others[0]}' requires grad and is not this optimizer's")
            example = batch.of_size(copies(leaves), batch.size)
            program = ForwardProgram(self._engine, module, shape.example, batch, example, self._mean, self._pool)
        except (FastDPError, RuntimeError, ValueError, IndexError) as problem:
            shape.refused = str(problem)
            raise GraphError(shape.refused) from problem
        finally:
            self._busy = False
            loss_tracking.take_up(followed)
        shape.exactly = shape.exactly or bool(program.only)
        shape.programs.append(program)
        shape.programs.sort(key=lambda each: each.batch.size)
        return program

    # ------------------------------------------------------------------ the forward

    def forward(self, placed: GraphedForward, args: Any, kwargs: Any) -> Any:
        """Make the forward that was prepared."""
        prepared, self._prepared = self._prepared, None
        active = self._forward.running.active
        if prepared is None or active is None:
            return placed.plain(*args, **kwargs)
        if prepared.program is not None:
            again = functools.partial(self._takes_others, prepared.shape)
            replay = Replay(
                prepared.program, active, placed.plain, (args, kwargs), prepared.leaves, prepared.samples, again
            )
            out = replay.run()
            if out is not None:
                self.replayed += 1
                return out
            self._goes_eagerly("Python decides by the numbers of the batch another way")
        else:
            self._goes_eagerly(_FIRST, warns=False)
        out = placed.plain(*args, **kwargs)
        try:
            with torch._C.DisableTorchFunction():
                example = Outputs(out, prepared.samples)
        except GraphError as why:
            prepared.shape.refused = str(why)
            return out
        prepared.shape.example = example
        return example.watched(tensors_of(out))

    def _takes_others(self, shape: Shape) -> None:
        """The loss took other outputs than when the shape was recorded: record it anew, unless that goes on."""
        self.replayed -= 1
        self._goes_eagerly("the loss took other outputs than before", warns=False)
        shape.again += 1
        shape.programs, shape.example = [], None
        if shape.again > _CHANGES:
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


def _check_hooks(module: nn.Module) -> None:
    """Raises GraphError where a module has hooks beside the engine's."""
    for path, each in module.named_modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            if any(
                not isinstance(getattr(hook, "__self__", None), ModuleHook) for hook in getattr(each, name).values()
            ):
                raise GraphError(f"module '{path}' has a hook, which a replay would not call")


def bucket(samples: int) -> int:
    """The size that is recorded for batches of so many samples: of three significant bits, at least these."""
    step = 1 << max(samples.bit_length() - 4, 0)
    return -(-samples // step) * step
