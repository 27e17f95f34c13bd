"""Composition by convolution: Opacus's own."""

from opacus.accountants.analysis.prv.compose import (
    compose_heterogeneous,
)

__all__ = [
    "compose_heterogeneous",
]
