"""The cost of a private search: the paper's formula computed again, and the search's own distribution beside it."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import optimize, stats

from fastdp.errors import AccountingError
from fastdp.mechanisms import NegativeBinomialRuns, PoissonRuns, tuning_epsilon

HISTORY = [(1.0, 0.01, 1000)]
EVERY = [
    *(NegativeBinomialRuns(mean, eta) for mean in (1.5, 4.0, 30.0) for eta in (-0.5, 0.0, 1.0, 3.0)),
    PoissonRuns(1.5),
    PoissonRuns(12.0),
]


def chances(runs, least=1e-14):
    found = []
    for count, chance in runs.probabilities():
        found.append((count, chance))
        if chance < least and count > runs.mean:
            return np.array(found)
    raise AssertionError


@pytest.mark.parametrize("runs", EVERY, ids=str)
def test_the_distributions_are_those_of_the_paper(runs):
    counts, found = chances(runs).T
    assert found.sum() == pytest.approx(1, abs=1e-9) and counts @ found == pytest.approx(runs.mean, rel=1e-7)
    for count, chance in zip(counts[:12].astype(int), found, strict=False):
        if isinstance(runs, PoissonRuns):
            said = stats.poisson.pmf(count, runs.mean)
        elif runs.eta == 0:
            said = (1 - runs.gamma) ** count / (count * math.log(1 / runs.gamma))
        else:
            product = math.prod((place + runs.eta) / (place + 1) for place in range(count))
            said = (1 - runs.gamma) ** count / (runs.gamma**-runs.eta - 1) * product
        assert chance == pytest.approx(said, rel=1e-9)


def test_draws_follow_the_distribution_and_no_seed():
    for runs in (NegativeBinomialRuns(5, 0), NegativeBinomialRuns(5, 1), PoissonRuns(5)):
        times = 4000
        drawn = Counter(runs.draw() for _ in range(times))
        for count, chance in itertools.takewhile(lambda pair: pair[0] < 12, runs.probabilities()):
            assert abs(drawn[count] / times - chance) < 6 * math.sqrt(max(chance, 1e-4) / times)


def by_hand(mean, eta, sigma, steps, delta):
    """The theorem for a Gaussian mechanism, e(a) = steps a / (2 sigma^2), by another optimizer and other roots."""
    if eta == 0:
        gamma = optimize.brentq(lambda g: (1 / g - 1) / math.log(1 / g) - mean, 1e-12, 1 - 1e-9, xtol=1e-15)
    else:
        gamma = optimize.brentq(lambda g: eta * (1 - g) / (g * (1 - g**eta)) - mean, 1e-12, 1 - 1e-9, xtol=1e-15)
    rho = steps / (2 * sigma**2)
    # the best b of (1 - 1/b) rho b + log(1/gamma) / b = rho b - rho + log(1/gamma) / b
    b = max(1.0, math.sqrt(math.log(1 / gamma) / rho))
    other = rho * b - rho + math.log(1 / gamma) / b

    def of(a):
        e = rho * a + (1 + eta) * other + math.log(mean) / (a - 1)
        return e + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1)

    return optimize.minimize_scalar(of, bounds=(1.001, 500), method="bounded").fun


@pytest.mark.parametrize("mean", [2, 10, 300])
@pytest.mark.parametrize("eta", [-0.5, 0, 1, 4])
@pytest.mark.parametrize("sigma", [2.0, 20.0])
def test_the_formula_computed_again(mean, eta, sigma):
    found = tuning_epsilon([[(sigma, 1.0, 3)]], 1e-6, NegativeBinomialRuns(mean, eta))
    said = by_hand(mean, eta, sigma, 3, 1e-6)
    assert said - 1e-6 <= found <= said * 1.01  # orders are of a grid


# ---------------------------------------------------------------------- the search itself


def generating(runs):
    """The generating function of the number of runs, of the series."""
    counts, found = chances(runs, 1e-17).T
    return lambda x: (found * np.asarray(x)[..., None] ** counts).sum(-1)


def renyi(p, q, order):
    with np.errstate(divide="ignore"):
        return float(np.log(np.sum(np.exp(order * np.log(p) + (1 - order) * np.log(q)))) / (order - 1))


def best_of(runs, p):
    """The distribution of the best of the runs, outcomes in the order of their scores; of none, one more outcome."""
    f = generating(runs)
    below = np.concatenate([[0.0], np.cumsum(p)])
    below[-1] = 1.0
    return np.concatenate([np.diff(f(below)), f(np.zeros(1))])


def pairs():
    """Runs on two neighbouring data sets: at random, and those that the best of many tells apart the most."""
    draw = np.random.default_rng(0)
    for outcomes in (2, 3, 8):
        for scale in (0.1, 1.0):
            p = draw.dirichlet(np.ones(outcomes))
            q = p * np.exp(scale * draw.uniform(-1, 1, outcomes))
            yield p, q / q.sum()
    for rare in (1e-1, 1e-2, 1e-4):  # the best outcome is rare, and e times as likely under the other
        yield np.array([1 - rare, rare]), np.array([1 - rare * math.e**0.5, rare * math.e**0.5])
        yield np.array([rare, 1 - rare]), np.array([rare * math.e**0.5, 1 - rare * math.e**0.5])


@pytest.mark.parametrize("runs", EVERY, ids=str)
def test_the_bound_is_above_what_the_search_releases(runs):
    orders = [1.1, 1.5, 2.0, 3.0, 6.0, 20.0, 100.0]
    tightest = 0.0
    for p, q in pairs():
        of_run = [max(renyi(p, q, a), renyi(q, p, a)) for a in orders]
        bound = runs.rdp(orders, of_run)
        one, other = best_of(runs, p), best_of(runs, q)
        keep = (one > 0) | (other > 0)
        for a, most in zip(orders, bound, strict=True):
            true = max(renyi(one[keep], other[keep], a), renyi(other[keep], one[keep], a))
            assert true <= most + 1e-9, (a, true, most)
            tightest = max(tightest, true / most)
    assert tightest > 0.2  # not vacuous


def test_what_makes_no_sense_is_refused():
    runs = NegativeBinomialRuns(10, 0)
    for mean in (1, 0, True, math.nan, math.inf, "10"):
        with pytest.raises(AccountingError, match="expected number of runs"):
            NegativeBinomialRuns(mean, 0)
        with pytest.raises(AccountingError, match="expected number of runs"):
            PoissonRuns(mean)
    with pytest.raises(AccountingError, match="at most 700"):
        PoissonRuns(701)
    for eta in (-1, math.nan, None, 101):
        with pytest.raises(AccountingError, match="eta must lie above -1"):
            NegativeBinomialRuns(10, eta)
    for mean, eta in ((5, -0.999999), (1e6, -0.99)):  # which no gamma reaches that is a number
        with pytest.raises(AccountingError, match="too near to -1"):
            NegativeBinomialRuns(mean, eta)
    for delta in (0, 1, None, math.nan):
        with pytest.raises(AccountingError, match="delta must lie"):
            tuning_epsilon([HISTORY], delta, runs)
    for wrong in ([], [[]], HISTORY, [[(1.0, None, 10)]], [[(-1.0, 0.1, 10)]], [[(1.0, 0.1, 0.5)]], [[(1.0, 2.0, 5)]]):
        with pytest.raises(AccountingError):
            tuning_epsilon(wrong, 1e-5, runs)
    with pytest.raises(AccountingError, match="largest size"):
        tuning_epsilon([[(1.0, 0.1, 10, 1e-9)]], 1e-5, runs)
    with pytest.raises(AccountingError, match="runs must be"):
        tuning_epsilon([HISTORY], 1e-5, 10)
