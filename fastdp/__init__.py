"""fastdp: exact differentially private training of PyTorch models at close to the cost of ordinary training.

>>> import fastdp
>>> fastdp.noise_multiplier_for(target_epsilon=3.0, delta=1e-5, sample_rate=0.01, steps=1000) < 1.5
True
"""

from . import errors, ops
from .accounting import noise_multiplier_for
from .arguments import mark_rows
from .engine import PerSampleGradients
from .optim import DPSGD, DPAdam, DPAdamW, DPRMSprop, PrivateOptimizer, privatize
from .sampling import poisson_loader
from .verify import VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "DPAdam",
    "DPAdamW",
    "DPRMSprop",
    "DPSGD",
    "PerSampleGradients",
    "PrivateOptimizer",
    "VerifyReport",
    "errors",
    "mark_rows",
    "noise_multiplier_for",
    "ops",
    "poisson_loader",
    "privatize",
    "verify",
]
