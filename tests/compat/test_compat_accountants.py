"""fastdp.compat.opacus.accountants: Opacus's numbers wherever it has one, an answer where it has none."""

from __future__ import annotations

import math

import opacus.accountants as theirs
import pytest
from fastdp.compat.opacus.accountants.utils import get_noise_multiplier, whole

from fastdp.compat.opacus import accountants as ours
from fastdp.compat.opacus.utils.uniform_sampler import UniformWithReplacementSampler
from fastdp.errors import AccountingError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", ["prv", "rdp", "gdp"])
def test_the_same_epsilon_as_opacus(name):
    mine, other = ours.create_accountant(name), theirs.create_accountant(name)
    for _ in range(30):
        mine.step(noise_multiplier=1.1, sample_rate=0.02)
        other.step(noise_multiplier=1.1, sample_rate=0.02)
    assert mine.get_epsilon(delta=1e-5) == other.get_epsilon(delta=1e-5) > 0
    assert mine.history == other.history and len(mine) == len(other) and mine.mechanism() == name
    assert isinstance(mine, theirs.IAccountant)
    again = ours.create_accountant(name)
    again.load_state_dict(other.state_dict())
    assert again.get_epsilon(delta=1e-5) == mine.get_epsilon(delta=1e-5)
    with pytest.raises(ValueError):
        again.load_state_dict({})


@pytest.mark.parametrize("name", ["prv", "rdp", "gdp"])
def test_an_answer_before_the_first_step_and_without_noise(name):
    mine = ours.create_accountant(name)
    assert mine.get_epsilon(delta=1e-5) == 0
    mine.step(noise_multiplier=0.0, sample_rate=0.1)
    assert mine.get_epsilon(delta=1e-5) == math.inf


def test_prv_of_huge_epsilons_is_a_bound_not_a_crash():
    """The Gaussian mechanism's epsilon is known: 969.6 at sigma 0.025 (Opacus raises RuntimeError)."""
    other = theirs.create_accountant("prv")
    other.history = [(0.025, 1.0, 1)]
    with pytest.raises(RuntimeError):
        other.get_epsilon(delta=1e-5)
    mine = ours.create_accountant("prv")
    mine.history = list(other.history)
    with pytest.warns(UserWarning, match="RDP"):
        assert 969.6 < mine.get_epsilon(delta=1e-5) < 1.1 * 969.6
    mine.history = [(1e-3, 1e-3, 1)]  # Opacus asks for gigabytes
    assert 1e5 < mine.get_epsilon(delta=1e-5) < 1e6


def test_epochs_cost_what_the_loader_makes_of_them():
    """3 epochs at rate 1/75: Opacus reckons with 224 steps, and its own loader makes 225."""
    rate, epochs = 1 / 75, 3
    assert int(epochs / rate) == 224 and whole(epochs / rate) == 225
    steps = epochs * len(UniformWithReplacementSampler(num_samples=750, sample_rate=rate))
    assert steps == 225
    sigma = get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=rate, epochs=epochs)
    spent = ours.RDPAccountant()
    spent.history = [(sigma, rate, steps)]
    assert spent.get_epsilon(delta=1e-5) <= 2.0
    assert whole(3.34) == 3 and whole(0.999) == 0
    gdp = ours.create_accountant("gdp")
    gdp.history = [(0.025, 1.0, 1)]
    with pytest.raises(AccountingError, match="prv"):
        gdp.get_epsilon(delta=1e-5)
