"""The grid: Opacus's own."""

from opacus.accountants.analysis.prv.domain import (
    Domain,
    compute_safe_domain_size,
)

__all__ = [
    "Domain",
    "compute_safe_domain_size",
]
