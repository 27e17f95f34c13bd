"""grad_sample_mode "ghost_tp", which is refused."""

from __future__ import annotations

from typing import Any

from torch import nn

from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)

_WHY = (
    "grad_sample_mode 'ghost_tp' is not supported. Use fastdp's own optimizer after torch's parallelize_module "
    "(fastdp.DPAdamW(model, ...), docs/distributed.md), or 'ghost' on whole models; its memory is that of ordinary "
    "training."
)


class GradSampleHooksFastGradientClippingTP(GradSampleHooksFastGradientClipping):
    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        raise NotImplementedError(_WHY)


class GradSampleModuleFastGradientClippingTP(GradSampleModuleFastGradientClipping):
    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        raise NotImplementedError(_WHY)
