"""State shared by an engine's forward passes, loss tracking and backward passes.

Passes of capture write to it, the modes that follow a loss ask it, and `fastdp.engine.forward` makes it of a model.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.batch_slices import BY_POSITION, unequally_written
from ..batch_axis.inputs import Batching
from ..batch_axis.own_numbers import DRAWN
from ..batch_axis.python_reads import PythonReads
from ..batch_axis.python_sizes import Sizes
from ..batch_axis.row_groups import People
from ..errors import SampleMixingError
from .activation_hooks import Owner
from .backward import Backward
from .call_cache import Memo
from .tracked_parameters import OwnTensors


class Running(threading.local):
    """The forwards that run in this thread. entered: one entry for each module's; active: the pass that is on."""

    def __init__(self) -> None:
        self.entered: list[Any] = []  # a pass, a block that may run again, an evaluation, or None
        self.active: Any = None  # fastdp.engine.capture.Pass


_NUMBERS = itertools.count()


class Engine:
    """One model's engine."""

    def __init__(self, model: nn.Module, backward: Backward, batching: Batching) -> None:
        self.model, self.backward, self.batching = model, backward, batching
        self.number = next(_NUMBERS)
        self.planner, self.mean = backward.planner, backward.mean  # of routes; whether the loss is to be a mean
        batching.bags = [module for module in model.modules() if isinstance(module, nn.EmbeddingBag)]
        self.token = torch.zeros((), requires_grad=True)  # what captured calls of data without gradients hang on
        self.memo, self.reads, self.sizes, self.owned = Memo(), PythonReads(model), Sizes(), OwnTensors(model)
        # stands for the engine, in the moments of its batches
        self.owner = backward.owner = Owner(backward.is_running)
        self.running = Running()
        self.graphed: Any = None  # `fastdp.optim.graphed_forwards.GraphedForwards`, if forwards are replayed
        self.batch = 0  # of the last forward
        self.people: People | None = None  # whose its records are, if a sample is a group of them

    def backward_begins(self, problem: SampleMixingError | Warning | None, roots: list[Tensor], size: int) -> None:
        """Backward is called on these, with this problem: to be raised, or warned of, if they are of the engine."""
        self.backward.expect(problem)
        if self.graphed is not None:
            self.graphed.backward_begins(roots)
        if self.backward.open_forwards:
            self.backward.others.loss(roots, size, parameters)

    def judge_writes(self) -> None:
        """Warn if rows of some samples were written to, and not those of all alike. Raises SampleMixingError for parts
        of single samples' rows that neither their own numbers nor drawn ones have chosen."""
        placed, perhaps = DRAWN.judge(self.batch)
        if placed:
            raise SampleMixingError(f"a write to a part of a sample's rows {BY_POSITION}", BY_POSITION)
        if perhaps:
            self.reads.note(f"a write to a part of one sample's rows {BY_POSITION}", None)
        why, place = unequally_written(self.batch)
        if why:
            self.reads.note(why, None, place)

    def drop_interrupted(self) -> None:
        """A pass is on whose forward, or one that a backward computed again, was ended by Ctrl-C."""
        raise NotImplementedError


ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()  # that are attached to a model
MANY = 64  # engines: a backward asks all of them
_MOST = [MANY]  # of more, those are collected whose models nobody has any longer: they hang in circles of hooks


def attached(engine: Engine) -> None:
    """An engine has hooks on its model."""
    if len(ENGINES) >= _MOST[0]:
        gc.collect()
        _MOST[0] = max(MANY, 2 * len(ENGINES))
    ENGINES.add(engine)


def drop_interrupted() -> None:
    """End the passes of this thread whose forwards Ctrl-C has ended, without hooks: it is no Exception."""
    for engine in list(ENGINES):
        if (active := engine.running.active) is not None and active.is_interrupted():
            engine.drop_interrupted()


def parameters() -> set[int]:
    """Ids of the parameters of all models that have an engine."""
    return {key for engine in ENGINES for key in engine.backward.tracked.current()}
