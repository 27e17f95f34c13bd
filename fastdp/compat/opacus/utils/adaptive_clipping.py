"""Mode "ghost" with a clipping norm that follows a quantile of the samples' norms; see `optimizers.quantile`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..optimizers.quantile import Quantile
from ..privacy_engine import PrivacyEngine
from .fast_gradient_clipping_utils import DPLossFastGradientClipping, reduced

__path__: list[str] = []  # see aliases.py
__all__ = [
    "DPLossFastGradientAdaptiveClipping",
    "DPTensorFastGradientAdaptiveClipping",
    "PrivacyEngineAdaptiveClipping",
]


def _follow(optimizer: Any, target: float, min_clipbound: float, max_clipbound: float, rate: float) -> None:
    """Let the optimizer's clipping norm follow a quantile, unless it does: a loss may be made for each batch."""
    expected = optimizer.expected_batch_size * getattr(optimizer, "world_size", 1)
    assert expected > 10 * optimizer.noise_multiplier, (
        f"Batch size is too small. For adaptive clipping the expected batch size ({expected:g}) must be larger than 10 "
        f"times the noise multiplier ({optimizer.noise_multiplier:g})"
    )
    settings = (target, rate, max_clipbound, min_clipbound, expected / 20)
    if optimizer.quantile is None or optimizer.quantile.settings != settings:
        optimizer.quantile = Quantile(optimizer, *settings)


class DPTensorFastGradientAdaptiveClipping:
    """An ordinary scalar tensor, as DPTensorFastGradientClipping; from the next step on the clipping is adaptive.

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
        _follow(optimizer, target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate)
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
        _follow(optimizer, target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate)


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
        return DPLossFastGradientAdaptiveClipping(module, optimizer, criterion, loss_reduction, **settings)
