"""Errors and warnings. Each says what happened, to what, and what to do about it."""

from __future__ import annotations


class FastDPError(RuntimeError):
    """The base class of everything that fastdp raises on purpose."""


class UncapturedUseError(FastDPError):
    """A tracked parameter was used in a way that no per-sample rule saw."""


class SampleMixingError(FastDPError):
    """An operation combined several samples, so a per-sample gradient does not exist."""

    def __init__(self, message: str, mixed: str = "") -> None:
        super().__init__(message)
        self.mixed = mixed  # the operation that did it first


class BatchLayoutError(FastDPError):
    """The rows of a tensor could not be assigned to samples."""


class ParameterError(FastDPError):
    """The optimizer's parameters do not fit the model's."""


class StepError(FastDPError):
    """forward, backward and step were called in an order that has no private meaning."""


class GraphError(FastDPError):
    """A step cannot be recorded and replayed: something in it is not of the batch and the parameters alone."""


class ClippingError(FastDPError):
    """A clipping function exceeds the clipping norm or returns something unusable."""


class AccountingError(FastDPError):
    """The privacy spent cannot be computed."""


class VerificationError(FastDPError):
    """fastdp.verify found a norm, a sum or a dependence between samples that is wrong."""


class BatchReadWarning(UserWarning):
    """The model's Python read a number that depends on several samples.

    `warnings.simplefilter("error", BatchReadWarning)` turns the warning into an error.
    """


class LossReductionWarning(UserWarning):
    """The loss is a sum over the samples although loss_reduction is "mean", or the reverse."""


class LossNotFollowedWarning(UserWarning):
    """fastdp could not follow how the loss was computed, so it does not know whether it couples samples."""


class PairedForwardsWarning(UserWarning):
    """One backward went through several forwards, whose i-th samples were taken for one although nothing shows it."""


class SampleRateWarning(UserWarning):
    """A step was noised whose sample rate is not known: `epsilon` will need it."""


class OptimizerReplacedWarning(UserWarning):
    """A private optimizer was made for a model that had one, whose place it takes."""


class MissingKernelsWarning(UserWarning):
    """Operators run as plain PyTorch, several times slower, since a compiled extension or Triton is missing.

    FASTDP_CPU=0 and FASTDP_CUDA=0 in the environment say that fastdp._C and fastdp._CUDA are not wanted.
    """


class NotVerifiedWarning(UserWarning):
    """An epsilon was requested for a model that `fastdp.verify` has never examined."""
