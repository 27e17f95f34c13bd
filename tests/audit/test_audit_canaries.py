"""The lower bound on epsilon against mechanisms whose epsilon is known, and other arithmetic of the audit by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastdp.audit import audit
from fastdp.audit.canaries import epsilon_lower_bound, gaussian_delta, gaussian_sigma, guess_p_value
from fastdp.audit.noise_independence import repetition
from fastdp.audit.statistics import distances, scale_interval, slope

from .audit_hand import Hand
from .audit_zoo import PLANTED


def test_without_delta_the_p_value_is_a_binomial_tail() -> None:
    chance = math.e / (1 + math.e)
    by_hand = sum(math.comb(10, k) * chance**k * (1 - chance) ** (10 - k) for k in range(9, 11))
    assert guess_p_value(20, 10, 9, 1.0, 0.0) == pytest.approx(by_hand, rel=1e-9)
    assert guess_p_value(20, 10, 0, 1.0, 0.0) == 1.0


def test_delta_adds_its_term() -> None:
    """m = r = 2, v = 1: P[W >= 1] + 2 m delta max_i P[1 > W >= 1 - i] / i, and that is P[W = 0] for i = 1."""
    chance = 1 / (1 + math.exp(-0.5))
    none = (1 - chance) ** 2
    assert guess_p_value(2, 2, 1, 0.5, 0.01) == pytest.approx(1 - none + 4 * 0.01 * none, rel=1e-9)
    assert guess_p_value(2, 2, 2, 0.5, 0.01) == pytest.approx(
        chance**2 + 4 * 0.01 * max(2 * chance * (1 - chance), (2 * chance * (1 - chance) + none) / 2), rel=1e-9
    )


def test_all_right_guesses_refute_what_they_can() -> None:
    """q^r = 0.05 at the bound."""
    q = 0.05 ** (1 / 100)
    assert epsilon_lower_bound(100, 100, 100) == pytest.approx(math.log(q / (1 - q)), abs=1e-4)
    assert epsilon_lower_bound(100, 100, 50) == 0.0
    assert epsilon_lower_bound(100, 100, 100, delta=1e-3) < epsilon_lower_bound(100, 100, 100)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomized_response_is_bounded_tightly_and_not_above_its_epsilon(epsilon: float) -> None:
    """Each bit is told rightly with probability e^eps / (1 + e^eps): the hardest case of the theorem."""
    draw = np.random.default_rng(0)
    chance = 1 / (1 + math.exp(-epsilon))
    bounds = np.array([epsilon_lower_bound(1000, 1000, int(draw.binomial(1000, chance))) for _ in range(400)])
    above = float((bounds > epsilon).mean())
    assert 0.015 < above < 0.085  # 5 % at a confidence of 95 %
    assert epsilon - 0.45 < float(np.median(bounds)) < epsilon


def test_gaussian_mechanism_is_bounded_below_its_epsilon() -> None:
    """Scores of canaries are N(1 or 0, sigma^2): the most certain ones are guessed."""
    draw, delta, epsilon = np.random.default_rng(1), 1e-5, 2.0
    sigma, found = gaussian_sigma(epsilon, delta), []
    for _ in range(60):
        inside = draw.random(2000) < 0.5
        scores = inside + sigma * draw.normal(size=2000) - 0.5
        sure = np.argsort(-np.abs(scores))[:400]
        right = int(((scores[sure] > 0) == inside[sure]).sum())
        found.append(epsilon_lower_bound(2000, 400, right, delta))
    assert max(found) < epsilon and float(np.median(found)) > 0.2


def test_gaussian_noise_for_an_epsilon() -> None:
    assert gaussian_delta(2.0, gaussian_sigma(2.0, 1e-5)) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_delta(0.0, 1.0) == pytest.approx(2 * 0.6914624612740131 - 1, rel=1e-9)  # Phi(1/2) - Phi(-1/2)


def test_canaries_tell_missing_noise_and_only_that() -> None:
    claimed = audit(Hand(), ["epsilon_bound"])["epsilon_bound"]
    assert claimed.verdict == "ok" and claimed.statistic < claimed.data["lower_95"] < 2.0
    without = audit(PLANTED["no noise"][0](), ["epsilon_bound"])["epsilon_bound"]
    assert without.verdict == "bug" and without.statistic > 2.0 and without.p_value < 1e-3
    unclipped = audit(PLANTED["no clipping"][0](), ["epsilon_bound"])["epsilon_bound"]
    assert unclipped.verdict == "bug"


# ---------------------------------------------------------------------- statistics


def test_a_flat_line_has_p_1_and_rounding_is_no_slope() -> None:
    x = np.arange(10.0)
    assert slope(x, np.ones(10)).p_value == 1.0
    assert slope(x, 1 + 1e-8 * x).p_value > 0.99
    assert slope(x, -x).p_value < 1e-12 and slope(x, -x).slope == pytest.approx(-1)


def test_distances_and_scales_by_hand() -> None:
    assert sorted(distances([np.zeros(2), np.array([3.0, 4.0]), np.zeros(2)])) == [0.0, 5.0, 5.0]
    draw = np.random.default_rng(0).normal(size=4000) * 3
    low, high = scale_interval(draw, 0.999)
    assert low < 3 < high and high / low < 1.09


def test_repeated_stretches_of_noise_are_found_wherever_they_are() -> None:
    draw = np.random.default_rng(3)
    noise = draw.normal(size=(8, 700))
    assert repetition(noise)[0] > 1e-3
    noise[:, 531:600] = noise[:, 101:170]
    p_value, lag = repetition(noise)
    assert p_value < 1e-6 and lag == 430
    noise = draw.normal(size=(8, 700))
    noise[:, 350:] = -noise[:, :350]
    assert repetition(noise)[1] == 350
