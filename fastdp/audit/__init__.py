"""Tests for any implementation of DP-SGD, seen from outside: is it clipped, per example, with the right noise?

>>> from fastdp.audit import TESTS
>>> "no_clipping" in TESTS
True
"""

from .finding import Finding
from .trainable import AuditError, Outcome, Trainable

__all__ = ["AuditError", "Finding", "Outcome", "Trainable"]
