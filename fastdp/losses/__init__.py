"""Losses in which no sample changes another's: means over samples of their own losses.

A mean over all tokens of a batch gives each sample a weight that depends on the lengths of the others, so a sample's
gradient has no bound. These losses average the tokens of each sample first. For the same reason, samples or labels that
are left out (ignore_index, mask) count as 0 in a mean over all samples: dividing by the number of remaining samples
would let one sample change the weight of the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grad_sample.head_loss import linear_cross_entropy as linear_cross_entropy
from .dp_loss import DPLoss as DPLoss
from .reductions import reduce as reduce

IGNORE = -100


def token_loss(
    logits: Tensor, labels: Tensor, ignore_index: int = IGNORE, reduction: str = "mean", label_smoothing: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of tokens (tagging, masked words), as the mean over each sample's labelled tokens.

    It is computed in float32 or better. A sample without labels has the loss 0.

    Args:
        logits: [B, T, V], floats.
        labels: [B, T], whole numbers. Entries equal to ignore_index are left out.
        ignore_index: the label that is left out.
        reduction: "mean" over samples, "sum", or "none" for [B].
        label_smoothing: in [0, 1], as for torch's cross_entropy.
        mask: [B, T] of 0 and 1 (or bool). Labels are also left out where it is 0.

    Raises:
        ValueError: if a shape, a type or the reduction is wrong.

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

    Args:
        logits: [B, T, V], floats.
        labels: [B, T], not shifted, as for transformers' models: the ids of the input, with ignore_index in place of
            padding or of a prompt.
        ignore_index: the label that is left out.
        reduction: "mean" over samples, "sum", or "none" for [B].
        label_smoothing: in [0, 1], as for torch's cross_entropy.
        mask: [B, T], not shifted either. It selects the labels that count (the attention mask, or the answer's tokens).

    Raises:
        ValueError: if a shape, a type or the reduction is wrong.
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
    """The loss of one answer per sample, which depends on the type of the labels.

    Whole-number labels [B] give cross-entropy; a sample with the label ignore_index has the loss 0. Float labels give
    the squared error if C is 1. If C is larger, each sample has several labels, and the loss is the binary
    cross-entropy, averaged over C.

    Args:
        logits: [B, C], floats.
        labels: [B] whole numbers, or [B, C] floats.
        reduction: "mean" over samples, "sum", or "none" for [B].
        label_smoothing: in [0, 1], for whole-number labels only.
        ignore_index: the label that is left out.
        mask: of 0 and 1 (or bool), shaped like the labels. It says which labels are known. If a sample has several
            labels, the mean is over its known labels; a sample without known labels has the loss 0.

    Raises:
        ValueError: if a shape, a type or the reduction is wrong.

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
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, pool: str = "last", *, reduction: str = "mean",
    label_smoothing: float = 0.0, ignore_index: int = IGNORE,
) -> Tensor:  # fmt: skip
    """`classification_loss` of sequences with logits for each token, which are first pooled over a sample's own tokens.

    Args:
        logits: [B, T, C], or [B, C] if they are already pooled.
        labels: as for `classification_loss`.
        mask: [B, T] of 0 and 1 (or bool). It is 1 for tokens that are not padding, which may be on either side
            (default: all).
        pool: "last" takes the last token, as decoders' classifiers do; "mean" averages the tokens.
        reduction: as label_smoothing and ignore_index an argument of `classification_loss`.
        label_smoothing: the share of each label that is spread over all classes, in [0, 1].
        ignore_index: the label of samples that do not count.

    Raises:
        ValueError: if a shape, a type or the reduction is wrong, or a sequence has no token.

    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 3.0], [9.0, 0.0]]])
    >>> float(sequence_classification_loss(logits, torch.tensor([1]), torch.tensor([[1, 1, 0]])))
    0.0485...
    """
    if pool not in ("last", "mean"):
        raise ValueError(f"pool is 'last' or 'mean', not {pool!r}")
    if logits.dim() == 2 and mask is None:
        return classification_loss(logits, labels, reduction, label_smoothing, ignore_index)
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
    return classification_loss(pooled, labels, reduction, label_smoothing, ignore_index)


def _as_bool(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask of the shape of `like` as bool, on its device. Raises ValueError."""
    if mask.shape != like.shape:
        raise ValueError(f"a mask of the shape {tuple(like.shape)}, not {tuple(mask.shape)}")
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("a mask holds 0 and 1 (or bool); an additive mask of attention is none")
    return mask.to(like.device) != 0
