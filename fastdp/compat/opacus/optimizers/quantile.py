"""A clipping norm that follows a quantile of the samples' norms (Andrew et al. 2021, arXiv 1905.03871)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class Quantile:
    """Counts the samples of a logical batch that are not clipped, and moves the optimizer's clipping norm at its step.

    The count gets noise of standard deviation unclipped_num_std, and the gradients that much more noise that both
    together cost what the accountant is told (Theorem 1). A sample counts 1/2 where it is not clipped and -1/2 where it
    is, as the Theorem has it: counted as 1 or 0 it would cost more. Shares are of the expected batch size: the size of
    a Poisson sample is private. (Opacus takes shares of the batch's own size, and in mode "ghost" does not clip.)

    Raises ValueError on bounds, a quantile or noise that make no sense, and without an expected batch size.
    """

    optimizer: Any
    target_unclipped_quantile: float
    clipbound_learning_rate: float
    max_clipbound: float
    min_clipbound: float
    unclipped_num_std: float
    counted: Any = 0.0  # of the logical batch, so far

    def __post_init__(self) -> None:
        if not 0 <= self.target_unclipped_quantile <= 1:
            raise ValueError(f"target_unclipped_quantile must lie in [0, 1], not {self.target_unclipped_quantile!r}")
        if not 0 < self.min_clipbound <= self.max_clipbound:
            raise ValueError(
                f"clipbounds must be positive, and max_clipbound larger than min_clipbound ({self.min_clipbound!r}), "
                f"not {self.max_clipbound!r}"
            )
        if self.optimizer.expected_batch_size is None:
            raise ValueError("expected_batch_size is needed: the number of samples in a batch is private")
        self.noise_multiplier()

    @property
    def settings(self) -> tuple[Any, ...]:
        """What it was made with, but for the optimizer."""
        names = [field.name for field in dataclasses.fields(self)]
        return tuple(getattr(self, name) for name in names[1:-1])

    def noise_multiplier(self) -> float:
        """Of the gradients' noise: (sigma^-2 - (2 std)^-2)^(-1/2)."""
        sigma, std = float(self.optimizer.noise_multiplier), self.unclipped_num_std
        if sigma >= 2 * std:
            raise ValueError(
                "noise_multiplier must be smaller than 2 * unclipped_num_std: the count's noise takes its share of the "
                "budget (arXiv 1905.03871, Theorem 1)"
            )
        return float((sigma**-2 - (2 * std) ** -2) ** -0.5) if sigma > 0 else 0.0

    def count(self, squares: Tensor, bound: float) -> None:
        """Count a backward's samples, by their squared norms."""
        self.counted = self.counted + ((squares <= bound**2).double() - 0.5).sum()

    def drop(self) -> None:
        """Forget the samples that were counted: their gradients are dropped, too."""
        self.counted = 0.0

    def move(self) -> None:
        """Once the gradients have their noise: a step of the clipping norm towards the quantile."""
        made = self.optimizer
        number = made.total("samples that are not clipped", float(self.counted))
        count = torch.tensor([number], dtype=torch.float64)
        noise = made._noise if made.noise_multiplier > 0 else made.begin_noise()
        noise.add_(count, self.unclipped_num_std)
        samples = made.expected_batch_size * getattr(made, "world_size", 1) * made.accumulated_iterations
        error = float(count) / samples + 0.5 - self.target_unclipped_quantile
        moved = float(made.max_grad_norm) * math.exp(-self.clipbound_learning_rate * error)
        made.max_grad_norm = min(max(moved, self.min_clipbound), self.max_clipbound)
        self.drop()
