"""Autograd functions of well-known libraries that consist of torch calls, registered in advance."""

from __future__ import annotations

import sys

from .custom_rules import is_registered, register_rule

FUNCTIONS = {"peft.tuners.loha.layer": ("HadaWeight", "HadaWeightCP")}  # of LoHa
_seen: set[str] = set()


def see_foreign() -> None:
    """Register those of the modules that have been imported; autograd computes their per-sample gradients. What a user
    has registered, or unregistered since, stays so."""
    for module in FUNCTIONS.keys() & sys.modules.keys() - _seen:
        _seen.add(module)
        found = [getattr(sys.modules[module], name, None) for name in FUNCTIONS[module]]
        for function in found:
            if function is not None and not is_registered(function):
                register_rule(function)(None)
