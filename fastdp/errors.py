"""Errors. Every one of them says what happened, to what, and what to do about it."""

from __future__ import annotations


class FastDPError(RuntimeError):
    """Base class of everything that fastdp raises on purpose."""


class UncapturedUseError(FastDPError):
    """A tracked parameter was used in a way that no per-sample rule saw."""


class SampleMixingError(FastDPError):
    """An operation combined several samples, so a per-sample gradient does not exist."""

    def __init__(self, message: str, mixed: str = "") -> None:
        super().__init__(message)
        self.mixed = mixed  # the operation that did it first


class BatchLayoutError(FastDPError):
    """The rows of a tensor could not be attributed to samples."""


class ParameterError(FastDPError):
    """The optimizer's parameters and the model's do not fit."""


class StepError(FastDPError):
    """forward, backward and step were called in an order that has no private meaning."""


class ClippingError(FastDPError):
    """A clipping function exceeds the clipping norm or returns something unusable."""


class AccountingError(FastDPError):
    """The privacy spent cannot be stated."""


class VerificationError(FastDPError):
    """fastdp.verify found a norm, a sum or a dependence between samples that is wrong."""


class BatchReadWarning(UserWarning):
    """The model's Python read a number made of several samples. `warnings.simplefilter("error", ...)` refuses it."""


class LossReductionWarning(UserWarning):
    """The loss is a sum over the samples where a mean was said, or the other way round."""


class LossNotFollowedWarning(UserWarning):
    """The loss was made where fastdp could not follow it, so whether it couples samples is not known."""


class NotVerifiedWarning(UserWarning):
    """An epsilon was asked for of a model that `fastdp.verify` has never looked at."""
