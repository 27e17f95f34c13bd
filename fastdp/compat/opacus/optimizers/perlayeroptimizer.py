"""Clipping of each parameter by a norm of its own."""

from __future__ import annotations

import math
from typing import Any

from opacus.optimizers.utils import params
from torch import Tensor
from torch.optim import Optimizer

from ....ops.clip import clip_factors
from ..grad_sample import samples
from .optimizer import DPOptimizer


class DPPerLayerOptimizer(DPOptimizer):
    """DPOptimizer with `max_grad_norm` a list: one clipping norm for each parameter; `max_grad_norms` keeps it.

    `max_grad_norm` is then the norm of all, sqrt(sum R^2), which noise follows. Raises AssertionError where there are
    more or fewer than parameters.
    """

    def __init__(self, optimizer: Optimizer, *, max_grad_norm: list[float], **options: Any) -> None:
        count = len(params(optimizer))
        assert len(max_grad_norm) == count, f"{len(max_grad_norm)} clipping norms for {count} parameters"
        self.max_grad_norms = max_grad_norm
        super().__init__(optimizer, max_grad_norm=math.hypot(*max_grad_norm), **options)

    def _clipped(self, parts: samples.Parts) -> dict[int, Tensor]:
        self._bound = max(math.hypot(*self.max_grad_norms), self._bound)
        found: dict[int, Tensor] = {}
        for part, bound in zip(parts, self.max_grad_norms, strict=True):
            found.update(samples.sums([part], clip_factors(samples.norm_sq([part]), float(bound))))
        return found
