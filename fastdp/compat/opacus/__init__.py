"""Opacus 1.6.0's names on fastdp's engine: a script moves by `from fastdp.compat.opacus import PrivacyEngine`.

Modules have Opacus's paths; signatures, defaults, warnings and errors are Opacus's. If results differ, those of Opacus
were wrong: docs/opacus.md says where.
"""

from opacus.version import __version__

from . import aliases, utils
from .grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from .privacy_engine import PrivacyEngine

__all__ = [
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "PrivacyEngine",
    "__version__",
    "utils",
]

aliases.install()
