"""Epsilon of the steps made, and the noise multiplier that meets one."""

from __future__ import annotations

import math
import warnings

import pytest

import fastdp
from fastdp.accounting import ACCOUNTANTS, epsilon_of
from fastdp.errors import AccountingError

from ..runs import model_of, steps


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_epsilon_is_opacus_own(accountant):
    from opacus.accountants import create_accountant

    model = model_of()
    optimizer = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=1.1, sample_rate=0.01, expected_batch_size=6, accountant=accountant
    )
    assert optimizer.epsilon(1e-5) == 0
    steps(optimizer, model, 20)
    theirs = create_accountant(accountant)
    for _ in range(20):
        theirs.step(noise_multiplier=1.1, sample_rate=0.01)
    assert optimizer.epsilon(delta=1e-5) == pytest.approx(theirs.get_epsilon(delta=1e-5), rel=1e-6)
    several = [(0.9, 0.25, 20), (1.1, 0.25, 3), (2.0, 0.001, 500), (1.3, 1.0, 2), (0.9, 0.25, 5)]
    for theirs.history in (several, [(0.5, 0.1, 1)]) if accountant != "gdp" else ():  # (Opacus's takes one run alone)
        for delta in (1e-3, 1e-9):
            assert epsilon_of(theirs.history, delta, accountant) == pytest.approx(theirs.get_epsilon(delta=delta), 1e-5)


@pytest.mark.parametrize("runs", [[(3000.0, 1.0, 10**6)], [(100.0, 1.0, 600), (50.0, 1.0, 150), (100.0, 1.0, 399990)]])
def test_steps_on_all_samples_are_one_gaussian_mechanism(runs):
    """Balle and Wang 2018 (arXiv 1805.06530), theorem 8. Step by step, PRV takes minutes for a million."""
    mu, epsilon = math.sqrt(sum(steps / sigma**2 for sigma, _, steps in runs)), epsilon_of(runs, 1e-5)

    def below(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    def delta(at):
        return below(mu / 2 - at / mu) - math.exp(at) * below(-mu / 2 - at / mu)

    assert delta(epsilon) < 1e-5 < delta(epsilon - 0.03)
    alike = [(2.0, 0.01, 100), *runs, (2.0, 0.01, 50)]
    assert epsilon_of(alike, 1e-5) == epsilon_of([(2.0, 0.01, 150), *runs], 1e-5) > epsilon


def test_epsilon_without_what_it_needs():
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6)
    steps(optimizer, model, 1)
    with pytest.raises(AccountingError, match="sample_rate="):
        optimizer.epsilon(1e-5)
    with pytest.raises(AccountingError, match="delta"):
        optimizer.epsilon(1.0)
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=6, sample_rate=0.1)
    steps(optimizer, model, 1)
    assert optimizer.epsilon(1e-5) == math.inf


def test_a_seed_voids_the_guarantee_and_epsilon_says_so():
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1, seed=1)
    steps(optimizer, model, 1)
    with pytest.warns(UserWarning, match="seed="):
        optimizer.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_noise_multiplier_for_meets_the_target(accountant):
    from fastdp.accounting import epsilon_of

    sigma = fastdp.noise_multiplier_for(
        target_epsilon=2.0, delta=1e-5, sample_rate=0.02, epochs=3, accountant=accountant
    )
    spent = epsilon_of([(sigma, 0.02, 150)], 1e-5, accountant)
    assert 1.98 < spent <= 2.0
    with pytest.raises(AccountingError, match="tolerance"):
        fastdp.noise_multiplier_for(target_epsilon=2.0, delta=1e-5, sample_rate=0.02, epochs=3, tolerance=math.nan)
    with pytest.raises(AccountingError, match="either"):
        fastdp.noise_multiplier_for(target_epsilon=2.0, delta=1e-5, sample_rate=0.02)


def test_gdp_finds_noise_where_little_noise_has_no_number():
    found = fastdp.noise_multiplier_for(target_epsilon=8, delta=0.007, sample_rate=2 / 13, steps=4, accountant="gdp")
    assert 0.4 < found < 0.6


def test_gdp_warns_where_it_says_too_little():
    runs = [(1.1, 256 / 60_000, 14_000)]
    with pytest.warns(UserWarning, match="prv"):
        found = epsilon_of(runs, 1e-5, "gdp")
    assert found < epsilon_of(runs, 1e-5, "prv") - 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert epsilon_of([(1.0, 1.0, 10)], 1e-5, "gdp") > epsilon_of([(1.0, 1.0, 10)], 1e-5)


def test_epsilon_falls_as_the_noise_grows():
    """(Of so much privacy lost PRV's grid takes tens of gigabytes.)"""
    found = [epsilon_of([(sigma, 0.1, 100)], 1e-5) for sigma in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)]
    assert all(math.isfinite(less) and less < more for more, less in zip(found, found[1:], strict=False)), found


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_steps_that_are_no_number_of_steps_are_refused(accountant):
    """A part of a step would be left out, or fail deep in an accountant."""
    for run in (
        (1.0, 0.1, 2.9),
        (1.0, 0.1, -5),
        (1.0, 0.1, "1"),
        (1.0, 0.1, float("nan")),
        (1.0, 1.5, 2),
        (-1.0, 0.1, 2),
        (float("inf"), 0.1, 2),
    ):
        with pytest.raises((AccountingError, ValueError), match="steps must be a whole|sample_rate|noise_multiplier"):
            epsilon_of([run], 1e-5, accountant)
    assert epsilon_of([(1.0, 0.1, 3.0)], 1e-5, accountant) == epsilon_of([(1.0, 0.1, 3)], 1e-5, accountant)
    assert epsilon_of([(1.0, 0.1, 0)], 1e-5, accountant) == 0
