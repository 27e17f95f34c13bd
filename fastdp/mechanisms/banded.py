"""Banded encoders (BandMF): a record's contributions to steps that are far apart do not meet in what C encodes.

If bands are no more than the steps between two in which a record takes part, a record has the sensitivity of columns
that are orthogonal, and sampling amplifies as in DP-SGD. The inverse of a banded C has long rows. They are cut to a few
terms here, as past normals are drawn again: what is run has the encoder C + E, of which all that is said of a run's
privacy is computed, and E is small. So coefficients are looked for whose inverse falls off within these terms.

Source: Choquette-Choo et al. 2023 (arXiv 2306.08153); Toeplitz coefficients, McKenna 2024 (arXiv 2405.15913).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..accounting.participation import Participation
from ..distributed.fingerprints import mark
from .encoders import Toeplitz, whole
from .strategies import Strategy

MOST_DRAWS = 64
TAIL = 2.0**-17  # what is cut off the inverse sums to less
_FAR = 4096  # terms of an inverse, of which the last are nothing


class Banded(Toeplitz, Strategy):
    """A Toeplitz encoder with few bands, whose inverse is cut to at most 64 terms.

    Args:
        bands: the number of bands, the diagonal among them: for cyclic Poisson sampling no more than a cycle's steps.
        steps: of the run for which coefficients are chosen, so that the mean squared noise of the sums over its first
            1, ..., `steps` steps is small at the same privacy.
        participation: when a record takes part in them; None: in steps that are at least `bands` apart.
        draws: the most normals that a step may draw, up to 64. With fewer, noise is larger.
        coefficients: of C, from the diagonal on, instead of `steps`: they are divided by the first.

    Attributes:
        designed: the coefficients of C, before the inverse was cut.

    Raises:
        ValueError: if an argument is out of range, or what is cut off the inverse does not sum to less than 2^-17.
    """

    def __init__(
        self,
        bands: int,
        *,
        steps: int | None = None,
        participation: Participation | None = None,
        draws: int = MOST_DRAWS,
        coefficients: Sequence[float] | None = None,
    ) -> None:
        bands, draws = whole("bands", bands), whole("draws", draws)
        if draws > MOST_DRAWS:
            raise ValueError(f"draws must be at most {MOST_DRAWS}, not {draws}: a step's time grows with them")
        if (steps is None) == (coefficients is None):
            raise ValueError("give either steps=, for which coefficients are chosen, or coefficients=")
        if coefficients is None:
            steps = whole("steps", steps)
            found = best_coefficients(min(bands, steps), steps, participation, draws)
            found = np.round(found, 9)  # the same on machines whose last digits differ
        else:
            found = np.asarray(coefficients, dtype=np.float64)
            if found.shape != (bands,) or not np.isfinite(found).all() or not found[0]:
                raise ValueError(f"coefficients must be {bands} finite numbers of which the first is not 0")
            found = found / found[0]
        rest = _rest(found)
        few = np.flatnonzero(rest < TAIL)
        if not len(few) or few[0] > draws:
            raise ValueError(
                f"of the inverse of these coefficients, terms beyond {draws} sum to {rest[draws]:.2g}, and at most "
                f"{TAIL:.2g} may be cut off: take smaller coefficients or fewer bands, or give steps= for some that fit"
            )
        self.bands: int = bands
        found.flags.writeable = False
        self.designed = found
        super().__init__(_inverse(found, max(1, int(few[0]))))

    def tail(self, steps: int) -> float:
        """Return a bound of the operator norm of E, what C has beyond its bands, in a run of so many steps."""
        return float(np.abs(self.coefficients(steps)[self.bands :]).sum())

    def expression(self, steps: int) -> str:
        found = np.pad(self.designed, (0, self.bands - len(self.designed)))  # fewer steps than bands were planned
        return f"Banded({self.bands}, coefficients={found.tolist()})"

    @property
    def mark(self) -> str:
        return f"{self!r} {mark(self.weights.tobytes())}"

    def __repr__(self) -> str:
        return f"<Banded: {self.bands} bands, {self.draws} draws>"


def best_coefficients(
    bands: int, steps: int, participation: Participation | None = None, draws: int | None = None
) -> np.ndarray:
    """Return coefficients of a banded C with little noise in the sums of a run, at the same privacy.

    The square of the sensitivity times the mean squared noise is minimized by L-BFGS. The coefficients for more bands
    are looked for from those for half as many.

    Args:
        bands: the number of coefficients, the first of which is 1.
        steps: of the run.
        participation: as of `Banded`.
        draws: the terms to which the inverse is cut, which have to be enough. None: the inverse is not cut.
    """
    from scipy.optimize import minimize

    if bands == 1:
        return np.ones(1)
    start = np.zeros(bands)
    start[: -(-bands // 2)] = best_coefficients(-(-bands // 2), steps, participation, draws)
    period = steps if participation is None else participation.separation
    lag = np.subtract.outer(np.arange(steps), np.arange(bands))
    encoded = ((lag >= 0) & (lag % period == 0)).astype(np.float64)  # C u = encoded @ c, for u of a step in each cycle
    spread = encoded.T @ encoded
    for weight in (0.0,) if draws is None else (1e-4, 1e-2, 1.0):
        found = minimize(
            _loss, start[1:], (steps, spread, draws, weight), "L-BFGS-B", jac=True, options={"maxiter": 500}
        )
        start = np.concatenate([[1.0], found.x])
    while draws is not None and _rest(start)[draws] >= TAIL / 2:
        start = start * 0.995 ** np.arange(bands)  # so terms of the inverse are multiplied, too
    return start


def _loss(
    free: np.ndarray, steps: int, spread: np.ndarray, draws: int | None, weight: float
) -> tuple[float, np.ndarray]:
    """The logarithm of squared error times squared sensitivity, and its gradient; a penalty for a long inverse.

    By the coefficient c_k, the inverse D = 1 / c changes by -x^k D^2, and B = D / (1 - x), of sums, by -x^k B D.
    """
    from scipy.signal import lfilter

    c = np.concatenate([[1.0], free])
    places = range(len(c))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        inverse = _inverse(c, max(steps, 4 * MOST_DRAWS))
        sums = inverse[:steps].cumsum()
        often = np.arange(steps, 0, -1) / steps  # coefficient t is in the noise of so many of the sums
        error, spreads = often @ sums**2, c @ spread @ c
        value = np.log(error) + np.log(spreads)
        moved = lfilter([1.0], c, sums)
        slope = 2 * spread @ c / spreads
        slope -= 2 * np.array([(often[k:] * sums[k:]) @ moved[: steps - k] for k in places]) / error
        if draws is not None:
            moved = lfilter([1.0], c, inverse)
            energy = inverse[draws:] @ inverse[draws:] + 1e-300
            excess = max(0.0, np.log(energy) - 2 * np.log(TAIL / 8))
            value += weight * excess**2
            steep = np.array([inverse[max(draws, k) :] @ moved[max(draws - k, 0) : len(inverse) - k] for k in places])
            slope -= 4 * weight * excess / energy * steep
    if not np.isfinite(value) or not np.isfinite(slope).all():
        return 1e9, np.zeros(len(free))  # the inverse grows without bound: not there
    return float(value), slope[1:]


def _inverse(c: np.ndarray, terms: int) -> np.ndarray:
    from scipy.signal import lfilter

    return lfilter([1.0], c, np.eye(1, terms)[0])


def _rest(c: np.ndarray) -> np.ndarray:
    """What terms of the inverse sum to, in absolute value, from each of the first 65 on; infinite if without bound."""
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.abs(_inverse(c, _FAR))
        if not terms[-len(c) :].max() < 1e-12:
            return np.full(MOST_DRAWS + 1, np.inf)
        return terms[::-1].cumsum()[::-1][: MOST_DRAWS + 1]
