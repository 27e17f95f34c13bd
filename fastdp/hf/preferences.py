"""The loss of a pair of answers, a better and a worse one, as DPO and its relatives define it: one number a pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..losses import IGNORE

sigmoid, logsigmoid = torch.sigmoid, F.logsigmoid


class Texts(NamedTuple):
    """What is known of texts under a model, each [texts].

    logp: the log probability of a text's answer. length: of the answer, in tokens. tokens: those of them that are
    predicted, all but a first one without a prompt.
    """

    logp: Tensor
    length: Tensor
    tokens: Tensor


class Pairs(NamedTuple):
    """What the losses are functions of, each [pairs]: `Texts` of both answers, and ratios to the reference."""

    better: Tensor
    worse: Tensor
    better_length: Tensor
    worse_length: Tensor
    better_tokens: Tensor
    worse_tokens: Tensor
    better_ratio: Tensor  # log of the model's probability over that of the reference
    worse_ratio: Tensor

    @property
    def margin(self) -> Tensor:
        return self.better_ratio - self.worse_ratio

    @property
    def margin_of_means(self) -> Tensor:
        """The margin of ratios by token."""
        return self.better_ratio / self.better_length.clamp(min=1) - self.worse_ratio / self.worse_length.clamp(min=1)


def _robust(p: Pairs, o: Any) -> Tensor:
    """Unbiased if a share label_smoothing of the preferences is flipped."""
    kept = -logsigmoid(o.beta * p.margin) * (1 - o.label_smoothing)
    flipped = -logsigmoid(-o.beta * p.margin) * o.label_smoothing
    return (kept - flipped) / (1 - 2 * o.label_smoothing)


LOSSES: dict[str, Callable[[Pairs, Any], Tensor]] = {
    "sigmoid": lambda p, o: -logsigmoid(o.beta * p.margin),
    "sigmoid_norm": lambda p, o: -logsigmoid(o.beta * p.margin_of_means),
    "hinge": lambda p, o: F.relu(1 - o.beta * p.margin),
    "ipo": lambda p, o: (p.margin_of_means - 0.5 / o.beta).square(),
    "robust": _robust,
    "nca_pair": lambda p, o: (
        -logsigmoid(o.beta * p.better_ratio)
        - (logsigmoid(-o.beta * p.better_ratio) + logsigmoid(-o.beta * p.worse_ratio)) / 2
    ),
    "bco_pair": lambda p, o: -logsigmoid(o.beta * p.better_ratio) - logsigmoid(-o.beta * p.worse_ratio),
    "sppo_hard": lambda p, o: (p.better_ratio - 0.5 / o.beta).square() + (p.worse_ratio + 0.5 / o.beta).square(),
    "apo_zero": lambda p, o: sigmoid(-o.beta * p.better_ratio) + sigmoid(o.beta * p.worse_ratio),
    "apo_down": lambda p, o: sigmoid(o.beta * p.better_ratio) + sigmoid(o.beta * (p.worse_ratio - p.better_ratio)),
    "sft": lambda p, o: -p.better / p.better_tokens.clamp(min=1),
}


def pair_losses(model: Texts, reference: Tensor, options: Any) -> Tensor:
    """The loss of each pair [B]. Texts alternate: a pair's better one, its worse one. options: a DPOConfig."""
    parts = (*model, model.logp - reference.to(model.logp.dtype))
    pairs = Pairs(*(side for part in parts for side in part.reshape(-1, 2).unbind(1)))
    weights = options.loss_weights or [1.0] * len(options.loss_type)
    total = torch.zeros_like(pairs.better)
    for name, weight in zip(options.loss_type, weights, strict=True):
        total = total + weight * LOSSES[name](pairs, options)
    return total


def texts(logits: Tensor, ids: Tensor, answer: Tensor) -> Texts:
    """Log probabilities of the answers [texts]; ids and answer (1 where a token is the answer's) are [texts, T].

    Logits of virtual tokens, which prompt tuning puts in front, are left out.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide, counted = wide[:, -ids.shape[1] :][:, :-1], answer[:, 1:] != 0
    labels = ids[:, 1:].masked_fill(~counted, IGNORE)
    logps = -F.cross_entropy(wide.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    return Texts(logps.sum(1), answer.sum(1), counted.sum(1))
