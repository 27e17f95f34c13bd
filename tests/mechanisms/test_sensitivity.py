"""Sensitivities of correlated noise, against a search over all that a record may contribute."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from fastdp.accounting.participation import Participation
from fastdp.errors import AccountingError
from fastdp.mechanisms import (
    Banded,
    Bisr,
    Block,
    Independent,
    Lambda,
    Matrix,
    Strategy,
    TreeAggregation,
    epsilon_of_blocks,
    sensitivity,
)
from fastdp.mechanisms.sensitivity import participations

STEPS = 11
RANDOM = np.random.default_rng(1)
POSITIVE = Matrix(encoder=np.tril(RANDOM.random((STEPS, STEPS))) + np.eye(STEPS))
SIGNED = Matrix(encoder=np.tril(RANDOM.standard_normal((STEPS, STEPS))) + 2 * np.eye(STEPS))
STRATEGIES = [
    Independent(),
    Lambda(0.9),
    Bisr(3),
    Bisr(4, momentum=0.9),
    Banded(3, steps=STEPS),
    Banded(2, coefficients=[1, -0.4]),
    TreeAggregation(),
    POSITIVE,
    SIGNED,
]
FIXED = [Participation("fixed order", period, period) for period in (1, 3, 4, STEPS)]
SEPARATED = [Participation("separated", *pair) for pair in ((4, 4), (4, 1), (4, 2), (3, 2), (1, 3), (20, 2), (20, 19))]


@functools.cache
def patterns(steps: int, part: Participation, first: int) -> list[tuple[int, ...]]:
    """All of them, by the definition of a participation."""
    if part.kind != "separated":
        return [tuple(range(place, steps, part.period)) for place in range(min(part.period, steps))]
    found: list[tuple[int, ...]] = [()]
    for step in range(steps):
        found += [
            (*pattern, step)
            for pattern in found
            if not pattern
            or (step - pattern[-1] >= part.separation)
            and (step + first) // part.period != (pattern[-1] + first) // part.period
        ]
    return found[1:]


def bound(strategy: Strategy, steps: int, part: Participation, first: int) -> float:
    """The largest sum of |X_ij|, which is the sensitivity where no X_ij is negative."""
    gram = np.abs(strategy.encoder(steps).T @ strategy.encoder(steps))
    return math.sqrt(max(gram[np.ix_(w, w)].sum() for w in patterns(steps, part, first)))


@pytest.mark.parametrize("part", FIXED + SEPARATED, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_no_pattern_has_more(strategy: Strategy, part: Participation) -> None:
    for steps in (1, 2, 6, STEPS):
        worst = 0.0
        for first in range(part.period):
            found, least = sensitivity(strategy, steps, part, first), bound(strategy, steps, part, first)
            worst = max(worst, least)
            assert least * (1 - 1e-12) <= found <= 2.2 * least
            assert participations(steps, part, first) >= max(map(len, patterns(steps, part, first)))
        assert worst * (1 - 1e-12) <= sensitivity(strategy, steps, part)


@pytest.mark.parametrize("part", [*FIXED, SEPARATED[0], SEPARATED[4]], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_it_is_exact_where_it_says_so(strategy: Strategy, part: Participation) -> None:
    monotone = isinstance(strategy, Independent | Lambda) or strategy == Bisr(3)
    if monotone or (part.kind == "fixed order" and strategy not in (SIGNED, Banded(2, coefficients=[1, -0.4]))):
        for steps in (1, 2, 6, STEPS):
            exact = bound(strategy, steps, part, 0)
            assert math.isclose(sensitivity(strategy, steps, part), exact, rel_tol=1e-5 if strategy.bands else 1e-12)


def test_banded_encoders_are_exact_where_contributions_do_not_meet() -> None:
    """Coefficients that are negative and increase: what is beyond the bands is nothing here."""
    banded = Matrix(encoder=np.eye(STEPS) - 2 * np.eye(STEPS, k=-1) + 3 * np.eye(STEPS, k=-2))
    for part in (Participation("separated", 1, 3), Participation("separated", 4, 4)):
        assert math.isclose(sensitivity(banded, STEPS, part), bound(banded, STEPS, part, 0))
    strategy, part = Banded(3, coefficients=[1, 0.2, 0.5]), Participation("separated", 1, 3)
    assert math.isclose(sensitivity(strategy, 12, part), math.sqrt(4 * 1.29), rel_tol=1e-4)


def test_directions_of_contributions_add_nothing() -> None:
    """Vectors at random, not only the same unit vector at each step."""
    for strategy in (SIGNED, POSITIVE, Banded(2, coefficients=[1, -0.4])):
        for part in (FIXED[1], SEPARATED[2]):
            most = sensitivity(strategy, STEPS, part, 0)
            for pattern in patterns(STEPS, part, 0):
                vectors = np.zeros((STEPS, 3))
                drawn = RANDOM.standard_normal((len(pattern), 3))
                vectors[list(pattern)] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
                assert np.linalg.norm(strategy.encoder(STEPS) @ vectors) <= most + 1e-12


def test_a_column_alone() -> None:
    once = Participation("fixed order", 1000, 1000)
    assert math.isclose(sensitivity(Lambda(0.8), 1000, once), 1 / math.sqrt(1 - 0.64))
    assert sensitivity(TreeAggregation(), 255, once) == math.sqrt(8)
    assert sensitivity(Independent(), 1000, Participation("fixed order", 10, 10)) == 10


def test_it_never_falls_with_steps() -> None:
    """A longer run tells no less: asked after each step, by what was computed for longer runs too."""
    for strategy in (Bisr(3), TreeAggregation(), POSITIVE):
        for part in (FIXED[1], SEPARATED[3]):
            found = [sensitivity(strategy, steps, part) for steps in range(1, STEPS + 1)]
            assert found == sorted(found)


def test_many_steps_are_quick() -> None:
    part = Participation("separated", 500, 250)
    for strategy in (Bisr(8), TreeAggregation(), Banded(4, steps=50)):
        assert all(sensitivity(strategy, steps, part) > 1 for steps in range(9_900, 10_000, 10))


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"kind": "seperated"}, "'seperated', only for"), ({"separation": -3}, "separation .* not -3"),
     ({"period": 0}, "period .* not 0"), ({"rate": 1.7}, r"rate .* \(0, 1\], not 1.7")],
)  # fmt: skip
def test_what_is_no_participation_is_refused(changed: dict[str, Any], words: str) -> None:
    for part in (SEPARATED[0]._replace(**changed), FIXED[0]._replace(**changed)):
        with pytest.raises(AccountingError, match=words):
            sensitivity(Bisr(2), 20, part)
        with pytest.raises(AccountingError, match=words):
            epsilon_of_blocks(Bisr(2), [Block("", 1.0, 20, part)], 1e-5)


def test_strategies_of_other_packages_are_told_apart() -> None:
    """Whatever they say of themselves: what one costs is not taken for another's."""

    class Own(Strategy):
        def __init__(self, weight: float) -> None:
            self.weight = weight

        def noise_row(self, step: int) -> Any:
            return 1.0, [(1, -self.weight)] if step else []

        def __repr__(self) -> str:
            return "Own"

    for weight in (0.1, 0.9):
        assert math.isclose(sensitivity(Own(weight), 20, FIXED[0]), sensitivity(Lambda(weight), 20, FIXED[0]))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1"):
        sensitivity(Bisr(2), 0, FIXED[0])
