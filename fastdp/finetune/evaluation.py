"""Figures of the held-out records: accuracy, NLL and calibration, or perplexity. None of them is covered by epsilon."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..calibration import Calibration, calibration
from ..losses import IGNORE
from ..training.fused_head import FusedHead
from .encode import Collate, Encoded, inputs_of, logits_of

HEADLINE = {"classify": "accuracy", "lm": "perplexity"}


class Evaluation:
    """Called with the model, in eval mode and without gradients: {metric: value}. `last`: calibration of the last call.

    classify: accuracy, nll (nats), ece. lm: nll (nats a token, all tokens alike), perplexity = exp(nll).
    fused: of a language model whose logits are not stored.
    """

    def __init__(self, data: Encoded, collate: Collate, task: str, rows: int, fused: FusedHead | None = None) -> None:
        self.data, self.collate, self.task, self.rows, self.fused = data, collate, task, rows, fused
        self.last: Calibration | None = None
        self.order = sorted(range(len(data)), key=data.length)  # little padding

    def __call__(self, model: nn.Module) -> dict[str, float]:
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():
                return self._of(model)
        finally:
            for module in training:
                module.training = True

    def _of(self, model: nn.Module) -> dict[str, float]:
        device, logits = next(model.parameters()).device, logits_of(model)
        found: list[Tensor] = []
        labels: list[Tensor] = []
        total, tokens = 0.0, 0
        for start in range(0, len(self.order), self.rows):
            batch = self.collate([self.data[i] for i in self.order[start : start + self.rows]])
            batch = {name: value.to(device) for name, value in batch.items()}
            if self.fused is not None and self.fused.is_of(model):
                losses, count = self.fused.evaluated(model, inputs_of(model, batch), batch["labels"])
                total, tokens = total + float(losses), tokens + int(count)
                continue
            given = logits(model, batch).float()
            if self.task == "classify":
                found.append(given.cpu())
                labels.append(batch["labels"].cpu())
                continue
            targets = batch["labels"][:, 1:].flatten()
            total += float(F.cross_entropy(given[:, :-1].flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum"))
            tokens += int((targets != IGNORE).sum())
        if self.task == "classify":
            self.last = calibration(torch.cat(found), torch.cat(labels))
            return {"accuracy": self.last.accuracy, "nll": self.last.nll, "ece": self.last.ece}
        nll = total / max(tokens, 1)
        return {"nll": nll, "perplexity": math.exp(nll) if nll < 700 else math.inf}


def in_words(metrics: dict[str, Any]) -> str:
    """ "accuracy 0.871, nll 0.312, ece 0.021"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name not in ("step", "epsilon"))
