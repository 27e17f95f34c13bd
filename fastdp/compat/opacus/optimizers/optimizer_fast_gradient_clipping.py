"""The optimizer of grad_sample_mode "ghost"."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....errors import StepError
from ..grad_sample import samples
from ..grad_sample.grad_sample_module import owners_of
from ..grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
from ..grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    OTHER_OPTIMIZER,
    GradSampleHooksFastGradientClippingFSDP,
)
from .optimizer import DPOptimizer


class DPOptimizerFastGradientClipping(DPOptimizer):
    """DPOptimizer over parameters of a GradSampleModuleFastGradientClipping, with which it shares `max_grad_norm`.

    It needs no zero_grad() between steps. Arguments of `DPOptimizer`.
    """

    @property
    def max_grad_norm(self) -> float:  # type: ignore[override]
        """One clipping norm for module and optimizer: what is set on either holds for both."""
        owner = self._owner()
        return self._max_grad_norm if owner is None else owner.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._max_grad_norm = value
        owner = self._owner()
        if owner is not None:
            owner.max_grad_norm = value

    def _owner(self) -> GradSampleHooksFastGradientClipping | None:
        """The module's hooks. Raises StepError where the parameters belong to several modules."""
        owners = owners_of(self.params)
        if len(owners) > 1:
            raise StepError(
                f"the optimizer's parameters belong to {len(owners)} modules, whose samples are clipped apart: put "
                "them into one module, or give each an optimizer of its own"
            )
        return owners[0] if owners and isinstance(owners[0], GradSampleHooksFastGradientClipping) else None

    def accumulate(self) -> None:
        """Opacus's name for `clip_and_accumulate` in this mode."""
        self.clip_and_accumulate()

    def clip_and_accumulate(self) -> None:
        if isinstance(self._owner(), GradSampleHooksFastGradientClippingFSDP):
            raise StepError(OTHER_OPTIMIZER)
        self._drop_used_sums()
        super().clip_and_accumulate()

    def _drop_used_sums(self) -> None:
        if any(samples.is_processed(getattr(p, "summed_grad", None)) for p in self.params):  # nobody called zero_grad
            self._drop_sums()

    def _clip_factors(self, squares: Tensor) -> Tensor:
        owner: Any = self._owner()
        if owner is not None:
            owner.per_sample_gradient_norms = squares.sqrt().float()
        return super()._clip_factors(squares)
