"""grad_sample_mode "ew"."""

from __future__ import annotations

from typing import Any

from torch import nn

from .gsm_base import AbstractGradSampleModule, EngineHooks


class GradSampleModuleExpandedWeights(EngineHooks, AbstractGradSampleModule):
    """As GradSampleModule; raises NotImplementedError for batch_first=False, as Opacus does."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        if not batch_first:
            raise NotImplementedError("grad_sample_mode 'ew' takes batch_first=True only")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x, *args, **kwargs)
