"""Schedules of the clipping norm: Opacus's classes, which go on where they stood when their state is loaded."""

from __future__ import annotations

from typing import Any

from opacus.schedulers import grad_clip_scheduler as theirs
from opacus.schedulers.grad_clip_scheduler import _GradClipScheduler

__all__ = ["ExponentialGradClip", "LambdaGradClip", "StepGradClip", "_GradClipScheduler"]


class _Resumed:
    """The state also holds the optimizer's clipping norm, which no other checkpoint of Opacus holds."""

    optimizer: Any

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {**state, "max_grad_norm": self.optimizer.max_grad_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        if "max_grad_norm" in state:
            self.optimizer.max_grad_norm = state.pop("max_grad_norm")
        super().load_state_dict(state)  # type: ignore[misc]


class ExponentialGradClip(_Resumed, theirs.ExponentialGradClip):  # type: ignore[misc]
    """max_grad_norm times gamma at every step() of the scheduler."""


class LambdaGradClip(_Resumed, theirs.LambdaGradClip):  # type: ignore[misc]
    """The first max_grad_norm times scheduler_function(epoch)."""


class StepGradClip(_Resumed, theirs.StepGradClip):  # type: ignore[misc]
    """max_grad_norm times gamma at every step_size-th step() of the scheduler."""
