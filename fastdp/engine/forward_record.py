"""State that one forward leaves for its backward, and the error messages about mixed outputs."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from ..batch_axis.generations import Generation
from ..batch_axis.layout import Layout
from ..batch_axis.row_groups import People
from ..errors import BatchLayoutError, FastDPError, SampleMixingError
from ..grad_sample.device_streams import Streams
from ..grad_sample.parameter_use import ParameterUse
from ..utils.code_location import FASTDP, frames, is_running
from .host_reads import NumbersRead
from .multiple_forwards import Given

PRIVATE_GRAPH = (
    "a backward within public() through a forward that was made outside of it: make both within public(), or, if the "
    "batch is private, both outside."
)
UNSEEN = (
    "fastdp did not see the backward begin, so it could not look at the loss (it was called in another thread than the "
    "forward, by compiled code, after a checkpoint of the whole model, or after many other forwards): whether the loss "
    "is a sum or mean of each sample's own loss is not known. Call the model and backward() in one thread, one after "
    "the other, or run fastdp.verify."
)


def mixing_error(layout: Layout) -> SampleMixingError:
    """What to say of an output of the model that several samples made."""
    remedy = "remove the operation, or use one that works on each sample alone."
    if layout.inferred:
        remedy += (
            f" Or is it a table (of positions, say)? fastdp assumed that an input has several rows for each of the "
            f"{layout.batch} samples. Call fastdp.mark_rows(tensor, None) if it is of no sample, or "
            "mark_rows(tensor, sample_of_row) to assign its rows to samples."
        )
    elif "rows of one sample" in layout.mixed or "rows of different samples" in layout.mixed:
        remedy += (
            " Or are an input's rows those of packed samples (nodes of graphs, patches)? Say whose they are, before "
            "the forward, by fastdp.mark_rows(x, sample_of_row, samples=)."
        )
    elif "combines samples with each other" in layout.mixed or "in different dimensions" in layout.mixed:
        remedy += (
            " Or is an input of no sample (a mask of T x T, a table, negatives that all share), and has as many rows "
            "as the batch? Say so before the forward, by fastdp.mark_rows(tensor, None)."
        )
    elif "combines the samples of the batch" in layout.mixed:
        remedy += (
            ' If that is a loss which the model weighs, compute it of each sample (reduction="none"), weigh that, and '
            "take the mean last."
        )
    return SampleMixingError(
        f"the model's output depends on several samples: {layout.mixed}. Per-sample gradients do not exist "
        f"for such a model; {remedy} (If the batch does not have {layout.batch} samples, give batch_size=.)",
        layout.mixed,
    )


def inferred_error(layout: Layout) -> BatchLayoutError:
    """What to say of an output of the model whose rows are of nobody knows which samples."""
    return BatchLayoutError(
        f"the model's output is made of an input with several rows for each of the {layout.batch} samples, and "
        "nothing in the model shows whose rows they are. Say so by fastdp.mark_rows(tensor, sample_of_row), or "
        "by batch_size= if consecutive rows are of one sample."
    )


def joined_error(why: str) -> SampleMixingError:
    """What to say where a backward goes through a forward, and another one of what was made, beside it, of samples."""
    return SampleMixingError(
        "one backward goes through two forwards, and an input of the second one was computed from several samples of "
        f"the first one's batch: {why}. Clipping does not bound what a sample then does to others. Compute each "
        "sample's input from that sample alone.",
        why,
    )


class PassRecord:
    """What a backward knows of a forward that it goes through.

    count: its uses count (not again, where a forward is recomputed).
    """

    def __init__(self, batch: int, people: People | None, count: bool, moment: Generation) -> None:
        self.batch, self.people, self.count, self.moment = batch, people, count, moment
        self.thread = threading.get_ident()
        self.read: NumbersRead | None = None  # what has read numbers of the batch before the forward
        self.in_loss = False  # whether the loss used parameters
        self.given: Given | None = None  # None of one that is computed again
        self.backward_id = 0  # of the backward that went through it
        self.recomputes = False  # it is a forward that a backward runs again
        self.caller: FrameType | None = None  # torch's call of the module, while the forward runs

    def is_interrupted(self) -> bool:
        """Whether the forward has ended without its hooks, which torch calls after exceptions but not after Ctrl-C."""
        return self.caller is not None and not is_running(self.caller)


def caller_of(frame: FrameType) -> FrameType:
    """The innermost frame from this one outwards that is not fastdp's: what has called its hook on a module."""
    return next(each for each in frames(frame) if not each.f_code.co_filename.startswith(FASTDP))


class Expected:
    """A backward that something followed to its roots. problem: what was found of these."""

    def __init__(self, problem: SampleMixingError | Warning | None) -> None:
        self.problem, self.reached = problem, False


class ForwardRecord:
    """What one backward records. uses: None for what was taken early."""

    def __init__(self, number: int) -> None:
        self.number, self.uses = number, list[ParameterUse | None]()
        self.versions: list[int] = []  # of the uses, when they were recorded
        self.calls: (
            list[Any] | None
        ) = []  # `engine.repeated_backward.Arrived`: what gave the uses; None if not all is known
        self.like: Any = None  # the `engine.repeated_backward.Like` that it is like, so far
        self.kept: list[Any] = []  # the `engine.repeated_backward.Kept` that arrived, as long as it is like that
        self.arrivals: Any = None  # what keeps what arrives without Python, below (csrc/python/arrivals.cpp)
        self.arrived: list[Any] = []  # (context, what it saved, its gradient, versions)
        self.thread: int | None = None  # in which the forwards ran
        self.streams = Streams()
        self.replayed: list[Any] = []  # the `engine.gradients.Gradients` of replayed forwards
        self.early: Any = None  # the `engine.layerwise.LayerwiseSums`, if groups are taken within backward
        self.batch: int | None = None
        self.people: People | None = None
        self.failed = False
        self.problem: FastDPError | None = None  # to be raised at its end
        self.task: int | None = None  # autograd's number of the backward
        self.checked: PassRecord | None = None  # of this forward all is known that a backward through it must meet
        self.judged = False  # whether the loss was followed
        self.recomputed = False  # went through forwards that reentrant checkpointing repeated
