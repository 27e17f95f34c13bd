"""The noise that a target epsilon needs, as Opacus searches it."""

from __future__ import annotations

from typing import Any

from .registry import create_accountant

MAX_SIGMA = 1e6


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
    """A noise multiplier whose epsilon lies in (target_epsilon - epsilon_tolerance, target_epsilon].

    Args: epochs, or steps; an epoch has 1 / sample_rate steps. kwargs go to the accountant's `get_epsilon`. The search
    visits the same multipliers as Opacus's and so returns the same number. One thing differs: epochs / sample_rate
    that is whole but for rounding counts as whole. 3 epochs at rate 1/75 are 225 steps; Opacus takes 224, one less
    than its own loader makes.

    Raises ValueError unless exactly one of epochs and steps is given, or where no multiplier is large enough.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("get_noise_multiplier takes either steps= or epochs=, one of them")
    if steps is None:
        assert epochs is not None
        steps = whole(epochs / sample_rate)
    found = create_accountant(accountant)

    def spent(sigma: float) -> float:
        found.history = [(sigma, sample_rate, steps)]
        return float(found.get_epsilon(delta=target_delta, **kwargs))

    low, high, epsilon = 0.0, 10.0, float("inf")
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
    """The whole number below, or the nearest where only rounding error stands between."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-9 * max(number, 1.0) else int(number)
