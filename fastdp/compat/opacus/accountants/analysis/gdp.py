"""Central limit formulas: Opacus's own."""

from opacus.accountants.analysis.gdp import (
    compute_eps_poisson,
    compute_eps_uniform,
    compute_mu_poisson,
    compute_mu_uniform,
    delta_eps_mu,
    eps_from_mu,
)

__all__ = [
    "compute_eps_poisson",
    "compute_eps_uniform",
    "compute_mu_poisson",
    "compute_mu_uniform",
    "delta_eps_mu",
    "eps_from_mu",
]
