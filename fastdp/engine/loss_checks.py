"""Checks that `backward()` is called on a sum or mean of per-sample losses."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch_axis.batch_slices import BY_POSITION
from ..batch_axis.labels import TWO_ORDERS, UNKNOWN_ORDER, Labels
from ..batch_axis.layout import Layout, tag_of
from ..errors import LossNotFollowedWarning, LossReductionWarning, SampleMixingError
from .forward_record import mixing_error


def problem_of(
    roots: list[Tensor], batch: int, outputs: list[Layout], labels: Labels, grouped: bool, mean: bool
) -> SampleMixingError | Warning | None:
    """What backward is called on must be a sum over the samples, or each sample's own: what is wrong with it.

    outputs: layouts of the model's outputs that several samples made; labels: what was taken for them; grouped: a
    sample is a group of records; mean: the loss is to be a mean over the samples.
    """
    for root in roots:
        if not root.requires_grad:
            continue
        layout = tag_of(root, batch)
        own = isinstance(root.grad_fn, torch.autograd.function.BackwardCFunction)  # its backward is the user's
        if own or (layout is None and not root.is_leaf):
            return LossNotFollowedWarning(_LOST)
        if layout is None:
            continue
        if layout.mixed and not layout.total:
            of_model = next((known for known in outputs if known.mixed == layout.mixed), None)
            if of_model is not None:
                return mixing_error(of_model)
            if grouped:  # of one person's records, perhaps
                return LossNotFollowedWarning(_LOST)
            return SampleMixingError(REFUSED.format(layout.mixed), layout.mixed)
        if layout.piece is not None:
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
