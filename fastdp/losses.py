"""Losses in which no sample changes another's: means over samples of their own losses.

A mean over all tokens of a batch gives a sample a weight that depends on the lengths of the others, so its gradient
has no bound of its own. Here each sample's tokens are averaged first. For the same reason samples or labels that are
left out (ignore_index, mask) count as 0 in a mean over all samples: to divide by how many are left would let one sample
change the weight of the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .training.dp_loss import DPLoss as DPLoss
from .training.reductions import reduce as reduce

IGNORE = -100


def token_loss(
    logits: Tensor, labels: Tensor, ignore_index: int = IGNORE, reduction: str = "mean", label_smoothing: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of tokens (tagging, masked words): each sample's mean over its labelled tokens.

    Args: logits [B, T, V], labels [B, T], entries of ignore_index left out; reduction "mean" over samples, "sum", or
    "none" for [B]; mask [B, T] of 0 and 1 (or bool): labels where it is 0 are left out, too. A sample without labels
    has the loss 0. Computed in float32 or better. Raises ValueError.

    >>> logits, labels = torch.zeros(2, 3, 4), torch.tensor([[1, 2, 3], [1, -100, -100]])
    >>> token_loss(logits, labels, reduction="none")
    tensor([1.3863, 1.3863])
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(f"logits [B, T, V] and labels [B, T], not {tuple(logits.shape)} and {tuple(labels.shape)}")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels are whole numbers, not {labels.dtype}")
    labels = labels.long()
    if mask is not None:
        labels = labels.masked_fill(~_as_bool(mask, labels), ignore_index)
    each = F.cross_entropy(
        wide.transpose(1, 2),
        labels,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )  # [B, T]
    counts = (labels != ignore_index).sum(1).clamp(min=1)  # of a sample's own tokens
    return reduce(each.sum(1) / counts, reduction)


def causal_lm_loss(
    logits: Tensor, labels: Tensor, ignore_index: int = IGNORE, reduction: str = "mean", label_smoothing: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the next token: `token_loss` of logits[:, :-1] against labels[:, 1:].

    Args: logits [B, T, V]; labels [B, T] not shifted, as transformers' models take them (the input's ids, with
    ignore_index where there is padding or a prompt); mask [B, T], not shifted either: which of the labels count (the
    attention mask, or the answer's tokens); the rest as of `token_loss`.
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(f"logits [B, T, V] and labels [B, T], not {tuple(logits.shape)} and {tuple(labels.shape)}")
    if mask is not None:
        mask = _as_bool(mask, labels)[:, 1:]
    return token_loss(logits[:, :-1], labels[:, 1:], ignore_index, reduction, label_smoothing, mask)


def classification_loss(
    logits: Tensor, labels: Tensor, reduction: str = "mean", label_smoothing: float = 0.0, ignore_index: int = IGNORE,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Loss of one answer a sample, by the labels' type.

    Args: logits [B, C]; labels whole numbers [B] (cross-entropy; a sample labelled ignore_index has the loss 0), or
    floats [B, C]: squared error where C is 1, else several labels a sample (binary cross-entropy), averaged over C;
    mask, shaped like the labels, of 0 and 1 (or bool): which of them are known; of several labels a sample the mean is
    over its known ones, and a sample without any has the loss 0; reduction as of `token_loss`. Raises ValueError.

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
        labels = labels.long()
        if mask is not None:
            labels = labels.masked_fill(~_as_bool(mask, labels), ignore_index)
        each = F.cross_entropy(
            wide, labels, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        return reduce(each, reduction)
    if label_smoothing:
        raise ValueError("label_smoothing is of one answer of several: labels of floats have none")
    target = labels.reshape(-1, 1) if labels.dim() == 1 and logits.shape[1] == 1 else labels
    if target.shape != logits.shape:
        raise ValueError(f"labels like the logits {tuple(logits.shape)}, not {tuple(labels.shape)}")
    known = None if mask is None else _as_bool(mask, labels).reshape(target.shape)
    if known is not None:  # what is not known may be NaN
        target = target.masked_fill(~known, 0.0)
    if logits.shape[1] == 1:
        each = (wide - target.to(wide.dtype)).square()
    else:
        each = F.binary_cross_entropy_with_logits(wide, target.to(wide.dtype), reduction="none")
    if known is None:
        return reduce(each.mean(1), reduction)
    return reduce((each * known).sum(1) / known.sum(1).clamp(min=1), reduction)


def sequence_classification_loss(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, pool: str = "last", **options: Any
) -> Tensor:
    """`classification_loss` of sequences, whose logits are of each token: pooled over a sample's own tokens first.

    Args: logits [B, T, C], or [B, C] that are pooled already; labels as of `classification_loss`; mask [B, T] of 0 and
    1 (or bool): the tokens that are no padding (default: all), at either side; pool "last" (the last of them, as
    decoders' classifiers do) or "mean" (over them); options: reduction, label_smoothing, ignore_index of
    `classification_loss`. Raises ValueError, also where a sequence has no token.

    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 3.0], [9.0, 0.0]]])
    >>> float(sequence_classification_loss(logits, torch.tensor([1]), torch.tensor([[1, 1, 0]])))
    0.0485...
    """
    if pool not in ("last", "mean"):
        raise ValueError(f"pool is 'last' or 'mean', not {pool!r}")
    if logits.dim() == 2 and mask is None:
        return classification_loss(logits, labels, **options)
    if logits.dim() != 3:
        raise ValueError(f"logits [B, T, C], or [B, C] without a mask, not {tuple(logits.shape)}")
    kept = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    if mask is not None:
        kept = _as_bool(mask, kept)
    counts = kept.sum(1)
    if len(counts) and int(counts.min()) == 0:
        raise ValueError(f"sequence {int(counts.argmin())} of the batch has no token that the mask keeps")
    if pool == "mean":
        wide = logits if logits.dtype == torch.float64 else logits.float()
        pooled = (wide * kept[..., None]).sum(1) / counts[:, None]
    else:
        last = (kept * torch.arange(kept.shape[1], device=kept.device)).argmax(1)
        pooled = logits[torch.arange(len(logits), device=logits.device), last]
    return classification_loss(pooled, labels, **options)


def _as_bool(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of the shape of `like`, as bool; its device. Raises ValueError."""
    if mask.shape != like.shape:
        raise ValueError(f"a mask of the shape {tuple(like.shape)}, not {tuple(mask.shape)}")
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("a mask holds 0 and 1 (or bool); an additive mask of attention is none")
    return mask.to(like.device) != 0
