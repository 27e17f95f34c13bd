"""What every accountant offers: Opacus's own base class, which knows nothing of its engine."""

from opacus.accountants.accountant import IAccountant, T_state_dict

__all__ = ["IAccountant", "T_state_dict"]
