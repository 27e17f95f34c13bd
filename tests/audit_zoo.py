"""All planted bugs: each step is right (tests/audit_hand.py) but for one thing, which fastdp.audit must find.

PLANTED maps the bug's name to what makes the step and the tests that must find it. Where another library had the bug,
its docstring says so.
"""

from . import (  # noqa: F401  (they plant)
    audit_zoo_clipping,
    audit_zoo_company,
    audit_zoo_law,
    audit_zoo_noise,
    audit_zoo_steps,
)
from .audit_hand import PLANTED
from .audit_zoo_clipping import NoClipping

__all__ = ["PLANTED", "NoClipping"]
