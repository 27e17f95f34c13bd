"""Epsilon of correlated noise, against direct estimates of delta from the output distributions with and without."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from fastdp.accounting import epsilon_of, noise_multiplier_for
from fastdp.accounting.participation import Participation
from fastdp.errors import AccountingError, StepError
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
    noise_multiplier_for_strategy,
    sensitivity,
)
from fastdp.mechanisms import correlated_privacy as accounting
from fastdp.mechanisms.bins import _away, _smallest, _towards, epsilon_of_bins
from fastdp.mechanisms.correlated_card import _without_marks
from fastdp.mechanisms.correlated_privacy import gaussian_epsilon

DELTA = 1e-5


def fixed(period: int) -> Participation:
    return Participation("fixed order", period, period)


def cyclic(period: int, rate: float) -> Participation:
    return Participation("cyclic Poisson", period, period, rate)


def bins(period: int, mark: str = "") -> Participation:
    return Participation("balls in bins", period, period, mark=mark)


def block(part: Participation, sigma: float = 1.0, steps: int = 10, first: int | None = 0) -> Block:
    return Block("", sigma, steps, part, first)


def deltas(shifts: np.ndarray, chances: np.ndarray, epsilon: float, samples: int = 400_000) -> list[float]:
    """Plain estimates of delta for the mixture of N(shift, I) against N(0, I), in both directions."""
    random = np.random.default_rng(3)
    normal = random.standard_normal((samples, shifts.shape[1]))

    def loss(outputs: np.ndarray) -> np.ndarray:
        return logsumexp(outputs @ shifts.T - (shifts**2).sum(axis=1) / 2, b=chances, axis=1)

    chosen = shifts[random.choice(len(chances), size=samples, p=chances)]
    return [
        float(np.maximum(-np.expm1(epsilon - loss(normal + chosen)), 0).mean()),
        float(np.maximum(-np.expm1(epsilon + loss(normal)), 0).mean()),
    ]


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 7.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_the_epsilon_of_a_gaussian(mu: float, delta: float) -> None:
    found = gaussian_epsilon(mu, delta)
    exact = norm.cdf(mu / 2 - found / mu) - math.exp(found) * norm.cdf(-mu / 2 - found / mu)
    assert math.isclose(exact, delta, rel_tol=1e-4) or (found == 0 and exact <= delta)


@pytest.mark.parametrize("strategy", [Lambda(0.9), Bisr(4), TreeAggregation(), Banded(3, steps=20)], ids=repr)
@pytest.mark.parametrize("part", [fixed(4), Participation("separated", 5, 3)], ids=str)
def test_a_block_without_sampling_is_one_gaussian(strategy: Strategy, part: Participation) -> None:
    one = epsilon_of_blocks(strategy, [block(part, 5.0)], DELTA)
    mu = sensitivity(strategy, 10, part, 0) / 5
    assert math.isclose(one, gaussian_epsilon(mu, DELTA))
    assert abs(one - epsilon_of([(1 / mu, 1.0, 1)], DELTA)) < 0.02
    by_rdp = epsilon_of([(1 / mu, 1.0, 1)], DELTA, "rdp")
    assert epsilon_of_blocks(strategy, [block(part, 5.0)], DELTA, "rdp") == pytest.approx(by_rdp)
    two = epsilon_of_blocks(strategy, [block(part, 5.0), block(part, 10.0)], DELTA)
    assert math.isclose(two, gaussian_epsilon(mu * math.sqrt(1.25), DELTA))


def test_one_step_in_a_cycle_of_one_is_dp_sgd() -> None:
    for accountant in ("prv", "rdp"):
        found = epsilon_of_blocks(Independent(), [block(cyclic(1, 0.02), 0.9, 700)], DELTA, accountant)
        assert found == epsilon_of([(0.9, 0.02, 700)], DELTA, accountant)
    halves = [block(cyclic(1, 0.02), 0.9, 300), block(cyclic(1, 0.02), 0.9, 400)]
    assert epsilon_of_blocks(Independent(), halves, DELTA) == epsilon_of([(0.9, 0.02, 700)], DELTA)


def test_banded_noise_is_amplified_by_the_cycle() -> None:
    exact = Matrix(encoder=np.eye(9) + 0.5 * np.eye(9, k=-1))  # no term of the inverse is left out
    found = epsilon_of_blocks(exact, [block(cyclic(2, 0.3), 2.0, 9)], DELTA)
    assert math.isclose(found, epsilon_of([(2 / math.sqrt(1.25), 0.3, 5)], DELTA))
    cut = Banded(2, coefficients=[1, 0.5])
    more = epsilon_of_blocks(cut, [block(cyclic(2, 0.3), 2.0, 9)], DELTA)
    assert found <= more < found + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Banded(2, coefficients=[1, 0.5]), Independent()], ids=repr)
def test_cyclic_sampling_against_the_outputs(strategy: Strategy) -> None:
    steps, rate, sigma, delta = 6, 0.4, 1.5, 0.01
    found = epsilon_of_blocks(strategy, [block(cyclic(2, rate), sigma, steps)], delta)
    encoder, worst = strategy.encoder(steps), 0.0
    for place in (0, 1):
        own = list(range(place, steps, 2))
        taken = list(itertools.product((0, 1), repeat=len(own)))
        shifts = np.array([encoder[:, own] @ np.array(pattern) for pattern in taken]) / sigma
        chances = np.array([math.prod(rate if t else 1 - rate for t in pattern) for pattern in taken])
        worst = max(worst, *deltas(shifts, chances, found))
        assert max(deltas(shifts, chances, found)) < delta * 1.05
        less = max(deltas(shifts, chances, found * 0.9))
        assert place or less > delta
    assert worst > delta * 0.8


def test_what_a_cut_inverse_leaves_is_accounted_for() -> None:
    """Two shifts in one direction add up; their bound holds, and is not far above."""
    for near, rest in ((1.0, 0.01), (3.0, 1e-4), (0.2, 0.001)):
        bound = accounting._with_rest(lambda delta, mu=near: gaussian_epsilon(mu, delta), DELTA, rest)  # type: ignore[misc]
        exact = gaussian_epsilon(near + rest, DELTA)
        assert exact <= bound <= exact + 15 * rest + 0.002 * exact
    assert accounting._with_rest(lambda delta: 400.0, DELTA, 0.1) == math.inf
    given: list[float] = []
    more = accounting._with_rest(lambda delta: given.append(delta) or 2.0, DELTA, 0.3) - 2  # type: ignore[func-returns-value]
    assert more > 1 and DELTA * 0.99 < given[-1] * math.exp(more) < DELTA  # both parts of delta


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Lambda(0.5), Independent()], ids=repr)
def test_balls_in_bins_against_the_outputs(strategy: Strategy) -> None:
    steps, period, sigma, delta = 7, 3, 1.5, 0.01
    found = epsilon_of_blocks(strategy, [block(bins(period), sigma, steps)], delta)
    encoder = strategy.encoder(steps)
    shifts = np.array([encoder[:, place::period].sum(axis=1) for place in range(period)]) / sigma
    chances = np.full(period, 1 / period)
    assert max(deltas(shifts, chances, found)) < delta * 1.02
    assert max(deltas(shifts, chances, found * 0.97)) > delta


@pytest.mark.slow
def test_bins_of_one_place_are_a_gaussian() -> None:
    for mu, delta in ((0.5, 1e-5), (2.0, 1e-7), (1.0, 0.5)):
        found = epsilon_of_bins([np.array([[mu**2]])], delta, samples=1 << 16)
        assert gaussian_epsilon(mu, delta) <= found < gaussian_epsilon(mu, delta) * 1.03 + 0.02
    two = epsilon_of_bins([np.array([[0.25]]), np.array([[0.75]])], DELTA, samples=1 << 16)
    assert gaussian_epsilon(1.0, DELTA) <= two < gaussian_epsilon(1.0, DELTA) * 1.03


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [_towards, _away])
def test_both_directions_of_bins_have_the_delta_of_plain_samples(sampled: Any) -> None:
    assert 4.377 < _smallest(sampled([np.eye(1)], 2.5, 1 << 16, 0), DELTA, 1 << 16) < 4.5
    shifts = Lambda(0.5).encoder(3) * 0.8
    found = _smallest(sampled([shifts @ shifts.T], 1.0, 1 << 18, 0), 0.02, 1 << 18)
    plain = deltas(shifts, np.full(3, 1 / 3), found)[sampled is _away]
    assert 0.018 < plain < 0.0202


@pytest.mark.slow
def test_bins_of_many_places_hide_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "epsilon_of_bins", lambda grams, delta, _: epsilon_of_bins(grams, delta, 1 << 17))
    found = epsilon_of_blocks(Bisr(2), [block(bins(10), 2.0, 20)], DELTA)
    assert 0.5 < found < 0.8 * epsilon_of_blocks(Bisr(2), [block(fixed(10), 2.0, 20)], DELTA)
    again = epsilon_of_blocks(Bisr(2), [block(bins(10), 2.0, 20)], DELTA)
    assert found == again  # the same samples


def test_blocks_of_one_draw_have_a_record_at_one_place() -> None:
    first, rest = block(bins(3, "a"), 1.0, 4), block(bins(3, "a"), 1.0, 5, first=1)
    (gram,), _ = accounting._grams(Independent(), [first, rest])
    whole = gram.tolist()
    assert gram.tolist() == [[3, 0, 0], [0, 3, 0], [0, 0, 3]]
    grams, _ = accounting._grams(Independent(), [first, rest._replace(participation=bins(3, "b"))])
    assert [np.diagonal(gram).tolist() for gram in grams] == [[2, 1, 1], [1, 2, 2]]
    unknown = [each._replace(participation=bins(3, f"a|{each.steps}")) for each in (first, rest)]
    for same in (unknown, _without_marks(unknown)):  # one key: records that cannot be told are taken for the same
        assert [gram.tolist() for gram in accounting._grams(Independent(), same)[0]] == [whole]
    with pytest.raises(AccountingError, match="not known at which step they began"):
        accounting._grams(Independent(), [first, rest._replace(first=None)])


def test_nothing_and_no_noise() -> None:
    assert epsilon_of_blocks(Bisr(2), [], DELTA) == 0
    assert epsilon_of_blocks(Bisr(2), [block(fixed(3), steps=0)], DELTA) == 0
    assert epsilon_of_blocks(Bisr(2), [block(fixed(3)), block(fixed(3), 0.0)], DELTA) == math.inf


@pytest.mark.parametrize(
    ("strategy", "blocks", "words"),
    [
        (Bisr(2), [block(cyclic(5, 0.1))], "no bounded number of bands.*take fastdp.mechanisms.Banded"),
        (Banded(4, steps=9), [block(cyclic(3, 0.1))], "4 bands, and cyclic Poisson.*as a cycle has steps, 3"),
        (Matrix(encoder=np.eye(9) - 0.1 * np.eye(9, k=-1)), [block(bins(3), steps=9)], "with negative entries"),
        (Independent(), [block(bins(3)), block(cyclic(3, 0.1))], "no accounting for both"),
        (Independent(), [block(bins(3)), block(bins(3))], r"not known whether they are: give Participation\(mark=\)"),
        (Independent(), [block(Participation("shuffled", 3, 3))], "no accounting is known for .* 'shuffled'"),
    ],
)
def test_what_does_not_fit_is_refused(strategy: Strategy, blocks: list[Block], words: str) -> None:
    with pytest.raises(AccountingError, match=words):
        epsilon_of_blocks(strategy, blocks, DELTA)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(AccountingError, match="delta"):
        epsilon_of_blocks(Bisr(2), [], 0.0)
    with pytest.raises(AccountingError, match="accountant"):
        epsilon_of_blocks(Bisr(2), [], DELTA, "pld")
    with pytest.raises(ValueError, match="noise_multiplier must be 0 or larger"):
        epsilon_of_blocks(Bisr(2), [block(fixed(3), -1.0)], DELTA)
    with pytest.raises(StepError, match="a matrix of 3 steps"):
        epsilon_of_blocks(Matrix(np.eye(3)), [block(fixed(3))], DELTA)


@pytest.mark.parametrize(
    ("strategy", "part"),
    [(Bisr(4), fixed(10)), (Banded(3, steps=50), cyclic(10, 0.1)), (Independent(), cyclic(1, 0.01))],
)
def test_the_noise_multiplier_for_an_epsilon(strategy: Strategy, part: Participation) -> None:
    wanted: Any = {"target_epsilon": 2.0, "delta": DELTA, "steps": 50}
    sigma = noise_multiplier_for_strategy(strategy, participation=part, **wanted)
    assert 2 * 0.998 <= epsilon_of_blocks(strategy, [block(part, sigma, 50)], DELTA) <= 2
    if part.period == 1:
        assert math.isclose(sigma, noise_multiplier_for(sample_rate=0.01, **wanted), rel_tol=0.01)
    for epsilon in (0.0, math.inf):
        with pytest.raises(AccountingError, match="target_epsilon must be positive"):
            noise_multiplier_for_strategy(strategy, participation=part, **{**wanted, "target_epsilon": epsilon})


@pytest.mark.parametrize("strategy", [Bisr(3), TreeAggregation(), Matrix(np.tril(np.ones((20, 20))))], ids=repr)
def test_a_record_is_at_one_place_of_all_blocks(strategy: Strategy) -> None:
    """Two blocks, the second begun within a cycle: the worst place, by what it shifts the outputs of both."""
    order, steps, sigma = Participation("fixed order", 5, 5, mark="order"), (8, 9), 3.0
    blocks = [block(order, sigma, steps[0]), block(order, sigma, steps[1], first=steps[0] % 5)]
    worst = 0.0
    for place in range(5):
        taken = (np.arange(sum(steps)) % 5 == place).astype(float)
        parts = np.split(taken, [steps[0]])
        grams = [np.abs(strategy.encoder(n).T @ strategy.encoder(n)) for n in steps]
        worst = max(worst, sum(part @ gram @ part for part, gram in zip(parts, grams, strict=True)))
    found = epsilon_of_blocks(strategy, blocks, DELTA)
    assert math.isclose(found, gaussian_epsilon(math.sqrt(worst) / sigma, DELTA))
    unknown = epsilon_of_blocks(strategy, [each._replace(first=None) for each in blocks], DELTA)
    assert found <= unknown
    mixed = [blocks[0], blocks[1]._replace(participation=order._replace(mark="other"))]
    assert math.isclose(unknown, epsilon_of_blocks(strategy, mixed, DELTA))


def test_short_blocks_sample_a_record_once_a_cycle() -> None:
    part = Participation("cyclic Poisson", 4, 4, 0.1, "draw")
    parts = [block(part, 1.0, 2, first) for first in (0, 2)] * 10
    assert epsilon_of_blocks(Independent(), parts, DELTA) == epsilon_of([(1.0, 0.1, 10)], DELTA)
    unknown = [each._replace(first=None) for each in parts]
    assert epsilon_of_blocks(Independent(), unknown, DELTA) == epsilon_of([(1.0, 0.1, 20)], DELTA)
