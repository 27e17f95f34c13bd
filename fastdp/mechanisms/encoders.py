"""What accounting must know of a strategy of correlated noise: its matrix D, and the encoder C = D^-1."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np

Row = tuple[float, list[tuple[int, float]]]


class Encoder:
    """How the noise of steps is correlated. Steps are counted from 0 within a block of noise.

    Attributes:
        bands: the number of bands of the encoder, the diagonal among them, if it has few by design; else None.
        tree: whether the noise is that of a Fenwick tree.
    """

    bands: int | None = None
    tree = False

    @property
    def known_steps(self) -> int:
        """So many steps show what C is like."""
        return 2

    def noise_row(self, step: int) -> Row:
        """Return the weight of the step's own normal, and (lag, weight) of each earlier one whose weight is not 0."""
        raise NotImplementedError

    def rows(self, steps: int) -> np.ndarray:
        """Return D of so many steps, as an array [steps, steps]."""
        found = np.zeros((steps, steps))
        for step in range(steps):
            found[step, step], earlier = self.noise_row(step)
            for lag, weight in earlier:
                found[step, step - lag] = weight
        return found

    def encoder(self, steps: int) -> np.ndarray:
        """Return C of so many steps, the inverse of D, as an array [steps, steps]."""
        from scipy.linalg import solve_triangular

        return solve_triangular(self.rows(steps), np.eye(steps), lower=True)

    @property
    def mark(self) -> str:
        """A name of the strategy and its settings: runs with the same one add the same noise to the same normals.

        One of another package is like no other.
        """
        return repr(self) if type(self).__module__.startswith("fastdp.") else f"{self!r} {id(self)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Encoder) and self.mark == other.mark

    def __hash__(self) -> int:
        return hash(self.mark)


class Toeplitz(Encoder):
    """A strategy whose rows of D are the same at all steps: its subclasses say which.

    Attributes:
        weights: of the step's own normal, the one of the step before, and so on.
    """

    def __init__(self, weights: Any) -> None:
        self.weights = np.array(weights, dtype=np.float64)
        self.weights.flags.writeable = False  # what is accounted for is what was made
        self._known = np.zeros(0)

    @property
    def known_steps(self) -> int:
        return 2 * len(self.weights)

    @property
    def draws(self) -> int:
        """The normals that a step draws."""
        return int(np.count_nonzero(self.weights))

    def noise_row(self, step: int) -> Row:
        earlier = enumerate(self.weights[1 : step + 1].tolist(), 1)
        return float(self.weights[0]), [(lag, weight) for lag, weight in earlier if weight]

    def coefficients(self, steps: int) -> np.ndarray:
        """Return the first column of C, of which all others are shifts: the inverse of D's as a power series."""
        if len(self._known) < steps:
            from scipy.signal import lfilter

            impulse = np.zeros(max(steps, 2 * len(self._known)))  # asked again after each step
            impulse[0] = 1.0
            self._known = lfilter([1.0], self.weights, impulse)
            self._known.flags.writeable = False
        return self._known[:steps]

    def encoder(self, steps: int) -> np.ndarray:
        from scipy.linalg import toeplitz

        return toeplitz(self.coefficients(steps), np.zeros(steps))


def number_in(name: str, value: Any, low: float, high: float) -> float:
    """Raises ValueError unless the option is a number in [low, high)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) < high:
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}), not {value!r}")
    return float(value)


def whole(name: str, value: Any) -> int:
    """Raises ValueError unless the option is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return int(value)
