"""Clipping by a norm that follows a quantile of the samples' norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .optimizer import DPOptimizer


class AdaClipDPOptimizer(DPOptimizer):
    """DPOptimizer whose `max_grad_norm` follows the target quantile of norms, learnt from a noisy count of samples.

    Source: Andrew et al. 2021, arXiv 1905.03871; Theorem 1 for the noise on gradients that makes room for the count's.
    A sample counts 1/2 where it is not clipped and -1/2 where it is: that is what 2 unclipped_num_std is the noise
    multiplier of, and the number of samples, which is private, enters nowhere else. Shares are of expected_batch_size.

    Raises ValueError unless min_clipbound < max_clipbound, noise_multiplier < 2 unclipped_num_std and
    expected_batch_size is given.
    """

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
        if max_clipbound <= min_clipbound:
            raise ValueError("max_clipbound must be larger than min_clipbound.")
        if noise_multiplier >= 2 * unclipped_num_std:
            raise ValueError(
                "noise_multiplier must be smaller than 2 * unclipped_num_std: the count's noise takes its share of the "
                "budget (arXiv 1905.03871, Theorem 1)"
            )
        if expected_batch_size is None:
            raise ValueError(
                "expected_batch_size is needed: the share of unclipped samples is taken of it, as the number of "
                "samples in a batch is private"
            )
        self.target_unclipped_quantile = target_unclipped_quantile
        self.clipbound_learning_rate = clipbound_learning_rate
        self.max_clipbound = max_clipbound
        self.min_clipbound = min_clipbound
        self.unclipped_num_std = unclipped_num_std
        self.sample_size = 0
        self.unclipped_num: Any = 0
        self._released = 0.0  # the noisy count of a step, each sample's 1/2 or -1/2

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As DPOptimizer's; the counts of a logical batch begin anew with its sums."""
        super().zero_grad(set_to_none)
        if not self._is_last_step_skipped:
            self.sample_size, self.unclipped_num = 0, 0

    def _clip_factors(self, norm_sq: Tensor) -> Tensor:
        factors = super()._clip_factors(norm_sq)
        self.sample_size += len(factors)
        self.unclipped_num = self.unclipped_num + (norm_sq <= float(self.max_grad_norm) ** 2).sum()
        return factors

    def add_noise(self) -> None:
        """Noise on the sums, by the multiplier that is left once the count has its noise; and noise on the count."""
        sigma = self.noise_multiplier
        adjusted = (sigma**-2 - (2 * self.unclipped_num_std) ** -2) ** -0.5 if sigma > 0 else 0.0
        self._noise_into_grad(adjusted * self._sensitivity())
        count = torch.as_tensor(self.unclipped_num).double().reshape(1).clone()
        count -= self.sample_size / 2
        if self.unclipped_num_std:
            noise = self._noise if sigma > 0 and self._noise is not None else self._next_noise()
            noise.add_(count, float(self.unclipped_num_std))
        self._released = float(count)
        self.unclipped_num = count.reshape(()) + self.sample_size / 2

    def update_max_grad_norm(self) -> None:
        """A step of the clipping norm towards the quantile."""
        assert self.expected_batch_size is not None
        share = self._released / (self.expected_batch_size * self.accumulated_iterations) + 0.5
        error = share - self.target_unclipped_quantile
        moved = float(self.max_grad_norm) * math.exp(-self.clipbound_learning_rate * error)
        self.max_grad_norm = min(max(moved, self.min_clipbound), self.max_clipbound)

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool | None:
        stepped = super().pre_step()
        if stepped:
            self.update_max_grad_norm()
        return stepped
