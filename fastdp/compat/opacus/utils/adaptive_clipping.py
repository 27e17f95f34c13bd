"""Ghost clipping by a norm that follows a quantile of the samples' norms (Andrew et al. 2021, arXiv 1905.03871)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..privacy_engine import PrivacyEngine
from .fast_gradient_clipping_utils import DPLossFastGradientClipping, reduced

__path__: list[str] = []  # see aliases.py
__all__ = [
    "DPLossFastGradientAdaptiveClipping",
    "DPTensorFastGradientAdaptiveClipping",
    "PrivacyEngineAdaptiveClipping",
]


class Quantile:
    """Counts the samples of a logical batch that are not clipped, and moves the clipping norm after its step.

    The count gets noise of standard deviation expected_batch_size / 20, and the gradients that much more noise that
    both together cost what the accountant is told (Theorem 1). Shares are of the expected batch size: the size of a
    Poisson sample is private. A sample counts 1/2 or -1/2, as the Theorem has it: counted as 1 or 0 it would cost more.

    Opacus moves the norm within a batch, divides by the batch's own size, and its criterion does not clip at all: it
    scales the mean gradient of the batch by the sum of the factors.
    """

    def __init__(
        self, module: Any, optimizer: Any, target: float, min_clipbound: float, max_clipbound: float, rate: float
    ) -> None:
        if not 0 <= target <= 1:
            raise ValueError(f"target_unclipped_quantile must lie in [0, 1], not {target!r}")
        if not 0 < min_clipbound <= max_clipbound:
            raise ValueError(f"clipbounds must be positive and in order, not {min_clipbound!r} and {max_clipbound!r}")
        self.module, self.optimizer = module, optimizer
        self.target, self.bounds, self.rate = target, (min_clipbound, max_clipbound), rate
        self.count: Tensor | None = None  # of this logical batch: 1/2 a sample that is not clipped, else -1/2
        self._multiplier()  # checks it
        self._add_noise = optimizer.add_noise
        optimizer.add_noise = self.add_noise

    def __call__(self, norms: Tensor) -> None:
        """A backward's norms [B], before its samples are clipped."""
        unclipped = ((norms <= float(self.module.max_grad_norm)).double() - 0.5).sum()
        begun = self.module.backwards() > 0 or (
            any(p.summed_grad is not None for p in self.optimizer.params) and not self.optimizer._sums_are_used()
        )
        self.count = self.count + unclipped if begun and self.count is not None else unclipped

    def add_noise(self) -> None:
        """In the place of the optimizer's: noise on gradients and count, then the next step's clipping norm."""
        self.optimizer._adjusted_noise_multiplier = self._multiplier()
        self._add_noise()
        count = torch.zeros(1, dtype=torch.float64) if self.count is None else self.count.double().cpu().reshape(1)
        if (of_all := getattr(self.optimizer, "total", None)) is not None:  # in a process group
            count = torch.tensor([of_all("samples that are not clipped", float(count))], dtype=torch.float64)
        used = self.optimizer._noise if self.optimizer.noise_multiplier > 0 else None
        (used or self.optimizer._next_noise()).add_(count, self._std())
        share = float(count) / self._expected() + 0.5
        moved = float(self.module.max_grad_norm) * math.exp(-self.rate * (share - self.target))
        self.module.max_grad_norm = min(max(moved, self.bounds[0]), self.bounds[1])
        self.count = None

    def _expected(self) -> float:
        """Samples of a step, in expectation."""
        return self._batch() * int(self.optimizer.accumulated_iterations)

    def _batch(self) -> float:
        """The expected batch of all processes."""
        return float(self.optimizer.expected_batch_size) * int(getattr(self.optimizer, "world_size", 1))

    def _std(self) -> float:
        return self._batch() / 20

    def _multiplier(self) -> float:
        """(sigma^-2 - (2 std)^-2)^(-1/2)"""
        sigma, std = float(self.optimizer.noise_multiplier), self._std()
        assert std > sigma / 2, (
            f"Batch size is too small. For adaptive clipping the expected batch size must be larger than 10 times the "
            f"noise multiplier: {20 * std:g} is not larger than {10 * sigma:g}"
        )
        return (sigma**-2 - (2 * std) ** -2) ** -0.5 if sigma > 0 else 0.0


def _follow(module: Any, optimizer: Any, *settings: float) -> None:
    """Attach a Quantile of these settings, unless the same one is there."""
    there = module.on_norms
    if isinstance(there, Quantile) and there.optimizer is optimizer:
        if (there.target, *there.bounds, there.rate) == settings:
            return
        optimizer.add_noise = there._add_noise
    module.on_norms = Quantile(module, optimizer, *settings)


class DPTensorFastGradientAdaptiveClipping:
    """An ordinary scalar tensor, as DPTensorFastGradientClipping; from the next backward on the clipping is adaptive.

    initial_noise_multiplier: not used, the optimizer's holds.
    """

    def __new__(  # type: ignore[misc]
        cls,
        module: Any,
        optimizer: Any,
        loss_per_sample: Tensor,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ) -> Tensor:
        _follow(module, optimizer, target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate)
        return reduced(loss_per_sample, loss_reduction)


class DPLossFastGradientAdaptiveClipping(DPLossFastGradientClipping):
    """The criterion of `PrivacyEngineAdaptiveClipping`: that of mode "ghost", with a clipping norm that adapts.

    Args: as DPLossFastGradientClipping's; target_unclipped_quantile: share of samples not to clip; min_clipbound,
    max_clipbound: between which the norm stays; clipbound_learning_rate. initial_noise_multiplier is not used: the
    optimizer's noise_multiplier holds, also where a scheduler changes it. Raises AssertionError unless the expected
    batch size is larger than 10 times that, ValueError on bounds or a quantile that make no sense.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        criterion: Any,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ) -> None:
        super().__init__(module, optimizer, criterion, loss_reduction)
        self.target_unclipped_quantile = target_unclipped_quantile
        self.min_clipbound, self.max_clipbound = min_clipbound, max_clipbound
        self.clipbound_learning_rate = clipbound_learning_rate
        self.initial_noise_multiplier = initial_noise_multiplier
        _follow(module, optimizer, target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate)


class PrivacyEngineAdaptiveClipping(PrivacyEngine):
    """PrivacyEngine whose `make_private(..., grad_sample_mode="ghost")` clips adaptively.

    Further arguments of make_private: target_unclipped_quantile, min_clipbound, max_clipbound,
    clipbound_learning_rate.
    """

    def _prepare_criterion(
        self,
        *,
        module: Any,
        optimizer: Any,
        criterion: Any = nn.CrossEntropyLoss(),  # noqa: B008  (Opacus's default)
        loss_reduction: str = "mean",
        **kwargs: Any,
    ) -> DPLossFastGradientAdaptiveClipping:
        names = ("target_unclipped_quantile", "min_clipbound", "max_clipbound", "clipbound_learning_rate")
        settings = {name: kwargs[name] for name in names if name in kwargs}
        sigma = optimizer.noise_multiplier
        return DPLossFastGradientAdaptiveClipping(
            module, optimizer, criterion, loss_reduction, initial_noise_multiplier=sigma, **settings
        )
