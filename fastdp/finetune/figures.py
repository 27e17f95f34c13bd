"""Figures of held-out records for each task, and what an answer that does not look at the record would reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..calibration import Calibration, calibration
from ..losses import IGNORE

_ROUNDING = 1e-4  # nats: the same text with other padding


class Simple(NamedTuple):
    """What can be had without learning: the value of the headline, the words for it, and the number of records."""

    value: float
    words: str
    records: int


class Figures:
    """Takes logits and labels batch by batch; `result` is {figure: value}."""

    simple: Simple | None = None
    last: Calibration | None = None

    def add(self, given: Tensor, batch: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def result(self) -> dict[str, float]:
        raise NotImplementedError


class Kept(Figures):
    """Figures that need all logits at once."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.labels: list[Tensor] = []

    def add(self, given: Tensor, batch: dict[str, Tensor]) -> None:
        self.logits.append(given.float().cpu())
        self.labels.append(batch["labels"].cpu())


class Classes(Kept):
    """accuracy, nll (nats), ece."""

    def result(self) -> dict[str, float]:
        labels = torch.cat(self.labels)
        self.last = calibration(torch.cat(self.logits), labels)
        share = float(labels.bincount().max()) / len(labels)
        self.simple = Simple(share, "the share of the most frequent label", len(labels))
        return {"accuracy": self.last.accuracy, "nll": self.last.nll, "ece": self.last.ece}


class Numbers(Kept):
    """rmse in the unit of the data, r2. scale: what 1 in the labels is in the data."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def result(self) -> dict[str, float]:
        labels, given = torch.cat(self.labels).double(), torch.cat(self.logits).double().reshape(-1)
        wrong = (given - labels).square().mean()
        spread = labels.var(unbiased=False)
        self.simple = Simple(0.0, "R2 of the mean of the labels", len(labels))
        found = {"rmse": self.scale * math.sqrt(float(wrong))}
        return {"r2": float(1 - wrong / spread), **found} if float(spread) > 0 else found


class LabelSets(Kept):
    """micro_f1 at the threshold 0.5, exact_match (all labels of a record), nll (nats a label)."""

    def result(self) -> dict[str, float]:
        labels, given = torch.cat(self.labels), torch.cat(self.logits)
        said = given > 0
        often = labels.sum(0) > len(labels) / 2
        simple = _f1(float(labels[:, often].sum()), float(often.sum()) * len(labels), float(labels.sum()))
        self.simple = Simple(simple, "the micro-F1 of the labels that most records have", len(labels))
        return {
            "micro_f1": _f1(float((said * labels).sum()), float(said.sum()), float(labels.sum())),
            "exact_match": float((said == (labels > 0.5)).all(1).double().mean()),
            "nll": float(F.binary_cross_entropy_with_logits(given, labels)),
        }


class Tags(Figures):
    """f1: of entities where tags are B-X and I-X, else of words whose tag is not "O"; accuracy; nll."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.entities = any(name[:2] in ("B-", "I-") for name in names)
        self.right = self.said = self.true = 0
        self.counts = torch.zeros(len(names), dtype=torch.long)
        self.correct, self.nll, self.records = 0, 0.0, 0

    def add(self, given: Tensor, batch: dict[str, Tensor]) -> None:
        given, labels = given.float().cpu(), batch["labels"].cpu()
        self.nll += float(F.cross_entropy(given.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"))
        self.records += len(labels)
        for row, tags in zip(given.argmax(2), labels, strict=True):
            kept = tags != IGNORE
            said, true = row[kept], tags[kept]
            self.correct += int((said == true).sum())
            self.counts += true.bincount(minlength=len(self.names))
            first, second = self._spans(said.tolist()), self._spans(true.tolist())
            self.right, self.said, self.true = (
                self.right + len(first & second), self.said + len(first), self.true + len(second)
            )  # fmt: skip

    def _spans(self, tags: list[int]) -> set[tuple[Any, ...]]:
        named = [self.names[tag] for tag in tags]
        return spans(named) if self.entities else {(i, name) for i, name in enumerate(named) if name != "O"}

    def result(self) -> dict[str, float]:
        total = max(int(self.counts.sum()), 1)
        what = self.names[int(self.counts.argmax())]
        if what == "O" or self.entities:
            self.simple = Simple(0.0, f"F1 of the tag {what!r} for all words", self.records)
        else:
            others = total - int(self.counts[self.names.index("O")]) if "O" in self.names else total
            best = _f1(float(self.counts.max()), total, others)
            self.simple = Simple(best, f"F1 of the tag {what!r} for all words", self.records)
        return {"f1": _f1(self.right, self.said, self.true), "accuracy": self.correct / total, "nll": self.nll / total}


def spans(tags: Sequence[str]) -> set[tuple[Any, ...]]:
    """(begin, end, kind) of the entities that tags name; I-X after another kind begins an entity, too.

    >>> sorted(spans(["B-A", "I-A", "O", "I-B", "B-B", "S-A"]))
    [(0, 2, 'A'), (3, 4, 'B'), (4, 5, 'B'), (5, 6, 'A')]
    """
    found, begun, kind = set(), 0, ""
    for i, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        goes_on = bool(kind) and mark in ("I", "E") and name == kind
        if not goes_on:
            if kind:
                found.add((begun, i, kind))
            begun, kind = i, name if mark in ("B", "I", "E", "S") and name else ""
    return found


class Written(Figures):
    """nll and perplexity of a token; of targets also token_accuracy and exact_match, each with the true tokens before.

    A target all of whose tokens are the likeliest ones is what greedy generation writes, so exact_match needs none.
    """

    def __init__(self, shifted: bool) -> None:
        self.shifted = shifted  # lm: logits are of the next token
        self.nll, self.tokens, self.right, self.exact, self.records = 0.0, 0, 0, 0, 0

    def add_sums(self, losses: float, count: int) -> None:
        """The sum of losses of so many tokens."""
        self.nll, self.tokens = self.nll + losses, self.tokens + count

    def add(self, given: Tensor, batch: dict[str, Tensor]) -> None:
        given, labels = given.float(), batch["labels"]
        if self.shifted:
            given, labels = given[:, :-1], labels[:, 1:]
        kept = labels != IGNORE
        losses = F.cross_entropy(given.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        self.add_sums(float(losses), int(kept.sum()))
        if not self.shifted:
            right = given.argmax(2) == labels
            self.right += int((right & kept).sum())
            self.exact += int((right | ~kept).all(1).sum())
            self.records += len(labels)

    def result(self) -> dict[str, float]:
        nll = self.nll / max(self.tokens, 1)
        found = {"nll": nll, "perplexity": math.exp(nll) if nll < 700 else math.inf}
        if self.shifted:
            return found
        accuracy, exact = self.right / max(self.tokens, 1), self.exact / max(self.records, 1)
        return {"token_accuracy": accuracy, "exact_match": exact, **found}


class Preferences(Figures):
    """reward_accuracy: the share of records whose chosen answer gained more than the rejected one (ties: one half);
    margin: the mean of what it gained more, in nats. `add` takes margins."""

    def __init__(self) -> None:
        self.margins: list[Tensor] = []

    def add(self, given: Tensor, batch: dict[str, Tensor]) -> None:
        self.margins.append(given.double().cpu())

    def result(self) -> dict[str, float]:
        found = torch.cat(self.margins)
        self.simple = Simple(0.5, "what a coin reaches", len(found))
        tied = found.abs() < _ROUNDING  # as before training
        right = float(((found > 0) & ~tied).double().mean() + 0.5 * tied.double().mean())
        return {"reward_accuracy": right, "margin": float(found.mean())}


def _f1(right: float, said: float, true: float) -> float:
    return 2 * right / (said + true) if said + true else 0.0


def figures_of(task: str, names: Sequence[str] | None, scale: float) -> Figures:
    """What a task is measured by."""
    if task == "regression":
        return Numbers(scale)
    if task == "multi-label":
        return LabelSets()
    if task == "tokens":
        return Tags(names or ())
    if task == "preference":
        return Preferences()
    return Written(task == "lm") if task in ("lm", "seq2seq") else Classes()
