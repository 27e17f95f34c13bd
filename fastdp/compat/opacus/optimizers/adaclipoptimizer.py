"""Clipping by a norm that follows a quantile of the samples' norms."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from .optimizer import DPOptimizer
from .quantile import Quantile


class AdaClipDPOptimizer(DPOptimizer):
    """DPOptimizer whose `max_grad_norm` follows the target quantile of norms; errors of `Quantile`."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        target_unclipped_quantile: float,
        clipbound_learning_rate: float,
        max_clipbound: float,
        min_clipbound: float,
        unclipped_num_std: float,
        max_grad_norm: float,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: Any = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )
        self.quantile = Quantile(
            self, target_unclipped_quantile, clipbound_learning_rate, max_clipbound, min_clipbound, unclipped_num_std
        )
