"""Evaluation of a causal language model whose loss is fused: where only the loss is asked for, no logits are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor, nn

from ..losses.language_model_head import FusedHead
from .losses import without_labels


class FusedEvaluation(transformers.Trainer):  # type: ignore[misc]
    """Trainer's evaluation, whose loss comes of `_fused` if no metric wants logits and labels are not smoothed.

    The loss is Trainer's own: a mean over the labelled tokens of a batch, not over its samples.
    """

    model: Any
    _fused: FusedHead | None = None
    _loss_only = False  # inside a step of evaluation that asks for the loss alone

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Trainer.prediction_step."""
        self._loss_only = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        finally:
            self._loss_only = False

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer.compute_loss."""
        if not self._stores_none(inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert self._fused is not None
        given, labels = without_labels(self.model, inputs)
        total, count = self._fused.evaluated(model, given, labels["labels"])
        counted = num_items_in_batch if self.model_accepts_loss_kwargs else None
        loss = (total / (count if counted is None else counted)).float()
        return (loss, {}) if return_outputs else loss

    def _stores_none(self, inputs: Any) -> bool:
        if not self._loss_only or self._fused is None or self.compute_loss_func is not None:
            return False
        labelled = isinstance(inputs, Mapping) and isinstance(inputs.get("labels"), Tensor)
        return labelled and not self.args.label_smoothing_factor and self._fused.is_of(self.model)
