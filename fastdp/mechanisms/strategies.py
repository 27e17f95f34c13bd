"""Noise that is correlated from step to step, so that later noise cancels earlier noise: matrix mechanisms.

At step t the optimizer releases g_t + s (D z)_t: g_t is the sum of clipped gradients, s the noise multiplier times the
clipping norm, and z are independent standard normals. D is lower triangular, so a step needs no later normals. What is
released is a function of C g + s z with the encoder C = D^-1. This is one Gaussian mechanism, whose sensitivity
(`sensitivity`) is that of C. The noise of a sum over all steps so far has the coefficients A D, A being lower
triangular with ones: they are small where rows of D are differences.

Past normals are not kept, but drawn again, so a strategy here is one whose D has short rows. `Strategy.noise_row` tells
them. `Banded`, whose encoder has few bands, has a D with long rows: it cuts them, and its encoder is the one of what
is left, which is really run.

Source: Denisov et al. 2022 (arXiv 2202.08312); Lambda, Kalinin, McKenna, Pagh and Lampert 2026 (arXiv 2601.22334);
Bisr, Kalinin, McKenna, Upadhyay and Lampert 2025 (arXiv 2505.12128); trees, Dwork et al. 2010 and Chan et al. 2011.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..accounting.participation import Block, Participation
from ..distributed.fingerprints import mark
from ..errors import StepError
from ..ops.checks import MOST_WEIGHT
from .correlated_card import facts
from .correlated_privacy import check, epsilon_of_blocks, noise_multiplier_for_strategy
from .encoders import Encoder, Row, Toeplitz, number_in, whole


class Strategy(Encoder):
    """How the noise of steps is correlated: what `noise=` of the optimizers takes."""

    def check(self, participation: Participation) -> None:
        """Raises AccountingError if batches of this kind cannot be accounted for with this strategy."""
        check(self, participation)

    def epsilon(self, blocks: Iterable[Block], delta: float, accountant: str = "prv") -> float:
        """As `epsilon_of_blocks`."""
        return epsilon_of_blocks(self, blocks, delta, accountant)

    def expression(self, steps: int) -> str:
        """Return a Python expression of a strategy, by names of this package, that accounts for so many steps alike."""
        return repr(self) if type(self) in _SAID else f"Matrix({self.rows(steps).tolist()})"

    def facts(self, blocks: Iterable[Block], epsilon: float, delta: float, accountant: str) -> dict[str, Any]:
        """Return what a privacy card tells of blocks whose epsilon at delta this is."""
        found = list(blocks)
        steps = max((block.steps for block in found), default=1)
        return facts(self, self.expression(steps), found, epsilon, delta, accountant)

    def noise_multiplier(self, **options: Any) -> float:
        """As `noise_multiplier_for_strategy`."""
        return noise_multiplier_for_strategy(self, **options)


class Independent(Toeplitz, Strategy):
    """Noise that is independent from step to step, as DP-SGD's."""

    bands = 1

    def __init__(self) -> None:
        super().__init__([1.0])

    def __repr__(self) -> str:
        return "Independent()"


class Lambda(Toeplitz, Strategy):
    """Each step takes a part of the last step's noise back: D has the rows (1, -weight).

    Args:
        weight: in [0, 1): lambda. Near 1, sums of many steps have little noise, and a record's gradient needs much.

    Raises:
        ValueError: if it is outside.
    """

    def __init__(self, weight: float) -> None:
        self.weight = number_in("weight", weight, 0, 1)
        super().__init__([1.0, -self.weight])

    def __repr__(self) -> str:
        return f"Lambda(weight={self.weight!r})"


class Bisr(Toeplitz, Strategy):
    """The banded inverse square root: D has the first coefficients of the square root of the inverse of a workload.

    The workload is what optimizers sum up: prefix sums, 1 / (1 - x); with momentum and weight decay,
    1 / ((1 - a x) (1 - b x)) for a = 1 - weight_decay and b = momentum.

    Args:
        bands: the number of coefficients, and so of normals that a step draws, at least 1. (The encoder is not banded.)
        momentum: of the optimizer, in [0, 1).
        weight_decay: the part of the weights that a step takes away (learning rate times weight decay), in [0, 1).

    Raises:
        ValueError: if one is out of range.
    """

    def __init__(self, bands: int, *, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        bands = whole("bands", bands)
        momentum, weight_decay = number_in("momentum", momentum, 0, 1), number_in("weight_decay", weight_decay, 0, 1)
        self.settings = (bands, momentum, weight_decay)
        root = square_root(bands)
        powers = np.arange(bands)
        super().__init__(np.convolve(root * (1 - weight_decay) ** powers, root * momentum**powers)[:bands])

    def __repr__(self) -> str:
        bands, momentum, weight_decay = self.settings
        more = f", momentum={momentum!r}, weight_decay={weight_decay!r}" if momentum or weight_decay else ""
        return f"Bisr(bands={bands}{more})"


class TreeAggregation(Strategy):
    """A binary tree of noise, as a Fenwick tree: the sum of t steps has the noise of so many nodes as t has digits 1.

    The node that ends at step t (from 1) covers as many steps as the lowest digit of t that is 1 says, and has the
    normal of t. This is DPFTRL's tree without variance reduction.
    """

    tree = True

    def noise_row(self, step: int) -> Row:
        number, end = step + 1, step
        earlier = []
        while end > number - (number & -number):
            earlier.append((number - end, -1.0))
            end -= end & -end
        return 1.0, earlier

    def encoder(self, steps: int) -> np.ndarray:
        number, place = np.arange(1, steps + 1)[:, None], np.arange(1, steps + 1)[None]
        return ((number - (number & -number) < place) & (place <= number)).astype(np.float64)

    def __repr__(self) -> str:
        return "TreeAggregation()"


class Matrix(Strategy):
    """A strategy that is given as a matrix.

    Args:
        rows: D, a lower-triangular array [steps, steps] without a zero on its diagonal.
        encoder: C = D^-1 instead.

    Raises:
        ValueError: if the array is no such matrix, or both or none are given.

    Asked for more steps than it has, it raises StepError.
    """

    def __init__(self, rows: Any = None, *, encoder: Any = None) -> None:
        if (rows is None) == (encoder is None):
            raise ValueError("give either rows= (D) or encoder= (C)")
        name, given = ("rows", rows) if encoder is None else ("encoder", encoder)
        try:
            array = np.array(given)
            array = array if np.iscomplexobj(array) else array.astype(np.float64)
        except (TypeError, ValueError, RuntimeError) as problem:  # of a sparse tensor, one that requires grad, words
            raise ValueError(f"{name} must be an array of numbers: {problem}") from None
        if np.iscomplexobj(array):
            raise ValueError(f"{name} must be real")
        if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
            raise ValueError(f"{name} must be a square matrix, not of shape {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite: it has entries that are infinite or not a number")
        if np.triu(array, 1).any():
            raise ValueError(f"{name} must be lower triangular: a step's noise cannot depend on later steps")
        if not np.diagonal(array).all():
            raise ValueError(f"{name} must have no 0 on its diagonal: that step would have no noise of its own")
        from scipy.linalg import solve_triangular

        signs = np.sign(np.diagonal(array))  # normals are symmetric: each may as well enter its own step as it is
        array = array * (signs if encoder is None else signs[:, None])
        other = np.tril(solve_triangular(array, np.eye(len(array)), lower=True))
        pair: tuple[np.ndarray, np.ndarray] = (array, other) if encoder is None else (other, array)
        self._rows, self._encoder = pair
        if not np.isfinite(other).all():
            raise ValueError(f"{name} has no finite inverse")
        own = np.diagonal(self._rows)
        if own.min() < 2.0**-30 or own.max() > 2.0**30:
            raise ValueError(f"{name}: the noise of steps is {own.min():.3g} to {own.max():.3g}, beyond 2^-30 .. 2^30")
        for matrix in (self._rows, self._encoder):
            matrix.flags.writeable = False  # what is accounted for is what was made
        if (worst := (np.abs(self._rows).sum(axis=1) / own - 1).max()) > MOST_WEIGHT:
            raise ValueError(
                f"{name}: a step's weights of earlier normals add up to {worst:.3g} times that of its own, of which "
                f"{MOST_WEIGHT:g} is the most"
            )

    @functools.cached_property
    def bands(self) -> int:  # type: ignore[override]
        """The bands of C that are not zero, but for rounding."""
        present = np.abs(self._encoder) > 1e-14 * np.abs(self._encoder).max()
        return int(max(row - column for row, column in zip(*np.nonzero(present), strict=True))) + 1

    @property
    def known_steps(self) -> int:
        return len(self._rows)

    def noise_row(self, step: int) -> Row:
        self._reach(step + 1)
        row = self._rows[step, :step][::-1]
        return float(self._rows[step, step]), [(int(lag) + 1, float(row[lag])) for lag in np.flatnonzero(row)]

    def encoder(self, steps: int) -> np.ndarray:
        self._reach(steps)
        return self._encoder[:steps, :steps]

    def _reach(self, steps: int) -> None:
        if steps > len(self._rows):
            raise StepError(
                f"the noise is a matrix of {len(self._rows)} steps, and the run has more: give a larger matrix, or a "
                "strategy for any number of steps (Lambda, Bisr)"
            )

    @functools.cached_property
    def mark(self) -> str:  # type: ignore[override]
        return f"Matrix {mark(self._rows.tobytes())}"

    def __repr__(self) -> str:
        return f"<Matrix of {len(self._rows)} steps>"


_SAID = (Independent, Lambda, Bisr, TreeAggregation)  # whose repr is an expression


def square_root(terms: int) -> np.ndarray:
    """Return the first coefficients of (1 - x)^(1/2).

    >>> square_root(4).tolist()
    [1.0, -0.5, -0.125, -0.0625]
    """
    place = np.arange(1, terms)
    return np.concatenate([[1.0], np.cumprod((place - 1.5) / place)])
