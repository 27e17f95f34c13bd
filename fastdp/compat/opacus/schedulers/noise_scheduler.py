"""Schedules of the noise multiplier: Opacus's classes, which go on where they stood when their state is loaded."""

from __future__ import annotations

from typing import Any

from opacus.schedulers import noise_scheduler as theirs
from opacus.schedulers.noise_scheduler import _NoiseScheduler

__all__ = ["ExponentialNoise", "LambdaNoise", "StepNoise", "_NoiseScheduler"]


class _Resumed:
    """The state also holds the optimizer's noise multiplier, which no other checkpoint of Opacus holds."""

    optimizer: Any

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {**state, "noise_multiplier": self.optimizer.noise_multiplier}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        if "noise_multiplier" in state:
            self.optimizer.noise_multiplier = state.pop("noise_multiplier")
        super().load_state_dict(state)  # type: ignore[misc]


class ExponentialNoise(_Resumed, theirs.ExponentialNoise):  # type: ignore[misc]
    """noise_multiplier times gamma at every step() of the scheduler."""


class LambdaNoise(_Resumed, theirs.LambdaNoise):  # type: ignore[misc]
    """The first noise_multiplier times noise_lambda(epoch)."""


class StepNoise(_Resumed, theirs.StepNoise):  # type: ignore[misc]
    """noise_multiplier times gamma at every step_size-th step() of the scheduler."""
