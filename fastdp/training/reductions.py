"""From losses of samples to the loss of a batch."""

from __future__ import annotations

from torch import Tensor


def reduce(each: Tensor, reduction: str) -> Tensor:
    """Losses [B] -> their mean (0 of an empty batch), sum, or themselves ("none")."""
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    if reduction != "mean":
        raise ValueError(f"reduction must be mean, sum or none, not {reduction!r}")
    return each.sum() / max(len(each), 1)
