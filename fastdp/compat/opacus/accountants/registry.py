"""Accountants by name. A registry of its own: what is registered here, Opacus's own engine does not see."""

from __future__ import annotations

from .accountant import IAccountant
from .gdp import GaussianAccountant
from .prv import PRVAccountant
from .rdp import RDPAccountant

_ACCOUNTANTS: dict[str, type[IAccountant]] = {"rdp": RDPAccountant, "gdp": GaussianAccountant, "prv": PRVAccountant}


def register_accountant(mechanism: str, accountant: type[IAccountant], force: bool = False) -> None:
    """Make an accountant known by a name; raises ValueError if the name is taken and force is not set."""
    if mechanism in _ACCOUNTANTS and not force:
        raise ValueError(f"there is an accountant {mechanism!r} already: give force=True to replace it")
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str) -> IAccountant:
    """A new accountant of that name ("prv", "rdp", "gdp" or a registered one); raises ValueError on another."""
    if mechanism not in _ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(_ACCOUNTANTS)}, not {mechanism!r}")
    return _ACCOUNTANTS[mechanism]()
