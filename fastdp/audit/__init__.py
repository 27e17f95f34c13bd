"""Tests for any implementation of DP-SGD, from outside: does it clip each sample, with the right noise?

>>> from fastdp.audit import TESTS
>>> "no_clipping" in TESTS
True
"""

from .finding import Finding
from .report import Report
from .runner import TESTS, assert_private, audit
from .torch_step import TorchTrainable
from .trainable import AuditError, Outcome, Trainable

__all__ = [
    "TESTS",
    "AuditError",
    "Finding",
    "Outcome",
    "Report",
    "TorchTrainable",
    "Trainable",
    "assert_private",
    "audit",
]
