"""Which noise to take for a run: the error of each mechanism at the same privacy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..accounting.participation import Participation
from .banded import Banded
from .correlated_privacy import amplified, noise_multiplier_for_strategy
from .encoders import Toeplitz, number_in, whole
from .sensitivity import sensitivity
from .strategies import Bisr, Independent, Lambda, Strategy, TreeAggregation

_BANDS = (2, 4, 8, 16, 32)


class Row(NamedTuple):
    """A mechanism in a comparison.

    Attributes:
        strategy: how its noise is correlated.
        participation: how records take part.
        sensitivity: of a run; with cyclic Poisson sampling, of one cycle.
        noise_multiplier: for the epsilon of the comparison.
        error: the root mean square, over the steps of the run, of the noise of the sum of all gradients so far, for
            each coordinate, in units of the clipping norm.
        draws: the normals that a step draws, on average.
    """

    strategy: Strategy
    participation: Participation
    sensitivity: float
    noise_multiplier: float
    error: float
    draws: float

    @property
    def records(self) -> str:
        """In words, how records take part."""
        kind, period, separation, rate, _ = self.participation
        if kind == "cyclic Poisson":
            return f"Poisson at {rate:.3g}" + f", cycles of {period}" * (period > 1)
        return f"{kind}, cycles of {period}" + f", {separation} apart" * (separation != period)


class Comparison(NamedTuple):
    """What `compare` found.

    Attributes:
        steps: of the run.
        epsilon: of all mechanisms.
        delta: of all mechanisms.
        rows: the mechanisms, from the smallest error on.
        momentum: of the sums.
    """

    steps: int
    epsilon: float
    delta: float
    rows: tuple[Row, ...]
    momentum: float = 0.0

    @property
    def best(self) -> Row:
        """The mechanism with the smallest error."""
        return self.rows[0]

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("noise", "records", "draws", "sensitivity", "noise multiplier", "error")]
        for row in self.rows:
            numbers = (f"{row.draws:.3g}", *(f"{n:.4g}" for n in (row.sensitivity, row.noise_multiplier, row.error)))
            lines.append((repr(row.strategy), row.records, *numbers))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(
                [*map(str.ljust, line[:2], widths[:2]), *map(str.rjust, line[2:], widths[2:])],
            )
            for line in lines
        ]
        return "\n".join(
            [
                f"{self.steps} steps, epsilon {self.epsilon:g} at delta {self.delta:g}; error: the noise of sums of "
                "gradients, in clipping norms" + f", by momentum {self.momentum:g}" * bool(self.momentum),
                *table,
                f"Take {self.best.strategy!r}, {self.best.records}: it has the smallest error.",
            ]
        )

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw each mechanism's error by step, by matplotlib (of the extra `demo`), as a PNG at `path` if there is one.

        Returns:
            The matplotlib Figure, which notebooks show; None, with a warning, if there is no matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            warnings.warn(f"no matplotlib (pip install matplotlib): no diagram is drawn at {path}", stacklevel=2)
            return None
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for row in self.rows:
            noise = row.noise_multiplier * prefix_noise(row.strategy, self.steps, self.momentum)
            axes.plot(np.arange(1, self.steps + 1), noise, label=f"{row.strategy!r}, {row.records}")
        axes.set(xlabel="step", ylabel="noise of the sum so far (clipping norms)", yscale="log")
        axes.set_title(f"epsilon {self.epsilon:g} at delta {self.delta:g}", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def compare(
    *,
    steps: int,
    epochs: int | None = None,
    participation: Participation | None = None,
    target_epsilon: float,
    delta: float,
    momentum: float = 0.0,
    sampled: bool = True,
    strategies: Sequence[Strategy] | None = None,
    accountant: str = "prv",
) -> Comparison:
    """Compare mechanisms at the same epsilon, and say which one to take.

    The error is that of sums of gradients, which is what SGD adds to the weights. There are mechanisms for the
    participation that is given, and such as need a loader that samples, with the same expected batch size: independent
    noise with Poisson sampling (DP-SGD), and the best of Banded with as many steps in a cycle as bands.

    Args:
        steps: of the run.
        epochs: passes over the data in a fixed order: cycles of steps / epochs steps.
        participation: how records take part, instead of `epochs`.
        target_epsilon: of the run.
        delta: in (0, 1).
        momentum: of SGD, in [0, 1). The sums are then of gradients averaged by it.
        sampled: whether there are mechanisms that need a loader which samples, beside those that are asked for.
        strategies: to compare with DP-SGD. None: independent noise, a tree, and Lambda, Bisr and Banded with the
            settings that are best for the run, of those that fit the participation.
        accountant: as of `epsilon_of_blocks`. With balls in bins, it takes minutes.

    Raises:
        AccountingError: if a strategy that is given does not fit the participation, or an argument is invalid.
        TypeError: if the participation or a strategy is none.
        ValueError: if steps or epochs is out of range, or both or none of epochs and participation are given.
    """
    steps, participation = whole("steps", steps), _participation_of(participation)
    if wrong := [each for each in _listed(strategies) if not isinstance(each, Strategy)]:
        raise TypeError(f"strategies= takes a list of strategies of fastdp.mechanisms, and {wrong[0]!r} is none")
    if (epochs is None) == (participation is None):
        raise ValueError("give either epochs= or participation=")
    if participation is None:
        epochs = whole("epochs", epochs)
        if epochs > steps:
            raise ValueError(f"{epochs} epochs of {steps} steps in all: an epoch has a step at least")
        period = -(-steps // epochs)
        participation = Participation("fixed order", period, period)

    number_in("momentum", momentum, 0, 1)

    def row(strategy: Strategy, part: Participation) -> Row:
        sigma = noise_multiplier_for_strategy(
            strategy, target_epsilon=target_epsilon, delta=delta, steps=steps, participation=part, accountant=accountant
        )
        sampled = part.kind == "cyclic Poisson"
        moved = amplified(strategy, steps, part.period)[0] if sampled else sensitivity(strategy, steps, part, 0)
        draws = _draws(strategy, steps)
        return Row(strategy, part, moved, sigma, sigma * _error(strategy, steps, momentum), draws)

    rate = participation.rate / participation.period  # of a record, in each step
    rows = [row(Independent(), Participation("cyclic Poisson", 1, 1, rate))] if sampled else []
    if strategies is None:
        bands = [number for number in _BANDS[:4] if number <= min(1 / rate, steps)]
        cycles = (Participation("cyclic Poisson", number, number, number * rate) for number in bands)
        if sampled:
            rows += _smallest(row(Banded(part.period, steps=steps), part) for part in cycles)
        if participation.kind == "cyclic Poisson":
            bands = [number for number in bands if number < participation.period]
            rows += _smallest(row(Banded(number, steps=steps), participation) for number in bands)
        else:
            strategies = _suited(steps, participation, momentum)
    rows += [row(strategy, participation) for strategy in _listed(strategies)]
    rows.sort(key=lambda found: found.error)
    return Comparison(steps, target_epsilon, delta, tuple(rows), momentum)


def _participation_of(given: Any) -> Participation | None:
    """As given, or of a loader."""
    found = getattr(given, "participation", given)
    if found is None and given is not None or not isinstance(found, Participation | None):
        raise TypeError(f"participation= takes a Participation or a loader of fastdp.mechanisms, not {given!r}")
    return found


def _listed(strategies: Any) -> list[Any]:
    return [strategies] if isinstance(strategies, Strategy | str) else list(strategies or ())


def _smallest(rows: Iterable[Row]) -> list[Row]:
    """The row with the smallest error, if there is any."""
    return sorted(rows, key=lambda row: row.error)[:1]


def _suited(steps: int, participation: Participation, momentum: float) -> list[Strategy]:
    """A strategy of each kind, with the settings that are best without amplification."""
    from scipy.optimize import minimize_scalar

    def cost(strategy: Strategy) -> float:
        return _error(strategy, steps, momentum) * sensitivity(strategy, steps, participation, 0)

    found = minimize_scalar(lambda power: cost(Lambda(1 - math.exp(power))), bounds=(-9, -0.05), method="bounded")
    bands = [number for number in _BANDS if number <= steps]
    kinds: tuple[list[Strategy], ...] = (
        [Bisr(number, momentum=of) for of in {0.0, momentum} for number in bands],
        [Banded(number, steps=steps, participation=participation) for number in bands],
    )
    best = [min(kind, key=cost) for kind in kinds if kind]
    return [Independent(), TreeAggregation(), Lambda(round(1 - math.exp(found.x), 4)), *best]


def prefix_noise(strategy: Strategy, steps: int, momentum: float = 0.0) -> np.ndarray:
    """Return the standard deviation of the noise of the sum over the first 1, ..., `steps` steps, at noise of 1.

    momentum: the sum is of averages m_t = momentum m_(t-1) + (1 - momentum) g_t.
    """
    from scipy.signal import lfilter

    if isinstance(strategy, Toeplitz):
        rows = np.zeros(steps)
        rows[: len(strategy.weights)] = strategy.weights[:steps]
        rows = lfilter([1 - momentum], [1.0, -momentum], rows)
        return np.sqrt(np.cumsum(rows.cumsum() ** 2))  # type: ignore[no-any-return]
    if momentum:
        averaged = lfilter([1 - momentum], [1.0, -momentum], strategy.rows(steps), axis=0)
        return np.linalg.norm(averaged.cumsum(axis=0), axis=1)
    found, total, sums = np.zeros(steps), 0.0, np.zeros(steps)
    for step in range(steps):
        own, earlier = strategy.noise_row(step)
        for lag, weight in [(0, own), *earlier]:
            before = sums[step - lag]
            sums[step - lag] += weight
            total += sums[step - lag] ** 2 - before**2
        found[step] = total
    return np.sqrt(np.maximum(found, 0))


def _error(strategy: Strategy, steps: int, momentum: float) -> float:
    return float(np.sqrt(np.mean(prefix_noise(strategy, steps, momentum) ** 2)))


def _draws(strategy: Strategy, steps: int) -> float:
    if isinstance(strategy, Toeplitz):
        return strategy.draws
    return sum(1 + len(strategy.noise_row(step)[1]) for step in range(steps)) / steps
