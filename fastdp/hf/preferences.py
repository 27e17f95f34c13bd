"""The loss of a pair of answers, a better and a worse one, as DPO and its relatives define it: one number a pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..losses import IGNORE

sigmoid, logsigmoid = torch.sigmoid, F.logsigmoid


class Texts(NamedTuple):
    """What is known of texts under a model, each [texts].

    logp: the log probability of a text's answer, in which ld_alpha may weigh what is longer than the other answer.
    plain: without that weight. length: of the answer, in tokens. tokens: those of them that are
    predicted, all but a first one without a prompt. surprise: the mean over them of the log probability, against that
    of a token drawn from the model (log of the sum of squared probabilities).
    """

    logp: Tensor
    plain: Tensor
    length: Tensor
    tokens: Tensor
    surprise: Tensor | None


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
    better_score: Tensor  # of the ratio, by the divergence that is chosen
    worse_score: Tensor

    @property
    def margin(self) -> Tensor:
        return self.better_score - self.worse_score

    @property
    def margin_of_means(self) -> Tensor:
        """The margin of scores by token."""
        return self.better_score / self.better_length.clamp(min=1) - self.worse_score / self.worse_length.clamp(min=1)


def _exo(p: Pairs, o: Any) -> Tensor:
    """The divergence of the model's choice from one that is right but for a share label_smoothing."""
    log_right, log_wrong = logsigmoid(o.beta * p.margin), logsigmoid(-o.beta * p.margin)
    target = (math.log1p(-o.label_smoothing), math.log(o.label_smoothing))
    return log_right.exp() * (log_right - target[0]) + log_wrong.exp() * (log_wrong - target[1])


def _robust(p: Pairs, o: Any) -> Tensor:
    """Unbiased if a share label_smoothing of the preferences is flipped."""
    kept = -logsigmoid(o.beta * p.margin) * (1 - o.label_smoothing)
    flipped = -logsigmoid(-o.beta * p.margin) * o.label_smoothing
    return (kept - flipped) / (1 - 2 * o.label_smoothing)


def _discopop(p: Pairs, o: Any) -> Tensor:
    margin = o.beta * p.margin
    share = sigmoid(margin / o.discopop_tau)
    return share * torch.exp(-margin) - (1 - share) * logsigmoid(margin)


LOSSES: dict[str, Callable[[Pairs, Any], Tensor]] = {
    "sigmoid": lambda p, o: -logsigmoid(o.beta * p.margin),
    "sigmoid_norm": lambda p, o: -logsigmoid(o.beta * p.margin_of_means),
    "hinge": lambda p, o: F.relu(1 - o.beta * p.margin),
    "ipo": lambda p, o: (p.margin_of_means - 0.5 / o.beta).square(),
    "exo_pair": _exo,
    "robust": _robust,
    "discopop": _discopop,
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


def score(ratio: Tensor, options: Any) -> Tensor:
    """The derivative of the chosen divergence at the ratio of two probabilities, whose log is given."""
    kind, power = options.f_divergence_type, options.f_alpha_divergence_coef - 1
    kind = getattr(kind, "value", kind)
    if kind == "reverse_kl" or (kind == "alpha_divergence" and abs(power) < 1e-6):
        return ratio
    if kind == "forward_kl":
        return 1 - torch.exp(-ratio)
    if kind == "js_divergence":
        return logsigmoid(ratio) + math.log(2)
    if kind == "alpha_divergence":
        return (torch.exp((power * ratio).clamp(max=80)) - 1) / power
    raise ValueError(f"f_divergence_type={kind!r} is not known")


def pair_losses(model: Texts, reference: Tensor, options: Any) -> Tensor:
    """The loss of each pair [B]. Texts alternate: a pair's better one, its worse one. options: a DPOConfig."""
    ratio = model.logp - reference.to(model.logp.dtype)
    parts = (model.plain, model.length, model.tokens, ratio, score(ratio, options))
    pairs = Pairs(*(side for part in parts for side in part.reshape(-1, 2).unbind(1)))
    weights = options.loss_weights or [1.0] * len(options.loss_type)
    total = torch.zeros_like(pairs.better)
    for name, weight in zip(options.loss_type, weights, strict=True):
        total = total + weight * LOSSES[name](pairs, options)
    if options.use_weighting:  # each loss has this factor, so their sum has it
        assert model.surprise is not None
        total = total * torch.exp(model.surprise.reshape(-1, 2).sum(1))
    return total


def texts(logits: Tensor, ids: Tensor, answer: Tensor, options: Any) -> Texts:
    """Log probabilities of the answers [texts]; ids and answer (1 where a token is the answer's) are [texts, T].

    Texts alternate as for `pair_losses`. Logits of virtual tokens, which prompt tuning puts in front, are left out.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide, counted = wide[:, -ids.shape[1] :][:, :-1], answer[:, 1:] != 0
    labels = ids[:, 1:].masked_fill(~counted, IGNORE)
    logps = -F.cross_entropy(wide.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    plain, length, tokens, surprise = logps.sum(1), answer.sum(1), counted.sum(1), None
    if options.use_weighting:
        with torch.no_grad():
            squares = torch.logsumexp(2 * F.log_softmax(wide, -1), -1)
            surprise = ((logps - squares) * counted).sum(1) / tokens.clamp(min=1)
    if options.ld_alpha is not None:
        shorter = tokens.reshape(-1, 2).amin(1, keepdim=True).expand(-1, 2).reshape(-1, 1)
        logps = torch.where(counted.cumsum(1) > shorter, options.ld_alpha * logps, logps)
    return Texts(logps.sum(1), plain, length, tokens, surprise)
