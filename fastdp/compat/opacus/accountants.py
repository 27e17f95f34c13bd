"""Privacy accountants: Opacus's, with an epsilon before the first step, without noise, and where PRV has none."""

from __future__ import annotations

import math
import warnings
from typing import Any

from opacus import accountants as theirs
from opacus.accountants import IAccountant, RDPAccountant

from ...accounting import PRV_LIMIT, PRV_REACH
from ...errors import AccountingError

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


def _without_accountant(history: list[Any]) -> float | None:
    """epsilon of no steps (0) and of steps without noise (inf); None where an accountant is needed."""
    if not history:
        return 0.0
    return math.inf if any(noise_multiplier == 0 for noise_multiplier, _, _ in history) else None


class GaussianAccountant(theirs.GaussianAccountant):  # type: ignore[misc]
    """Opacus's accountant "gdp". `get_epsilon` is 0 before the first step and inf after a step without noise."""

    def get_epsilon(self, delta: float, poisson: bool = True, **kwargs: Any) -> float:
        """Return epsilon at delta. Raises AccountingError where the approximation has no answer."""
        if (known := _without_accountant(self.history)) is not None:
            return known
        try:
            return max(0.0, float(super().get_epsilon(delta, poisson, **kwargs)))
        except ValueError as problem:
            raise AccountingError(
                f'GDP accounting has no epsilon for {self.history} at delta {delta:g} ({problem}): use accountant="prv"'
            ) from None


class PRVAccountant(theirs.PRVAccountant):  # type: ignore[misc]
    """Opacus's accountant "prv", with the same numbers wherever it has one.

    Where Opacus raises (no steps yet, no noise, an epsilon of many hundreds), `get_epsilon` is 0, inf, or RDP's
    epsilon, which bounds it from above; a warning says so.
    """

    def get_epsilon(
        self, delta: float, *, eps_error: float = 0.01, delta_error: float | None = None, **kwargs: Any
    ) -> float:
        """Return an upper bound of epsilon at delta, within eps_error of the best wherever that is below 500."""
        if (known := _without_accountant(self.history)) is not None:
            return known
        renyi = RDPAccountant()
        renyi.history = list(self.history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the range of its orders
            bound = float(renyi.get_epsilon(delta))
        found = math.inf
        if bound <= PRV_REACH:
            try:
                found = float(super().get_epsilon(delta, eps_error=eps_error, delta_error=delta_error, **kwargs))
            except (RuntimeError, ValueError, OverflowError, MemoryError):
                pass
        if found < PRV_LIMIT:
            return max(0.0, found)
        warnings.warn("PRV accounting has no answer this large; epsilon is RDP's, which is larger", stacklevel=2)
        return bound


# ---------------------------------------------------------------------- by name: Opacus's own engine does not see these

_ACCOUNTANTS: dict[str, type[IAccountant]] = {"rdp": RDPAccountant, "gdp": GaussianAccountant, "prv": PRVAccountant}


def register_accountant(mechanism: str, accountant: type[IAccountant], force: bool = False) -> None:
    """Make an accountant known by a name. Raises ValueError if the name is taken and force is not set."""
    if mechanism in _ACCOUNTANTS and not force:
        raise ValueError(f"there is an accountant {mechanism!r} already: give force=True to replace it")
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str) -> IAccountant:
    """Make an accountant of that name ("prv", "rdp", "gdp" or a registered one). Raises ValueError on another."""
    if mechanism not in _ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(_ACCOUNTANTS)}, not {mechanism!r}")
    return _ACCOUNTANTS[mechanism]()


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

    Args: epochs, or steps; an epoch has 1 / sample_rate steps. kwargs go to the accountant's `get_epsilon`. The search
    visits the same multipliers as Opacus's, over the accountants of this module, and so returns the same number. One
    thing differs: epochs / sample_rate that is whole but for rounding counts as whole. 3 epochs at rate 1/75 are 225
    steps; Opacus takes 224, one less than its own loader makes.

    Raises ValueError unless exactly one of epochs and steps is given, or where no multiplier is large enough.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("get_noise_multiplier takes either steps= or epochs=, one of them")
    count = whole(epochs / sample_rate) if epochs is not None else steps
    found = create_accountant(accountant)

    def spent(sigma: float) -> float:
        found.history = [(sigma, sample_rate, count)]
        return float(found.get_epsilon(delta=target_delta, **kwargs))

    low, high, epsilon = 0.0, 10.0, math.inf
    while epsilon > target_epsilon:
        high *= 2
        epsilon = spent(high)
        if high > MAX_SIGMA:
            raise ValueError(
                f"no noise multiplier below {MAX_SIGMA:g} reaches epsilon {target_epsilon}: too low a budget"
            )
    while target_epsilon - epsilon > epsilon_tolerance:
        middle = (low + high) / 2
        now = spent(middle)
        if now < target_epsilon:
            high, epsilon = middle, now
        else:
            low = middle
    return high


def whole(number: float) -> int:
    """Return the whole number below, or the nearest where only rounding error stands between."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-9 * max(number, 1.0) else int(number)
