"""Privacy accountants: Opacus's, with an epsilon before the first step, without noise, and where PRV has none."""

from __future__ import annotations

from typing import Any

from opacus import accountants as theirs
from opacus.accountants import IAccountant, RDPAccountant, register_accountant
from opacus.accountants.utils import get_noise_multiplier as noise_multiplier_of_opacus

from ...accounting import epsilon_by

__path__: list[str] = []  # see aliases.py
__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "register_accountant",
]
MAX_SIGMA = 1e6


class _Accountant:
    """`get_epsilon` is 0 before the first step, inf after a step without noise, and RDP's bound, with a warning, where
    PRV has no answer (an epsilon of many hundreds). Raises AccountingError where GDP has none."""

    history: Any

    def get_epsilon(self, delta: float, *positional: Any, **options: Any) -> float:
        """Return epsilon at delta; with options of Opacus, its own answer."""
        if positional or options:
            return float(super().get_epsilon(delta, *positional, **options))  # type: ignore[misc]
        return epsilon_by(self.history, delta, self.mechanism())  # type: ignore[attr-defined]


class GaussianAccountant(_Accountant, theirs.GaussianAccountant):  # type: ignore[misc]
    """Opacus's accountant "gdp"."""


class PRVAccountant(_Accountant, theirs.PRVAccountant):  # type: ignore[misc]
    """Opacus's accountant "prv", with the same numbers wherever it has one."""


_OURS: dict[Any, Any] = {theirs.GaussianAccountant: GaussianAccountant, theirs.PRVAccountant: PRVAccountant}


def create_accountant(mechanism: str) -> IAccountant:
    """Make an accountant of that name ("prv", "rdp", "gdp" or a registered one). Raises ValueError on another."""
    found: Any = theirs.create_accountant(mechanism)
    ours = _OURS.get(type(found))
    return ours() if ours else found  # type: ignore[no-any-return]


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
    **kwargs: Any,
) -> float:
    """Return a noise multiplier whose epsilon lies in (target_epsilon - epsilon_tolerance, target_epsilon].

    Args: epochs, or steps; an epoch has 1 / sample_rate steps. One thing differs from Opacus: epochs / sample_rate that
    is whole but for rounding counts as whole. 3 epochs at rate 1/75 are 225 steps; Opacus takes 224, one less than its
    own loader makes. Raises ValueError unless exactly one of epochs and steps is given, or where no multiplier is large
    enough.
    """
    if epochs is not None and steps is None:
        steps, epochs = whole(epochs / sample_rate), None
    return float(
        noise_multiplier_of_opacus(
            target_epsilon=target_epsilon, target_delta=target_delta, sample_rate=sample_rate, epochs=epochs,
            steps=steps, accountant=accountant, epsilon_tolerance=epsilon_tolerance, **kwargs,
        )
    )  # fmt: skip


def whole(number: float) -> int:
    """Return the whole number below, or the nearest where only rounding error stands between."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-9 * max(number, 1.0) else int(number)
