"""The random variables: Opacus's own."""

from opacus.accountants.analysis.prv.prvs import (
    SQRT2,
    DiscretePRV,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    discretize,
    erfc,
)

__all__ = [
    "DiscretePRV",
    "PoissonSubsampledGaussianPRV",
    "SQRT2",
    "TruncatedPrivacyRandomVariable",
    "discretize",
    "erfc",
]
