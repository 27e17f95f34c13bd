"""Losses of language models in which no sample changes another's: means over samples of their own losses.

A mean over all tokens of a batch gives a sample a weight that depends on the lengths of the others, so its gradient
has no bound of its own. Here each sample's tokens are averaged first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dp_loss import DPLoss as DPLoss
from .reductions import reduce as reduce

IGNORE = -100


def token_loss(
    logits: Tensor, labels: Tensor, ignore_index: int = IGNORE, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy of tokens (tagging, masked words): each sample's mean over its labelled tokens.

    Args: logits [B, T, V], labels [B, T], entries of ignore_index left out; reduction "mean" over samples, "sum", or
    "none" for [B]. A sample without labels has the loss 0. Computed in float32 or better. Raises ValueError.

    >>> logits, labels = torch.zeros(2, 3, 4), torch.tensor([[1, 2, 3], [1, -100, -100]])
    >>> token_loss(logits, labels, reduction="none")
    tensor([1.3863, 1.3863])
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(f"logits [B, T, V] and labels [B, T], not {tuple(logits.shape)} and {tuple(labels.shape)}")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels are whole numbers, not {labels.dtype}")
    each = F.cross_entropy(
        wide.transpose(1, 2),
        labels.long(),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )  # [B, T]
    counts = (labels != ignore_index).sum(1).clamp(min=1)  # of a sample's own tokens
    return reduce(each.sum(1) / counts, reduction)


def causal_lm_loss(
    logits: Tensor, labels: Tensor, ignore_index: int = IGNORE, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy of the next token: `token_loss` of logits[:, :-1] against labels[:, 1:].

    Args: logits [B, T, V]; labels [B, T] not shifted, as transformers' models take them (the input's ids, with
    ignore_index where there is padding or a prompt); the rest as of `token_loss`.
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(f"logits [B, T, V] and labels [B, T], not {tuple(logits.shape)} and {tuple(labels.shape)}")
    return token_loss(logits[:, :-1], labels[:, 1:], ignore_index, reduction, label_smoothing)


def classification_loss(
    logits: Tensor, labels: Tensor, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    """Loss of one answer a sample, by the labels' type.

    Args: logits [B, C]; labels whole numbers [B] (cross-entropy), or floats [B, C]: squared error where C is 1, else
    several labels a sample (binary cross-entropy), averaged over C; reduction as of `token_loss`. Raises ValueError.

    >>> float(classification_loss(torch.zeros(3, 2), torch.tensor([0, 1, 0])))
    0.6931...
    """
    if logits.dim() != 2:
        raise ValueError(f"logits [B, C], not {tuple(logits.shape)}")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if not labels.dtype.is_floating_point:
        if labels.shape != logits.shape[:1] or labels.is_complex():
            raise ValueError(f"labels [B] of logits {tuple(logits.shape)}, not {labels.dtype} {tuple(labels.shape)}")
        if logits.shape[1] == 1:
            raise ValueError("one class, whose cross-entropy is 0: two logits for two classes, or labels of floats")
        each = F.cross_entropy(wide, labels.long(), reduction="none", label_smoothing=label_smoothing)
        return reduce(each, reduction)
    if label_smoothing:
        raise ValueError("label_smoothing is of one answer of several: labels of floats have none")
    target = labels.reshape(-1, 1) if labels.dim() == 1 and logits.shape[1] == 1 else labels
    if target.shape != logits.shape:
        raise ValueError(f"labels like the logits {tuple(logits.shape)}, not {tuple(labels.shape)}")
    if logits.shape[1] == 1:
        return reduce((wide - target.to(wide.dtype)).square()[:, 0], reduction)
    return reduce(F.binary_cross_entropy_with_logits(wide, target.to(wide.dtype), reduction="none").mean(1), reduction)
