"""fastdp: exact differentially private training of PyTorch models at close to the cost of ordinary training.

>>> import fastdp
>>> fastdp.noise_multiplier_for(target_epsilon=3.0, delta=1e-5, sample_rate=0.01, steps=1000) < 1.5
True
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import errors, ops
from .accounting import noise_multiplier_for
from .batch_axis.inputs import mark_rows
from .engine.per_sample import PerSampleGradients
from .grad_sample.custom_rules import RuleCall, register_rule
from .optim.optimizers import DPSGD, DPAdam, DPAdamW, DPRMSprop, PrivateOptimizer
from .optim.privatize import privatize
from .sampling import poisson_loader
from .verification.compatible import CompatibilityReport, make_compatible
from .verification.verify import VerifyReport, verify

if TYPE_CHECKING:
    from .compat.opacus import PrivacyEngine

__version__ = "0.1.0"

__all__ = [
    "CompatibilityReport",
    "DPAdam",
    "DPAdamW",
    "DPRMSprop",
    "DPSGD",
    "PerSampleGradients",
    "PrivacyEngine",
    "PrivateOptimizer",
    "RuleCall",
    "VerifyReport",
    "errors",
    "make_compatible",
    "mark_rows",
    "noise_multiplier_for",
    "ops",
    "poisson_loader",
    "privatize",
    "register_rule",
    "verify",
]


# public modules that are imported when they are asked for
_MODULES = frozenset(
    "audit calibration compat diagnostics hf kernels lightning losses mechanisms ntk schedule tracking".split()
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fastdp.{name}")
    if name == "PrivacyEngine":  # of fastdp.compat.opacus, which takes Opacus's accountants: imported when asked for
        from .compat.opacus import PrivacyEngine

        return PrivacyEngine
    raise AttributeError(f"module 'fastdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
