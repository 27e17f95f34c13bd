"""Renyi divergence of the sampled Gaussian: Opacus's own."""

from opacus.accountants.analysis.rdp import (
    compute_rdp,
    get_privacy_spent,
)

__all__ = [
    "compute_rdp",
    "get_privacy_spent",
]
