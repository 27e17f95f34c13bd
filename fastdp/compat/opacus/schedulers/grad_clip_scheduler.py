"""Schedules of the clipping norm: Opacus's classes, which go on where they stood when their state is loaded."""

from __future__ import annotations

from opacus.schedulers import grad_clip_scheduler as theirs
from opacus.schedulers.grad_clip_scheduler import _GradClipScheduler

from .resumed import Resumed

__all__ = ["ExponentialGradClip", "LambdaGradClip", "StepGradClip", "_GradClipScheduler"]


class ExponentialGradClip(Resumed, theirs.ExponentialGradClip):  # type: ignore[misc]
    """max_grad_norm times gamma at every step() of the scheduler."""

    VALUE = "max_grad_norm"


class LambdaGradClip(Resumed, theirs.LambdaGradClip):  # type: ignore[misc]
    """The first max_grad_norm times scheduler_function(epoch)."""

    VALUE = "max_grad_norm"


class StepGradClip(Resumed, theirs.StepGradClip):  # type: ignore[misc]
    """max_grad_norm times gamma at every step_size-th step() of the scheduler."""

    VALUE = "max_grad_norm"
