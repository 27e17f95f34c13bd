"""The losses of Hugging Face's heads, one number per sample.

The models' built-in losses are means over all labelled tokens of a batch, so a sample's weight depends on the lengths
of the others. The name of a model's head does not say which of the losses below it means. Of those that fit its output
and labels, it is the one that equals the model's built-in loss on single samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import StepError
from ..losses import IGNORE, causal_lm_loss, classification_loss, token_loss

Outputs = Any  # a ModelOutput
Labels = Mapping[str, Tensor]


class Head(NamedTuple):
    """One kind of head: what it is called, and its loss [B] of (outputs, labels, label smoothing).

    The loss is None where outputs or labels are not of this kind. first: if the loss of a sample is a mean over its
    tokens, the first of `labels` that counts.
    """

    name: str
    losses: Callable[[Outputs, Labels, float], Tensor | None]
    smooths: bool = True  # whether label smoothing has a meaning
    first: int | None = None

    def tokens(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Over how many tokens the loss of each sample is a mean, [B]; None if it is over none."""
        if self.first is None or batch["labels"].dim() != 2:
            return None
        return (batch["labels"][:, self.first :] != IGNORE).sum(1)


def _logits(outputs: Outputs, dims: int) -> Tensor | None:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    return logits if isinstance(logits, Tensor) and logits.dim() == dims else None


def _tokens(outputs: Outputs, labels: Labels) -> tuple[Tensor, Tensor] | None:
    """logits [B, T, V] and labels [B, T].

    Prompt tuning puts virtual tokens before a text, so that there are more logits than labels; those have no label.
    """
    logits, target = _logits(outputs, 3), labels.get("labels")
    if logits is None or target is None or target.is_floating_point() or target.dim() != 2:
        return None
    virtual = logits.shape[1] - target.shape[1]
    if virtual < 0 or target.shape[0] != logits.shape[0]:
        return None
    return logits, F.pad(target, (virtual, 0), value=IGNORE)


def _next_token(outputs: Outputs, labels: Labels, smoothing: float) -> Tensor | None:
    found = _tokens(outputs, labels)
    return None if found is None else causal_lm_loss(*found, reduction="none", label_smoothing=smoothing)


def _each_token(outputs: Outputs, labels: Labels, smoothing: float) -> Tensor | None:
    found = _tokens(outputs, labels)
    return None if found is None else token_loss(*found, reduction="none", label_smoothing=smoothing)


def _class(outputs: Outputs, labels: Labels, smoothing: float) -> Tensor | None:
    logits, target = _logits(outputs, 2), labels.get("labels")
    if logits is None or target is None or target.is_floating_point() or target.shape != logits.shape[:1]:
        return None
    if logits.shape[1] == 1:
        return None  # one number, not one class
    return classification_loss(logits, target, "none", smoothing)


def _numbers(outputs: Outputs, labels: Labels, smoothing: float) -> Tensor | None:
    logits, target = _logits(outputs, 2), labels.get("labels")
    if logits is None or target is None or target.numel() != logits.numel():
        return None
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide - target.reshape(logits.shape).to(wide.dtype)).square().mean(1)


def _several_labels(outputs: Outputs, labels: Labels, smoothing: float) -> Tensor | None:
    logits, target = _logits(outputs, 2), labels.get("labels")
    if logits is None or target is None or not target.is_floating_point() or target.shape != logits.shape:
        return None
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.binary_cross_entropy_with_logits(wide, target.to(wide.dtype), reduction="none").mean(1)


def _answer(outputs: Outputs, labels: Labels, smoothing: float) -> Tensor | None:
    """Mean of the cross-entropies of an answer's first and last token; a place beyond the text counts 0."""
    total: Tensor | None = None
    for end in ("start", "end"):
        logits = outputs.get(f"{end}_logits") if isinstance(outputs, Mapping) else None
        places = labels.get(f"{end}_positions")
        if logits is None or places is None or logits.dim() != 2 or places.numel() != logits.shape[0]:
            return None
        wide = logits if logits.dtype == torch.float64 else logits.float()
        inside = places.reshape(-1).clamp(0, wide.shape[1])
        inside = torch.where(inside == wide.shape[1], -100, inside)
        loss = F.cross_entropy(wide, inside, ignore_index=-100, reduction="none")
        total = loss if total is None else total + loss
    return None if total is None else total / 2


HEADS = (
    Head("next token", _next_token, first=1),
    Head("a label for each token", _each_token, first=0),
    Head("class", _class),
    Head("regression", _numbers, smooths=False),
    Head("several labels", _several_labels, smooths=False),
    Head("answer in a text", _answer, smooths=False),
)
LABELS = ("labels", "start_positions", "end_positions")


def rows(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Samples start to stop of a collated batch; what has another length is left whole."""
    size = size_of(batch)
    return {
        key: value[start:stop] if isinstance(value, Tensor) and value.dim() and len(value) == size else value
        for key, value in batch.items()
    }


def size_of(batch: Mapping[str, Any]) -> int:
    """The number of samples: of the labels' rows, or of the first tensor's."""
    named = [batch[name] for name in LABELS if isinstance(batch.get(name), Tensor)]
    tensors = named + [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise StepError("the collator's batch holds no tensor: fastdp.hf needs a dict of tensors, samples first")
    return len(tensors[0])


def without_labels(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Inputs of a forward that computes no loss of its own, and the labels apart.

    Encoder-decoder models make the decoder's input of the labels; where they have a function for that, it is called
    here, else they keep the labels, and what they compute of them is not used.
    """
    given = dict(inputs)
    labels = {name: given.pop(name) for name in LABELS if isinstance(given.get(name), Tensor)}
    config = getattr(model, "config", None)
    decodes = getattr(config, "is_encoder_decoder", False) and "labels" in labels and labels["labels"].dim() == 2
    if decodes and given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
        prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is None:
            given.update(labels)
        else:
            given["decoder_input_ids"] = prepare(labels=labels["labels"])
    return given, labels


def find_head(model: nn.Module, batch: Mapping[str, Any], tolerance: float, samples: int = 4) -> Head:
    """The head whose loss equals the model's own on each of a few samples alone.

    Called in eval mode, without gradients. Raises StepError naming the model where there is none.
    """
    name = type(model).__name__
    remedy = "Give compute_loss_func=f(outputs, labels, num_items_in_batch), returning one loss a sample [B]."
    if not any(isinstance(batch.get(label), Tensor) for label in LABELS):
        raise StepError(
            f"the batch has no labels (of {', '.join(LABELS)}; its keys are {', '.join(batch)}), so no loss of a "
            f"sample can be told. {remedy}"
        )
    fits, finite, prompted = dict.fromkeys(HEADS, 0), False, False
    for number in range(min(size_of(batch), samples)):
        alone = rows(batch, number, number + 1)
        own = _own_loss(model, alone, name, remedy)
        if not bool(torch.isfinite(own)):
            continue  # no labelled token in this one
        finite = True
        inputs, labels = without_labels(model, alone)
        outputs = model(**inputs)
        found = _tokens(outputs, labels)
        prompted = found is not None and found[1].shape != labels["labels"].shape
        for head in list(fits):
            ours = head.losses(outputs, labels, 0.0)
            if ours is None or abs(float(ours.sum()) - float(own)) > tolerance * (1 + abs(float(own))):
                del fits[head]
            else:
                fits[head] += 1
    heads = [head for head, times in fits.items() if times]
    if not finite:
        raise StepError(
            f"{name}'s loss is not finite on any of {min(size_of(batch), samples)} samples: they have no labelled "
            "token (labels are -100 throughout), or the model overflows. Look at labels, weights and dtype"
        )
    if not heads:
        raise StepError(
            f"{name} computes a loss that is none of those fastdp knows a sample's part of "
            f"({', '.join(head.name for head in HEADS)}). {remedy}"
        )
    # a text's first token is predicted, too, from the last virtual one
    return heads[0]._replace(first=0) if prompted else heads[0]


def _own_loss(model: nn.Module, alone: dict[str, Any], name: str, remedy: str) -> Tensor:
    outputs = model(**alone)
    own = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(own, Tensor) or own.numel() != 1:
        raise StepError(f"{name} returns no loss for labels to compare with. {remedy}")
    if isinstance(outputs, Mapping) and isinstance(outputs.get("aux_loss"), Tensor):
        raise StepError(
            f"{name} adds an auxiliary loss of its routers, which balances the experts over the whole batch: a "
            "sample's gradient then depends on the others. Set model.config.output_router_logits = False (training "
            "without it)."
        )
    return own.detach().reshape(())


def reduced(loss: Tensor, size: int) -> Tensor:
    """A scalar as it is; one loss a sample as their mean. Raises StepError on other shapes."""
    if loss.dim() == 0:
        return loss
    if loss.shape != (size,):
        raise StepError(f"the loss has shape {tuple(loss.shape)}: it must be one loss a sample [{size}], or their mean")
    return loss.sum() / max(size, 1)


class LoggedLoss:
    """The training loss by the measure of evaluation: a mean over tokens, if that of a sample is one, of all processes.

    A logical batch without samples, or without a labelled token, adds nothing.

    filtered: whether losses that are not finite are left out.
    """

    def __init__(self, device: torch.device, filtered: bool) -> None:
        self._since = torch.zeros(2, device=device)  # losses, and how much they weigh, since they were last taken
        self._taken, self._filtered = [0.0, 0.0], filtered

    def add(self, losses: Tensor, samples: int, tokens: Tensor | None) -> None:
        """Add a physical batch: one loss per sample [B], or their mean; and the tokens of each [B]."""
        with torch._C.DisableTorchFunction():  # the loss that is trained on is followed: this is none
            losses = losses.float()
            weights = torch.full_like(losses, samples / losses.numel())
            if losses.dim() and tokens is not None:
                weights = tokens.to(losses)
            if self._filtered:
                weights, losses = weights * losses.isfinite(), losses.nan_to_num(0.0, 0.0, 0.0)
            self._since += torch.stack([(losses * weights).sum(), weights.sum()])

    def take(self, summed: Callable[[Tensor], Tensor]) -> float:
        """The mean since the last call; summed: sums over the processes. NaN if there was nothing."""
        new = summed(self._since).tolist()
        self._since = torch.zeros_like(self._since)
        self._taken = [before + more for before, more in zip(self._taken, new, strict=True)]
        return _mean(*new)

    def mean(self) -> float:
        """Of all that was taken."""
        return _mean(*self._taken)


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
