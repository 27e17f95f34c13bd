"""Warns once for each kind of device whose kernels are missing: plain PyTorch is exact, but slower."""

from __future__ import annotations

import functools
import os
import sys
import warnings

from ..errors import MissingKernelsWarning
from ..ops.registry import OPERATORS
from ..utils.code_location import users

# what the environment says to setup.py: built by nobody, missed by nobody
UNWANTED = {"C++": "FASTDP_CPU", "CUDA C++": "FASTDP_CUDA"}


@functools.cache
def warn_of_missing_kernels(kind: str) -> None:
    """Warn if operators on this kind of device ("cpu", "cuda", ...) run without kernels that fastdp has for it."""
    caller = users(sys._getframe())
    place = (caller.f_code.co_filename, caller.f_lineno) if caller else ("fastdp", 0)
    for why, names in missing(kind).items():
        warnings.warn_explicit(
            f"{len(names)} of fastdp's {len(OPERATORS)} operators ({', '.join(names[:3])}{', ...' * (len(names) > 3)}) "
            f"run as plain PyTorch on {kind}, so training may take several times as long: {why}",
            MissingKernelsWarning,
            *place,
        )


def missing(kind: str) -> dict[str, list[str]]:
    """Operators by the reason why their kernel is not here, those left out that nobody wants."""
    found: dict[str, list[str]] = {}
    for name, operator in OPERATORS.items():
        kernel = operator.kernels.get(kind)
        if kernel is None or kind in operator.own or os.environ.get(UNWANTED.get(kernel.backend, ""), "") == "0":
            continue
        if isinstance(why := kernel.load(), str):
            found.setdefault(why, []).append(name)
    return found
