"""Clipping of each parameter by a norm of its own."""

from __future__ import annotations

import math
from typing import Any

from opacus.optimizers.utils import params
from torch.optim import Optimizer

from ....ops.clip import clip_factors
from ..grad_sample import samples
from .optimizer import DPOptimizer
from .sums import norm_sq, sums


class DPPerLayerOptimizer(DPOptimizer):
    """DPOptimizer with `max_grad_norm` a list: one clipping norm for each parameter; `max_grad_norms` keeps it.

    `max_grad_norm` is then the norm of all, sqrt(sum R^2), which noise follows. Raises AssertionError where there are
    more or fewer than parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: list[float],
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: Any = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        count = len(params(optimizer))
        assert len(max_grad_norm) == count, f"{len(max_grad_norm)} clipping norms for {count} parameters"
        self.max_grad_norms = max_grad_norm
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=math.hypot(*max_grad_norm),
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            **kwargs,
        )

    def clip_and_accumulate(self) -> None:
        for parts in self._backwards():
            with samples.outside():
                found = {}
                for part, bound in zip(parts, self.max_grad_norms, strict=True):
                    factors = clip_factors(norm_sq([part]), float(bound))
                    found.update(sums([part], factors))
                self._add(found)
        self._after_clipping(math.hypot(*self.max_grad_norms))
