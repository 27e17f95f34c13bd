"""The comparison of mechanisms at the same epsilon."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fastdp.accounting import noise_multiplier_for
from fastdp.accounting.participation import Participation
from fastdp.errors import AccountingError
from fastdp.mechanisms import (
    Banded,
    Bisr,
    Comparison,
    Independent,
    Lambda,
    Matrix,
    Strategy,
    TreeAggregation,
    compare,
    epsilon_of_blocks,
)
from fastdp.mechanisms.comparison import prefix_noise
from fastdp.mechanisms.correlated_privacy import Block
from fastdp.mechanisms.encoders import Toeplitz

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(steps=200, epochs=5, target_epsilon=2.0, delta=1e-5)


def test_every_mechanism_has_the_same_epsilon(found: Comparison) -> None:
    for row in found.rows:
        block = Block("", row.noise_multiplier, 200, row.participation, 0)
        assert 2 * 0.997 <= epsilon_of_blocks(row.strategy, [block], 1e-5) <= 2


def test_errors_are_those_of_the_sums(found: Comparison) -> None:
    for row in found.rows:
        sums = row.strategy.rows(200).cumsum(axis=0)
        assert math.isclose(row.error, row.noise_multiplier * np.linalg.norm(sums) / math.sqrt(200))
        drawn = [1 + len(row.strategy.noise_row(step)[1]) for step in range(200)]
        assert row.draws == (max(drawn) if isinstance(row.strategy, Toeplitz) else np.mean(drawn))


def test_the_smallest_error_is_recommended(found: Comparison) -> None:
    errors = [row.error for row in found.rows]
    assert errors == sorted(errors) and found.best == found.rows[0]
    kinds = [type(row.strategy) for row in found.rows]
    assert sorted(kind.__name__ for kind in kinds) == [
        "Banded", "Banded", "Bisr", "Independent", "Independent", "Lambda", "TreeAggregation",
    ]  # fmt: skip
    assert kinds[-1] is Independent  # without sampling
    text = str(found)
    assert text.startswith("200 steps, epsilon 2 at delta 1e-05") and "Poisson at 0.025 " in text
    assert text.endswith(f"Take {found.best.strategy!r}, {found.best.records}: it has the smallest error.")
    assert len({len(line) for line in text.splitlines()[1:-1]}) == 1  # columns are in line


def test_dp_sgd_is_among_them(found: Comparison) -> None:
    row = next(row for row in found.rows if row.participation.period == 1)
    wanted = noise_multiplier_for(target_epsilon=2.0, delta=1e-5, sample_rate=1 / 40, steps=200)
    assert row.strategy == Independent() and math.isclose(row.noise_multiplier, wanted, rel_tol=0.01)
    assert math.isclose(row.error, row.noise_multiplier * math.sqrt(201 / 2))


def test_settings_are_the_best_of_their_kind(found: Comparison) -> None:
    best = next(row for row in found.rows if isinstance(row.strategy, Lambda))
    assert isinstance(best.strategy, Lambda)
    others: list[Strategy] = [Lambda(best.strategy.weight + shift) for shift in (-0.03, 0.01)]
    part = Participation("fixed order", 40, 40)
    more = compare(steps=200, participation=part, target_epsilon=2.0, delta=1e-5, strategies=others)
    assert all(best.error < row.error for row in more.rows if isinstance(row.strategy, Lambda))


@pytest.mark.parametrize(
    "strategy", [TreeAggregation(), Bisr(3), Banded(3, steps=30), Matrix(np.tril(np.ones((30, 30))))], ids=repr
)
def test_the_noise_of_sums(strategy: Strategy) -> None:
    assert np.allclose(prefix_noise(strategy, 30), np.linalg.norm(strategy.rows(30).cumsum(axis=0), axis=1))
    average, averages = np.zeros(30), []
    for row in strategy.rows(30):
        average = 0.9 * average + 0.1 * row
        averages.append(average)
    by_momentum = np.linalg.norm(np.cumsum(averages, axis=0), axis=1)
    assert np.allclose(prefix_noise(strategy, 30, 0.9), by_momentum)


def test_without_loaders_that_sample_and_with_momentum() -> None:
    found = compare(steps=60, epochs=3, target_epsilon=2.0, delta=1e-5, momentum=0.9, sampled=False)
    assert {row.participation.kind for row in found.rows} == {"fixed order"}
    assert found.momentum == 0.9 and "momentum 0.9" in str(found)
    plain = compare(steps=60, epochs=3, target_epsilon=2.0, delta=1e-5, sampled=False)
    assert found.best.error < plain.best.error  # averages have less noise
    with pytest.raises(ValueError, match="momentum"):
        compare(steps=60, epochs=3, target_epsilon=2.0, delta=1e-5, momentum=1.0)


def test_mechanisms_that_do_not_fit() -> None:
    part = Participation("cyclic Poisson", 4, 4, 0.5)
    few = compare(steps=16, participation=part, target_epsilon=2.0, delta=1e-5, accountant="rdp")
    assert {type(row.strategy) for row in few.rows} == {Independent, Banded}
    with pytest.raises(AccountingError, match="no bounded number of bands"):
        compare(steps=16, participation=part, target_epsilon=2.0, delta=1e-5, strategies=[Bisr(2)], accountant="rdp")
    with pytest.raises(ValueError, match="give either epochs= or participation="):
        compare(steps=16, target_epsilon=2.0, delta=1e-5)
    with pytest.raises(ValueError, match="epochs must be a whole number"):
        compare(steps=16, epochs=0, target_epsilon=2.0, delta=1e-5)


def test_the_plot(found: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = found.plot(tmp_path / "noise.png")
    assert (tmp_path / "noise.png").stat().st_size > 1000
    (axes,) = figure.axes
    assert len(axes.lines) == len(found.rows)
    first, row = axes.lines[0].get_ydata(), found.rows[0]
    assert math.isclose(math.sqrt(np.mean(np.square(first))), row.error)
