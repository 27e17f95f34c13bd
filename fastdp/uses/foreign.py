"""Autograd functions of other libraries that are made of torch's functions: seen without being registered by a user."""

from __future__ import annotations

import sys

from .register import register_rule

FUNCTIONS = {"peft.tuners.loha.layer": ("HadaWeight", "HadaWeightCP")}  # of LoHa
_seen: set[str] = set()


def see_foreign() -> None:
    """Register those of the modules that have been imported; autograd computes their per-sample gradients."""
    for module, names in FUNCTIONS.items():
        if module in sys.modules and module not in _seen:
            found = [function for name in names if (function := getattr(sys.modules[module], name, None)) is not None]
            if found:
                register_rule(*found)(None)
            _seen.add(module)
