"""fastdp: exact differentially private training of PyTorch models at close to the cost of ordinary training.

>>> import fastdp
>>> fastdp.noise_multiplier_for(target_epsilon=3.0, delta=1e-5, sample_rate=0.01, steps=1000) < 1.5
True
"""

from . import errors, ops
from .accounting import noise_multiplier_for
from .compatible import CompatibilityReport, make_compatible
from .engine import PerSampleGradients
from .marks import mark_rows
from .optim import DPSGD, DPAdam, DPAdamW, DPRMSprop, PrivateOptimizer, privatize
from .rules import RuleCall, register_rule
from .sampling import poisson_loader
from .verify import VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "CompatibilityReport",
    "DPAdam",
    "DPAdamW",
    "DPRMSprop",
    "DPSGD",
    "PerSampleGradients",
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
