"""Planted bugs: each step is right (tests/audit/audit_hand.py) but for one thing, which fastdp.audit must find.

PLANTED maps the bug's name to what makes the step and the tests that must find it. Where another library had the bug,
the comment says so.
"""

from . import audit_zoo_clipping, audit_zoo_noise, audit_zoo_sampling  # noqa: F401  (they plant)
from .audit_hand import PLANTED
from .audit_zoo_clipping import NoClipping

__all__ = ["PLANTED", "NoClipping"]
