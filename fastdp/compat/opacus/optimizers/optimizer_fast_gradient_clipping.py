"""The optimizer of grad_sample_mode "ghost": gradients come clipped, it adds them up and adds the noise."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....errors import StepError
from ..grad_sample import samples
from ..grad_sample.clipped import Clipped
from ..grad_sample.grad_sample_module_fast_gradient_clipping import OTHER_OPTIMIZER, GradSampleHooksFastGradientClipping
from ..grad_sample.gsm_base import owners_of
from .optimizer import DPOptimizer


class DPOptimizerFastGradientClipping(DPOptimizer):
    """DPOptimizer over parameters of a GradSampleModuleFastGradientClipping, whose samples this one's
    `max_grad_norm` clips; arguments of `DPOptimizer`."""

    in_parts = False  # whether it updates parts of parameters

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
        found = owners[0] if owners else None
        return found if isinstance(found, GradSampleHooksFastGradientClipping) else None

    @property
    def accumulated_iterations(self) -> int:
        """Backwards that the step has taken, at least 1."""
        return max(1, self._backwards_taken)

    _backwards_taken = 0

    def accumulate(self) -> None:
        """Add the clipped sums of the backwards since the last call to `p.summed_grad`.

        Raises ValueError where there was no backward, StepError where `.grad` was written to since.
        """
        owner = self._owner()
        if owner is None:
            raise ValueError(
                "Per sample gradient not found. Are you using GradSampleModuleFastGradientClipping (of fastdp) around "
                "the model whose parameters these are?"
            )
        if owner.in_parts and not self.in_parts:
            raise StepError(OTHER_OPTIMIZER)
        if not owner.backwards():
            if self._sums_are_used():
                raise ValueError(
                    "Gradients haven't been cleared since the last optimizer step; no backward followed it"
                )
            raise ValueError("Per sample gradient is not initialized. Not updated in backward pass?")
        if self._sums_are_used():  # nobody called zero_grad
            self._drop_sums()
        taken = owner.take_clipped()
        taken.check(self.params)
        self._backwards_taken = taken.backwards
        self._bound = max(taken.bound, self._bound or 0.0)
        self._add({id(p): _of(p, taken) for p in self.params})
        for p in self.params:
            p.grad = None  # the same memory: zeroing it would zero the sum

    def _sums_are_used(self) -> bool:
        """Whether a step has used `p.summed_grad`."""
        return any(samples.is_processed(getattr(p, "summed_grad", None)) for p in self.params)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the sums that no step has taken; after a step that was no part of one, also `p.summed_grad`."""
        owner = self._owner()
        if owner is not None:
            owner.drop_clipped()
        self._clear_sums()
        self.original_optimizer.zero_grad(set_to_none)
        self._note_grads()

    def _take_gradients(self) -> None:
        self.accumulate()

    def add_noise(self) -> None:
        """As DPOptimizer's; `_adjusted_noise_multiplier` takes the place of the accounted one where it is set."""
        multiplier = getattr(self, "_adjusted_noise_multiplier", self.noise_multiplier)
        self._noise_into_grad(multiplier * self._sensitivity())

    def clip_and_accumulate(self) -> None:
        """Nothing: gradients come clipped."""

    @property
    def grad_samples(self) -> list[Tensor]:
        """None are kept."""
        return []


def _of(p: Any, taken: Clipped) -> Tensor:
    """The clipped sum of a parameter, which `.grad` shows; zero if that was cleared."""
    total = taken.sums.get(id(p))
    if total is None:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} took no part in the last backward: it was frozen, or is not of the "
            "module that was called"
        )
    return total.zero_() if p.grad is None else total
