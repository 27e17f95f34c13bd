"""Figures of the held-out records, while it trains. None of them is covered by epsilon."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..calibration import Calibration
from ..losses.language_model_head import FusedHead
from .encode import Collate, Encoded, inputs_of, logits_of
from .figures import Simple, Written, figures_of
from .task_losses import margins


class Evaluation:
    """Called with the model, in eval mode and without gradients: {figure: value}; `figures` says which of which task.

    `last`: calibration of the last call. `simple`: what can be had without learning. fused: of a language model whose
    logits are not stored. scale: what 1 in the labels of a regression is in the data.
    """

    def __init__(self, data: Encoded, collate: Collate, task: str, rows: int, fused: FusedHead | None = None,
                 names: Sequence[str] | None = None, scale: float = 1.0) -> None:  # fmt: skip
        self.data, self.collate, self.task, self.rows, self.fused = data, collate, task, rows, fused
        self.names, self.scale = names, scale
        self.called = False
        self.last: Calibration | None = None
        self.simple: Simple | None = None
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
        figures = figures_of(self.task, self.names, self.scale)
        for start in range(0, len(self.order), self.rows):
            batch = self.collate([self.data[i] for i in self.order[start : start + self.rows]])
            batch = {name: value.to(device) for name, value in batch.items()}
            if self.fused is not None and self.fused.is_of(model):
                assert isinstance(figures, Written)
                losses, count = self.fused.evaluated(model, inputs_of(model, batch), batch["labels"])
                figures.add_sums(float(losses), int(count))
            elif self.task == "preference":
                figures.add(margins(model, batch, logits), batch)
            else:
                figures.add(logits(model, batch), batch)
        found = figures.result()
        self.called, self.last, self.simple = True, figures.last, figures.simple
        return found
