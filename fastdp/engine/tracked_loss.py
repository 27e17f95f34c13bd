"""A batch followed from the model's outputs to its backward, and the check of what `backward()` is called on.

The loss must be a sum or mean of per-sample losses. Parameters that it uses after the forward (loss weights,
prototypes, a head tied by hand) are captured as if they stood at the forward's end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.batch_slices import BESIDE, BY_POSITION
from ..batch_axis.calls import Call
from ..batch_axis.generations import Generation
from ..batch_axis.labels import TWO_ORDERS, UNKNOWN_ORDER, Labels
from ..batch_axis.layout import Layout, tag_of
from ..batch_axis.own_numbers import OWN_NUMBERS
from ..errors import (
    BatchReadWarning,
    FastDPError,
    LossNotFollowedWarning,
    LossReductionWarning,
    SampleMixingError,
    UncapturedUseError,
)
from ..grad_sample.parameter_links import adopt, link_of
from .backward import Arrival
from .capture import Pass
from .forward_record import mixing_error
from .state import Engine


class TrackedLoss:
    """A batch to be followed up to its backward.

    batch: its size; moment: its identity; mixed: layouts of the model's outputs that several samples made; arrivals:
    what waits in the graph for the gradients of these outputs, as long as the graph is there. token: see `Generation`.
    forward: its pass of capture, which sees what the loss makes of parameters. gone: told if the graph is gone,
    perhaps with all that could call backward.
    """

    def __init__(
        self,
        batch: int,
        moment: Generation,
        engine: Engine,
        mixed: list[Layout],
        arrivals: Sequence[Arrival] = (),
        forward: Pass | None = None,
    ) -> None:
        self.batch, self.moment, self.mixed = batch, moment, mixed
        self.forward = (lambda: None) if forward is None else weakref.ref(forward)  # the graph has it
        self.read = None if forward is None else forward.read
        self.filled: int | None = None if forward is None else forward.filled
        me = weakref.ref(self)
        self.memo, self.sizes = engine.memo, engine.sizes
        self.labels = Labels(batch, moment.number)
        self.engine = weakref.ref(engine, lambda _: _is_gone(me))
        self.gone: Callable[[], Callable[[TrackedLoss], None] | None] = lambda: None  # of the mode that follows it
        self.passed = 0  # backwards of others meanwhile
        self._ending: list[Any] = [weakref.ref(arrival, lambda _: _is_gone(me)) for arrival in arrivals]
        self.token = None if moment.token is None else weakref.ref(moment.token, lambda _: _is_gone(me))
        self._ending += [] if self.token is None else [self.token]
        moment.token = None

    def waits(self) -> bool:
        """Whether a backward may come yet."""
        if self.engine() is None or not self.moment.alive or self.moment.reached:
            return False
        return not self._ending or any(known() is not None for known in self._ending)


class Evaluation:
    """A forward of the model without gradients, whose inputs are known: what else it takes is no label."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        labels.paused += 1

    def leave(self, out: Any) -> None:
        """The forward ends."""
        self._labels.paused -= 1


def _is_gone(known: weakref.ref[TrackedLoss]) -> None:
    """The graph behind an output of the model, or all that was made of outputs: perhaps no backward can come now."""
    what = known()
    tell = None if what is None else what.gone()
    if what is not None and tell is not None:
        tell(what)


def problem_of(
    roots: list[Tensor], batch: int, outputs: list[Layout], labels: Labels, grouped: bool, mean: bool
) -> SampleMixingError | Warning | None:
    """What backward is called on must be a sum over the samples, or each sample's own: what is wrong with it.

    outputs: layouts of the model's outputs that several samples made; labels: what was taken for them; grouped: a
    sample is a group of records; mean: the loss is to be a mean over the samples.
    """
    for root in roots:
        layout = tag_of(root, batch)
        if not root.requires_grad or (layout is None and root.is_leaf):
            continue
        own = isinstance(root.grad_fn, torch.autograd.function.BackwardCFunction)  # its backward is the user's
        own = own and not hasattr(getattr(root.grad_fn, "_forward_cls", None), "of_fastdp")
        if own or layout is None:
            return LossNotFollowedWarning(_LOST)
        if layout.mixed and not layout.total:
            of_model = next((known for known in outputs if known.mixed == layout.mixed), None)
            if of_model is not None:
                return mixing_error(of_model)
            if grouped:  # of one person's records, perhaps
                return LossNotFollowedWarning(_LOST)
            chance = any(words in layout.mixed for words in _MET_BY_CHANCE)
            remedy = (_OF_NONE if chance else "") + (_OF_ONE if _ROWS_MEET in layout.mixed else "")
            return SampleMixingError(REFUSED.format(layout.mixed) + remedy, layout.mixed)
        some = layout.piece is not None and layout.piece.one_by_one or 0 < len(BESIDE) < batch
        if some and not OWN_NUMBERS:  # else its own data may have said so
            return BatchReadWarning(REFUSED.format(f"it {BY_POSITION}"))
        one = layout.alone >= 0 and bool(OWN_NUMBERS)  # the only one that a loop has chosen
        if layout.piece is not None and not layout.piece.one_by_one and not one:
            return SampleMixingError(REFUSED.format(f"it {BY_POSITION}"), BY_POSITION)
        if layout.total not in ("", "either", "mean" if mean else "sum"):
            return LossReductionWarning(_REDUCTION[layout.total])
        if labels.two_orders:
            return SampleMixingError(REFUSED.format(TWO_ORDERS), TWO_ORDERS)
        if labels.unknown_order:
            return LossNotFollowedWarning(UNKNOWN_ORDER)
    return None


_LOST = (
    "the loss was made where fastdp could not follow it (a custom autograd function, numpy, a function of torch.func): "
    "whether it is a sum or mean of each sample's own loss is not known. Run fastdp.verify."
)
_REDUCTION = {
    "sum": (
        "the loss is a sum over the samples, but loss_reduction is 'mean' (the default): each sample's gradient is "
        "then taken times the number of samples in the batch, and its clipping depends on how many others there are. "
        "Give loss_reduction='sum' to the optimizer, or take the loss's mean over the samples."
    ),
    "mean": (
        "the loss is a mean over the samples, but loss_reduction='sum' was given: each sample's gradient is then taken "
        "by the number of samples in the batch, and its clipping depends on how many others there are. Leave "
        "loss_reduction='mean', or take the loss's sum over the samples."
    ),
    "other": (
        "the loss has an extra factor of the number of samples, or of its inverse: how much a sample counts depends on "
        "how many others there are. Take the mean over the samples, or their sum, as loss_reduction says."
    ),
    "both": (
        "the loss adds a sum over the samples to a mean over them: how much each part counts depends on how many "
        "samples are in the batch. Take the mean (or the sum) of both."
    ),
}

REFUSED = (
    "the loss is no sum or mean of each sample's own loss: {}. One sample then changes the gradients of others, and "
    "clipping does not bound that. Make it a sum or mean over the samples of losses that take one sample each; what "
    "several samples must share, make a constant."
)
_MET_BY_CHANCE = "samples with each other", "lie in different dimensions"
_OF_NONE = (
    " Or is a tensor of no sample (prototypes, a teacher's buffer), and has as many rows as the batch? Say so, by "
    "fastdp.mark_rows(tensor, None)."
)
_ROWS_MEET = "combines rows of different samples"
_OF_ONE = (
    " Or are several rows of the model's input one sample (pairs, concatenated)? Concatenate them within the forward, "
    "or say so before it: fastdp.mark_rows(x, torch.arange(n).repeat(2), samples=n)."
)


def takes(forward: Pass, tensor: Tensor) -> bool:
    """Whether a tensor of the loss is a parameter, or made of parameters alone, before the forward perhaps."""
    if not tensor.requires_grad or tensor.is_leaf or link_of(tensor) is not None:
        return forward.is_parameter(tensor)
    return tag_of(tensor, forward.batch) is None and adopt(tensor, forward)


def captured(forward: Pass, call: Call) -> Any:
    """Make a call of the loss that parameters take part in, as if it stood at the forward's end."""
    running = forward.engine.running
    running.active, forward.in_loss = forward, True
    try:
        return _dispatched(forward, call)
    except FastDPError as error:
        forward.backward.forget()
        forward.backward.refused(error)
        raise
    finally:
        running.active = None


def _dispatched(forward: Pass, call: Call) -> Any:
    if any(layout.total for _, layout in call.inputs()):
        names = forward.names_of(tensor for tensor in call.tensors if takes(forward, tensor))
        raise UncapturedUseError(
            f"{call.name}() joins a sum over the samples with {names}. If that weighs or scales the loss, apply it to "
            'each sample\'s own loss (reduction="none"), and take the mean then. A term of the weights alone (L2-SP, '
            "EWC, FedProx) is public: leave it out of the loss, and call its backward() within optimizer.public(), "
            "which adds its gradient without clipping."
        )
    func, (args, kwargs) = call.func, call.given
    return forward.dispatch(func, args, kwargs)
