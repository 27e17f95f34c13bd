"""grad_sample_mode "ghost_fsdp", which is refused."""

from __future__ import annotations

from typing import Any

from torch import nn

from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)

_WHY = (
    "grad_sample_mode 'ghost_fsdp' is not supported. Use fastdp's own optimizer after torch's fully_shard "
    "(fastdp.DPAdamW(model, ...), docs/distributed.md), or 'ghost' on whole models; its memory is that of ordinary "
    "training."
)


class GradSampleHooksFastGradientClippingFSDP(GradSampleHooksFastGradientClipping):
    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        raise NotImplementedError(_WHY)


class GradSampleModuleFastGradientClippingFSDP(GradSampleModuleFastGradientClipping):
    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        raise NotImplementedError(_WHY)
