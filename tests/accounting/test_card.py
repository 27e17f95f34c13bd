"""The privacy card of a plain loop: its numbers are the accountant's, and what voids the guarantee stands in it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.accounting.card import true_positives

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)))


def card_after(steps=4, loader=None, given=None, **options):
    """The card after so many steps."""
    loader = fastdp.poisson_loader(DATA, expected_batch_size=10, **(loader or {}))
    model = nn.Linear(3, 2)
    options = {"noise_multiplier": 2.0, **options}
    optimizer = fastdp.DPSGD(model, 0.1, **options)
    for (x,), _ in zip(loader, range(steps), strict=False):
        model(x).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.privacy_card(**(given or {}))


def test_what_a_card_says(tmp_path):
    card = card_after()
    facts = json.loads(card.json())
    assert facts["epsilon"] == epsilon_of([(2.0, 0.25, 4)], facts["delta"]) and facts["delta"] == 0.002
    assert facts["guaranteed"] and facts["warnings"] == [] and facts["history"] == [[2.0, 0.25, 4]]
    assert "Poisson, by fastdp.poisson_loader: each record" in facts["sampling"]
    assert facts["clipping"] == "local, flat, sensitivity 1" and facts["trained"] == "8 of 8 parameters"
    told = {}
    exec(facts["recompute"], {"print": lambda value: told.setdefault("epsilon", value)})
    assert told["epsilon"] == facts["epsilon"]
    assert str(card).startswith("# Privacy card") and card.head().startswith(f"({facts['epsilon']:.4f}")
    assert "fastdp.verify was not run" in str(card) and "<script" not in card.html() and "Not covered" in card.html()
    for kind in ("md", "html", "json"):
        card.save(tmp_path / f"card.{kind}")
    assert (tmp_path / "card.md").read_text() == str(card) and (tmp_path / "card.html").read_text() == card.html()
    with pytest.raises(ValueError, match="not as 'card.pdf'"):
        card.save(tmp_path / "card.pdf")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"seed": 1}, "the noise comes from seed="),
        ({"loader": {"seed": 1}}, "the batches come from a loader with seed="),
        ({"accountant": "gdp"}, "approximation"),
        ({"noise_multiplier": 0.0}, "NO PRIVACY"),
        ({"given": {"delta": 0.5}}, "is not below 1/40"),
    ],
)
def test_what_voids_it_stands_in_it(how, said):
    card = card_after(**how)
    assert said in str(card) and said in card.html().replace("&#x27;", "'")
    assert card.facts["guaranteed"] == ("given" in how)
    assert card.head().startswith("NO ") != ("given" in how)
    json.loads(card.json())


def test_a_card_of_persons_and_of_what_a_script_says():
    card = card_after(loader={"group_by": [n // 2 for n in range(40)]})
    assert card.facts["unit"] == "person" and "all records of it" in card.head()
    assert not any("Several records" in each for each in card.facts["not_covered"])
    model = nn.Linear(3, 2)
    optimizer = fastdp.DPSGD(model, 0.1, noise_multiplier=2.0, expected_batch_size=8, sample_rate=0.2)
    model(torch.randn(8, 3)).sum(1).mean().backward()
    optimizer.step()
    assert "as the script says" in optimizer.privacy_card().facts["sampling"]
    assert optimizer.privacy_card().facts["verified"] == ""
    optimizer.detach()
    fastdp.verify(model, lambda m, x: m(x).square().sum(1).mean(), torch.randn(4, 3))
    assert optimizer.privacy_card().facts["verified"]


def test_a_seed_of_earlier_steps_is_not_forgotten():
    """Not of steps that a loaded state holds, nor of an optimizer that this one replaces; nor of loaders."""
    model, x = nn.Linear(3, 2), torch.randn(8, 3)

    def optimizer_after(steps, model, **options):
        made = fastdp.DPSGD(model, 0.1, noise_multiplier=2.0, expected_batch_size=8, sample_rate=0.2, **options)
        for _ in range(steps):
            model(x).sum(1).mean().backward()
            made.step()
        return made

    first = optimizer_after(2, model, seed=1)
    third, fourth = (optimizer_after(0, nn.Linear(3, 2)) for _ in range(2))
    third.load_state_dict(first.state_dict())
    second = optimizer_after(1, model)
    fourth.load_state_dict(second.state_dict())
    for each in (second, third, fourth):
        card = each.privacy_card()
        assert not card.facts["guaranteed"] and "in earlier steps, the noise comes from seed=" in str(card)
        assert "repeatable" in card.facts["noise"]
    other = nn.Linear(3, 2)
    for options in ({"seed": 3}, {}):
        loader = fastdp.poisson_loader(DATA, expected_batch_size=10, **options)
        last = fastdp.DPSGD(other, 0.1, noise_multiplier=2.0)
        for (x,) in loader:
            other(x).sum(1).mean().backward()
            last.step()
    assert "from a loader with seed=" in str(last.privacy_card()) and not last.privacy_card().facts["guaranteed"]


def test_what_training_warned_of_stands_in_it():
    for given, said in (({"sample_rate": 0.01}, "far below what is sampled"), ({}, "no sample rate is that of every")):
        model = nn.Linear(3, 2)
        weights = None if given else torch.utils.data.WeightedRandomSampler([1.0] * 39 + [9.0], 40)
        loader = torch.utils.data.DataLoader(DATA, 10, sampler=weights)
        optimizer = fastdp.DPSGD(model, 0.1, noise_multiplier=2.0, expected_batch_size=10, **given)
        for (x,) in loader:
            model(x).sum(1).mean().backward()
            optimizer.step()
        card = optimizer.privacy_card(1e-3, **({} if given else {"sample_rate": 0.25}))
        unknown = any("the sample rate of this step is not known" in text for text in card.facts["warnings"])
        assert unknown == (not given)
        assert any(said in text for text in card.facts["warnings"]) and "unless a warning below applies" in card.head()


def test_of_steps_some_of_which_a_loader_drew():
    model, x = nn.Linear(3, 2), torch.randn(10, 3)
    optimizer = fastdp.DPSGD(model, 0.1, noise_multiplier=2.0, expected_batch_size=10, sample_rate=0.25)
    for _ in range(5):
        model(x).sum(1).mean().backward()
        optimizer.step()
    for (rows,) in fastdp.poisson_loader(DATA, expected_batch_size=10):
        model(rows).sum(1).mean().backward()
        optimizer.step()
    assert "as the script says; of 9 steps, 4 were on batches" in optimizer.privacy_card().facts["sampling"]


def test_little_is_not_nothing():
    card = card_after(steps=1, noise_multiplier=200.0, given={"delta": 0.02})
    assert card.facts["epsilon"] == 0 and card.facts["right_guesses"] == 0.51 and card.facts["true_positives"] > 1e-3


def test_no_step_has_cost_nothing():
    card = card_after(steps=0, given={"delta": 1e-3})
    assert card.facts["epsilon"] == 0 and "No step" in card.head() and card.facts["right_guesses"] == 0.5


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_true_positives_of_the_gaussian_mechanism(sigma):
    """One step without sampling has a known trade-off: Phi(Phi^-1(alpha) + 1 / sigma)."""
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    alpha = 1e-3
    exact = float(normal.cdf(normal.icdf(torch.tensor(alpha, dtype=torch.float64)) + 1 / sigma))
    bound = true_positives([(sigma, 1.0, 1)], "prv", alpha)
    assert exact <= bound <= 2.5 * exact + 1e-4 and not math.isnan(bound)
