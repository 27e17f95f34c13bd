"""The privacy card of runs without Poisson samples: against scipy's Gaussian mechanism, and its program runs alone."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp import mechanisms
from fastdp.accounting import epsilon_of
from fastdp.mechanisms import DPFTRL, Banded, Bisr, Independent, Lambda, Matrix, TreeAggregation

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = TensorDataset(torch.randn(60, 5, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 3)
SIGMA, DELTA = 6.0, 1e-3
ENCODER = np.tril(np.full((9, 9), 0.25)) + np.eye(9)


def run(loader: Any, noise: Any = None, passes: int = 2, change: bool = False, **options: Any) -> Any:
    """An optimizer after some passes. change: the steps from the eighth on are with more noise, in another block."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    options = {"noise_multiplier": SIGMA, **options}
    optimizer = DPFTRL(model, 0.1, **options) if noise is None else fastdp.DPSGD(model, 0.1, noise=noise, **options)
    for _ in range(passes):
        for x, y in loader:
            if change and sum(each[2] for each in optimizer.history) == 7:
                optimizer.noise_multiplier = 2 * SIGMA
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def printed(card: Any) -> float:
    """What the card's program prints, which knows of nothing else."""
    found: list[float] = []
    exec(card.facts["recompute"], {"print": found.append})
    return found[0]


def gaussian(mu: float) -> tuple[float, float, float]:
    """Epsilon at DELTA, the share of right guesses and of members found, of a Gaussian mechanism (Balle and Wang)."""
    excess = lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - DELTA
    return brentq(excess, 0, 100, xtol=1e-12), norm.cdf(mu / 2), norm.cdf(norm.ppf(1e-3) + mu)


@pytest.mark.parametrize(
    "noise",
    [Lambda(0.7), Bisr(4), TreeAggregation(), Matrix(encoder=ENCODER), Banded(4, steps=3), Independent(), None],
    ids=repr,
)
@pytest.mark.parametrize("change", [False, True])
def test_a_fixed_order_is_one_gaussian_mechanism(noise: Any, change: bool) -> None:
    change = change and noise is not None  # a tree keeps its noise
    optimizer = run(mechanisms.fixed_order_loader(DATA, batch_size=20), noise, 3, change)
    card = optimizer.privacy_card(DELTA)
    cost = np.full(
        3, 2 * 3 / SIGMA**2
    )  # of each place of a pass; a tree a pass: its first two steps are under two nodes
    if noise is not None:
        cost[:] = 0
        for sigma, first, steps in [(SIGMA, 0, 7), (2 * SIGMA, 1, 2)] if change else [(SIGMA, 0, 9)]:
            taken = np.eye(3)[(first + np.arange(steps)) % 3]
            cost += ((np.linalg.inv(noise.rows(steps)) @ taken) ** 2).sum(axis=0) / sigma**2
    epsilon, right, found = gaussian(math.sqrt(cost.max()))
    loose = 0.02 if noise is None else 1e-9  # PRV's
    assert card.facts["epsilon"] == pytest.approx(epsilon, abs=loose)
    assert card.facts["right_guesses"] == pytest.approx(right, abs=1e-12)
    assert card.facts["true_positives"] == pytest.approx(found, abs=1e-12)
    assert printed(card) == pytest.approx(card.facts["epsilon"], rel=1e-12)
    blocks = [block["steps"] for block in json.loads(card.json())["blocks"]]
    assert blocks == ([3, 3, 3] if noise is None else [7, 2] if change else [9])
    assert card.facts["guaranteed"] and "same batch of every 3 steps" in str(card)


def test_no_digest_of_records_is_on_a_card() -> None:
    loader = mechanisms.fixed_order_loader(DATA, batch_size=10, shuffle_within=2)
    optimizer = run(loader, Bisr(4), accountant="gdp", seed=3)
    card = optimizer.privacy_card()
    assert card.facts["delta"] == 1e-3 and card.facts["epsilon"] == optimizer.epsilon(1e-3) == printed(card)
    assert "at least 5 apart" in str(card) and not card.facts["guaranteed"] and "seed=" in str(card)
    assert "approximation" not in str(card)  # GDP's is exact here
    for part in loader.participation.mark.replace("|", " ").split():
        assert len(part) < 8 or part not in card.json()
    assert "No step" in run(loader, Bisr(4), passes=0).privacy_card(1e-3).head()
    assert "NO PRIVACY" in run(loader, Bisr(4), passes=1, noise_multiplier=0.0).privacy_card().head()


@pytest.mark.parametrize("kind", ["cyclic Poisson", "balls in bins"])
def test_what_is_sampled_is_bounded_from_above(kind: str) -> None:
    """With one place and the rate 1 it is a Gaussian mechanism."""
    noise, passes = Independent(), 4
    if kind == "cyclic Poisson":
        loader = mechanisms.cyclic_poisson_loader(DATA, batch_size=60, cycle=1)
    else:
        loader = mechanisms.balls_in_bins_loader(DATA, batch_size=60, seed=1)
    card = run(loader, noise, passes).privacy_card(DELTA)
    mu = math.sqrt(passes) / SIGMA
    epsilon, right, found = gaussian(mu)
    assert epsilon <= card.facts["epsilon"] <= epsilon + 0.02 and printed(card) == card.facts["epsilon"]
    assert found <= card.facts["true_positives"] <= 2.5 * found and right <= card.facts["right_guesses"] <= 1
    assert ("confidence of 1 - 1e-06" in str(card)) == (kind == "balls in bins") == (not card.facts["guaranteed"])
    assert kind in card.facts["sampling"]


def test_the_program_of_samples_of_parts() -> None:
    loader = mechanisms.cyclic_poisson_loader(DATA, batch_size=5, cycle=4)
    optimizer = run(loader, Banded(4, steps=12), 1, accountant="rdp")
    card = optimizer.privacy_card(DELTA)
    assert printed(card) == card.facts["epsilon"] == optimizer.epsilon(DELTA)
    assert card.facts["epsilon"] < epsilon_of([(SIGMA, 1.0, 3)], DELTA)
    assert "in every 4-th batch with probability 0.333333" in str(card) and card.facts["accountant"] == "rdp"
