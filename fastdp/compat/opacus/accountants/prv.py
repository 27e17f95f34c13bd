"""Accounting by privacy loss random variables: Opacus's, with an answer where its grid of numbers ends."""

from __future__ import annotations

import math
import warnings
from typing import Any

from opacus.accountants import prv as theirs

from ....accounting import PRV_LIMIT, PRV_REACH
from .rdp import RDPAccountant


class PRVAccountant(theirs.PRVAccountant):  # type: ignore[misc]
    """Opacus's accountant "prv", with the same numbers wherever it has one.

    Where Opacus raises (no steps yet, no noise, an epsilon of many hundreds), `get_epsilon` is 0, inf, or RDP's
    epsilon, which bounds it from above; a warning says so.
    """

    def get_epsilon(
        self, delta: float, *, eps_error: float = 0.01, delta_error: float | None = None, **kwargs: Any
    ) -> float:
        """An upper bound of epsilon at delta, within eps_error of the best wherever that is below 500."""
        if not self.history:
            return 0.0
        if any(noise_multiplier == 0 for noise_multiplier, _, _ in self.history):
            return math.inf
        bound = self._renyi(delta)
        if bound > PRV_REACH:
            return self._instead(bound)
        try:
            found = max(0.0, float(super().get_epsilon(delta, eps_error=eps_error, delta_error=delta_error, **kwargs)))
        except (RuntimeError, ValueError, OverflowError, MemoryError):
            return self._instead(bound)
        return found if found < PRV_LIMIT else self._instead(bound)

    def _renyi(self, delta: float) -> float:
        accountant = RDPAccountant()
        accountant.history = list(self.history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the range of its orders
            return float(accountant.get_epsilon(delta))

    def _instead(self, bound: float) -> float:
        warnings.warn("PRV accounting has no answer this large; epsilon is RDP's, which is larger", stacklevel=3)
        return bound
