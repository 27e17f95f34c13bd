"""Schedulers of the noise multiplier and the clipping norm by the names and paths of opacus.schedulers."""

from .grad_clip_scheduler import ExponentialGradClip, LambdaGradClip, StepGradClip, _GradClipScheduler
from .noise_scheduler import ExponentialNoise, LambdaNoise, StepNoise, _NoiseScheduler

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
