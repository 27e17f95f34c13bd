"""Gaussian (central limit) accounting: Opacus's, which had no answer before the first step and for huge epsilon."""

from __future__ import annotations

import math
from typing import Any

from opacus.accountants import gdp as theirs


class GaussianAccountant(theirs.GaussianAccountant):  # type: ignore[misc]
    """Opacus's accountant "gdp"; `step` still wants one noise multiplier and one sample rate throughout.

    `get_epsilon` is 0 before the first step and inf after a step without noise, where Opacus raises.
    """

    def get_epsilon(self, delta: float, poisson: bool = True, **kwargs: Any) -> float:
        """epsilon at delta. Raises AccountingError where the approximation has no answer."""
        from ....errors import AccountingError

        if not self.history:
            return 0.0
        if any(noise_multiplier == 0 for noise_multiplier, _, _ in self.history):
            return math.inf
        try:
            return max(0.0, float(super().get_epsilon(delta, poisson, **kwargs)))
        except ValueError as problem:
            raise AccountingError(
                f'GDP accounting has no epsilon for {self.history} at delta {delta:g} ({problem}): use accountant="prv"'
            ) from None
