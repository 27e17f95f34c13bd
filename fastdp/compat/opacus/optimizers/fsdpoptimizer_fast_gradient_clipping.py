"""The optimizer of mode "ghost_fsdp", which is refused."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


class FSDPOptimizerFastGradientClipping(DPOptimizerFastGradientClipping):
    def __init__(self, optimizer: Optimizer, **kwargs: Any) -> None:
        raise NotImplementedError(
            "grad_sample_mode 'ghost_fsdp' is not supported: fastdp does not train sharded models yet. Use 'ghost'."
        )
