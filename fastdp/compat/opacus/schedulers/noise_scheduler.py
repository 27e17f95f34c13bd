"""Schedules of the noise multiplier: Opacus's classes, which go on where they stood when their state is loaded."""

from __future__ import annotations

from opacus.schedulers import noise_scheduler as theirs
from opacus.schedulers.noise_scheduler import _NoiseScheduler

from .resumed import Resumed

__all__ = ["ExponentialNoise", "LambdaNoise", "StepNoise", "_NoiseScheduler"]


class ExponentialNoise(Resumed, theirs.ExponentialNoise):  # type: ignore[misc]
    """noise_multiplier times gamma at every step() of the scheduler."""

    VALUE = "noise_multiplier"


class LambdaNoise(Resumed, theirs.LambdaNoise):  # type: ignore[misc]
    """The first noise_multiplier times noise_lambda(epoch)."""

    VALUE = "noise_multiplier"


class StepNoise(Resumed, theirs.StepNoise):  # type: ignore[misc]
    """noise_multiplier times gamma at every step_size-th step() of the scheduler."""

    VALUE = "noise_multiplier"
