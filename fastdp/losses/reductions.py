"""From the losses of samples to the loss of a batch."""

from __future__ import annotations

from torch import Tensor


def reduce(each: Tensor, reduction: str) -> Tensor:
    """Reduce losses [B] to their mean (0 for an empty batch) or their sum, or return them ("none").

    Raises ValueError if the reduction is unknown.
    """
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    if reduction != "mean":
        raise ValueError(f"reduction must be mean, sum or none, not {reduction!r}")
    return each.sum() / max(len(each), 1)
