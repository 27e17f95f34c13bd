"""Schedules of the noise multiplier and the clipping norm: Opacus's classes, which continue when a state is loaded."""

from __future__ import annotations

from typing import Any

from opacus.schedulers import grad_clip_scheduler, noise_scheduler
from opacus.schedulers.grad_clip_scheduler import _GradClipScheduler
from opacus.schedulers.noise_scheduler import _NoiseScheduler

__path__: list[str] = []  # see aliases.py
__all__ = [
    "ExponentialGradClip",
    "ExponentialNoise",
    "LambdaGradClip",
    "LambdaNoise",
    "StepGradClip",
    "StepNoise",
    "_GradClipScheduler",
    "_NoiseScheduler",
]


class _Resumed:
    """Saves the progress of a schedule: the scheduled value over the optimizer's first one.

    Opacus saves the epoch only, so a resumed run begins again at its first value. The first value itself stays the
    optimizer's own, which may be another one than before.
    """

    value: str  # the attribute of the optimizer that is scheduled
    _first: Any

    @property
    def optimizer(self) -> Any:
        return self.__dict__["optimizer"]

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:  # set by the constructor, before its first step
        self.__dict__["optimizer"], self._first = optimizer, getattr(optimizer, self.value, None)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state = {name: value for name, value in state.items() if name != "_first"}
        return {**state, "factor": getattr(self.optimizer, self.value) / self._first if self._first else 1.0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        if "factor" in state:
            setattr(self.optimizer, self.value, self._first * state.pop("factor"))
        super().load_state_dict(state)  # type: ignore[misc]


class _ResumedNoise(_Resumed):
    value = "noise_multiplier"


class _ResumedClip(_Resumed):
    value = "max_grad_norm"


class ExponentialNoise(_ResumedNoise, noise_scheduler.ExponentialNoise):  # type: ignore[misc]
    """noise_multiplier times gamma at every step() of the scheduler."""


class LambdaNoise(_ResumedNoise, noise_scheduler.LambdaNoise):  # type: ignore[misc]
    """The first noise_multiplier times noise_lambda(epoch)."""


class StepNoise(_ResumedNoise, noise_scheduler.StepNoise):  # type: ignore[misc]
    """noise_multiplier times gamma at every step_size-th step() of the scheduler."""


class ExponentialGradClip(_ResumedClip, grad_clip_scheduler.ExponentialGradClip):  # type: ignore[misc]
    """max_grad_norm times gamma at every step() of the scheduler."""


class LambdaGradClip(_ResumedClip, grad_clip_scheduler.LambdaGradClip):  # type: ignore[misc]
    """The first max_grad_norm times scheduler_function(epoch)."""


class StepGradClip(_ResumedClip, grad_clip_scheduler.StepGradClip):  # type: ignore[misc]
    """max_grad_norm times gamma at every step_size-th step() of the scheduler."""
