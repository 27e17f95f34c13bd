"""Renyi accounting: Opacus's own."""

from opacus.accountants.rdp import RDPAccountant

__all__ = ["RDPAccountant"]
