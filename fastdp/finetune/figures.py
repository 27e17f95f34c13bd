"""Figures of held-out records while it trains, and what an answer that does not look at the record would reach.

None of them is covered by epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..calibration import Calibration, calibration
from ..losses import IGNORE
from ..losses.language_model_head import FusedHead
from ..verification.state import evaluating
from .encode import accepted, inputs_of
from .losses import logits_of, margins

_ROUNDING = 1e-4  # nats: the same text with other padding


class Simple(NamedTuple):
    """What can be had without learning: the value of the headline, the words for it, and the number of records."""

    value: float
    words: str
    records: int


Found = tuple[dict[str, float], Simple | None]


def of_classes(found: Calibration, labels: Tensor) -> Found:
    """accuracy, nll (nats), ece."""
    simple = Simple(float(labels.bincount().max()) / len(labels), "the share of the most frequent label", len(labels))
    return {"accuracy": found.accuracy, "nll": found.nll, "ece": found.ece}, simple


def of_numbers(outputs: Tensor, labels: Tensor, scale: float = 1.0) -> Found:
    """rmse in the unit of the data, r2. scale: what 1 in the labels is in the data."""
    labels, outputs = labels.double(), outputs.double().reshape(-1)
    wrong, spread = float((outputs - labels).square().mean()), float(labels.var(unbiased=False))
    found = {"rmse": scale * math.sqrt(wrong)}
    simple = Simple(0.0, "R2 of the mean of the labels", len(labels))
    return ({"r2": 1 - wrong / spread, **found} if spread > 0 else found), simple


def of_label_sets(logits: Tensor, labels: Tensor) -> Found:
    """micro_f1 at the threshold 0.5, exact_match (all labels of a record), nll (nats a label)."""
    said, often = logits > 0, (labels.sum(0) > len(labels) / 2).expand_as(labels)
    value = _f1(float((often * labels).sum()), float(often.sum()), float(labels.sum()))
    return {
        "micro_f1": _f1(float((said * labels).sum()), float(said.sum()), float(labels.sum())),
        "exact_match": float((said == (labels > 0.5)).all(1).double().mean()),
        "nll": float(F.binary_cross_entropy_with_logits(logits, labels)),
    }, Simple(value, "the micro-F1 of the labels that most records have", len(labels))


def of_margins(gained: Tensor) -> Found:
    """reward_accuracy: the share of records whose chosen answer gained more than the rejected one (ties: one half);
    margin: the mean of what it gained more, in nats."""
    tied = gained.abs() < _ROUNDING  # as before training
    right = float(((gained > 0) & ~tied).double().mean() + 0.5 * tied.double().mean())
    return {"reward_accuracy": right, "margin": float(gained.double().mean())}, Simple(
        0.5, "what a coin reaches", len(gained)
    )


class Tokens:
    """Sums over tokens, batch by batch, as all logits are too many to keep. `shifted`: logits are of the next token.

    f1: of entities where tags are B-X and I-X, else of words whose tag is not "O". exact: targets all of whose tokens
    are the likeliest ones, each with the true tokens before; that is what greedy generation writes.
    """

    def __init__(self, shifted: bool, names: Sequence[str] = ()) -> None:
        self.shifted, self.names = shifted, list(names)
        self.nll, self.tokens, self.right, self.exact, self.records = 0.0, 0, 0, 0, 0
        self.both = self.said = self.true = 0  # entities

    def add(self, logits: Tensor, labels: Tensor) -> None:
        logits = logits.float()
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        kept, best = labels != IGNORE, logits.argmax(2)
        self.nll += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"))
        self.tokens, self.records = self.tokens + int(kept.sum()), self.records + len(labels)
        self.right += int(((best == labels) & kept).sum())
        self.exact += int(((best == labels) | ~kept).all(1).sum())
        if self.names:
            for said, true, mask in zip(best, labels, kept, strict=True):
                first, second = self._spans(said[mask].tolist()), self._spans(true[mask].tolist())
                self.both, self.said, self.true = (
                    self.both + len(first & second), self.said + len(first), self.true + len(second)
                )  # fmt: skip

    def _spans(self, tags: list[int]) -> set[tuple[Any, ...]]:
        named = [self.names[tag] for tag in tags]
        if any(name[:2] in ("B-", "I-") for name in self.names):
            return spans(named)
        return {(i, name) for i, name in enumerate(named) if name != "O"}

    def of_tags(self) -> Found:
        """f1, accuracy, nll."""
        total = max(self.tokens, 1)
        figures = {"f1": _f1(self.both, self.said, self.true), "accuracy": self.right / total, "nll": self.nll / total}
        return figures, Simple(0.0, "F1 of the tag 'O' for all words", self.records)

    def of_text(self) -> Found:
        """perplexity and nll of a token; of targets also token_accuracy and exact_match."""
        nll = self.nll / max(self.tokens, 1)
        found = {"nll": nll, "perplexity": math.exp(nll) if nll < 700 else math.inf}
        if self.shifted:
            return found, None
        right, exact = self.right / max(self.tokens, 1), self.exact / max(self.records, 1)
        return {"token_accuracy": right, "exact_match": exact, **found}, None


def spans(tags: Sequence[str]) -> set[tuple[Any, ...]]:
    """(begin, end, kind) of the entities that tags name; I-X after another kind begins an entity, too.

    >>> sorted(spans(["B-A", "I-A", "O", "I-B", "B-B", "S-A"]))
    [(0, 2, 'A'), (3, 4, 'B'), (4, 5, 'B'), (5, 6, 'A')]
    """
    found, begun, kind = set(), 0, ""
    for i, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        if kind and mark in ("I", "E") and name == kind:
            continue
        if kind:
            found.add((begun, i, kind))
        begun, kind = i, name if mark in ("B", "I", "E", "S") else ""
    return found


def _f1(right: float, said: float, true: float) -> float:
    return 2 * right / (said + true) if said + true else 0.0


class Evaluation:
    """Called with the model: {figure: value} of the held-out records, without dropout and gradients.

    `last`: calibration of the last call, of classes. `simple`: what can be had without learning. fused: of a language
    model whose logits are not stored. scale: what 1 in the labels of a regression is in the data.
    """

    def __init__(self, data: Any, collate: Any, task: str, rows: int, fused: FusedHead | None = None,
                 names: Sequence[str] | None = None, scale: float = 1.0) -> None:  # fmt: skip
        self.data, self.collate, self.task, self.rows, self.fused = data, collate, task, rows, fused
        self.names, self.scale = names, scale
        self.last: Calibration | None = None
        self.simple: Simple | None = None

    def __call__(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model), torch.no_grad():
            found, self.simple = self._of(model)
        return found

    def _of(self, model: nn.Module) -> Found:
        device, logits, takes = next(model.parameters()).device, logits_of(model), accepted(model)
        tokens = Tokens(self.task == "lm", (self.names or ()) if self.task == "tokens" else ())
        outputs, labels = [], []
        for start in range(0, len(self.data), self.rows):
            batch = self.collate([self.data[i] for i in range(start, min(start + self.rows, len(self.data)))])
            batch = {name: value.to(device) for name, value in batch.items()}
            if self.fused is not None and self.fused.is_of(model):
                losses, count = self.fused.evaluated(model, inputs_of(batch, takes), batch["labels"])
                tokens.nll, tokens.tokens = tokens.nll + float(losses), tokens.tokens + int(count)
            elif self.task == "preference":
                outputs.append(margins(model, batch, logits).cpu())
            elif self.task in ("tokens", "lm", "seq2seq"):
                tokens.add(logits(model, batch), batch["labels"])
            else:
                outputs.append(logits(model, batch).float().cpu())
                labels.append(batch["labels"].cpu())
        if self.task in ("tokens", "lm", "seq2seq"):
            return tokens.of_tags() if self.task == "tokens" else tokens.of_text()
        if self.task == "preference":
            return of_margins(torch.cat(outputs))
        if self.task == "regression":
            return of_numbers(torch.cat(outputs), torch.cat(labels), self.scale)
        if self.task == "multi-label":
            return of_label_sets(torch.cat(outputs), torch.cat(labels))
        self.last = calibration(torch.cat(outputs), torch.cat(labels))
        return of_classes(self.last, torch.cat(labels))
