"""A budget in place of a noise multiplier: target_epsilon= with delta=, epochs= or steps=, and loader=."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fastdp
from fastdp import accounting
from fastdp.accounting import default_delta, epsilon_of
from fastdp.errors import AccountingError, OptimizerReplacedWarning, StepError
from fastdp.mechanisms import Bisr, Matrix, fixed_order_loader

RECORDS = 40
DATA = TensorDataset(torch.randn(RECORDS, 3, generator=torch.Generator().manual_seed(0)))
pytestmark = pytest.mark.filterwarnings("ignore::fastdp.errors.NotVerifiedWarning")


def loader_of(**options):
    return fastdp.poisson_loader(DATA, **{"expected_batch_size": 10, **options})


def optimizer_of(model=None, kind=fastdp.DPSGD, **options):
    options = {"target_epsilon": 3.0, **options}
    if "loader" not in options and "sample_rate" not in options:
        options["loader"] = loader_of()
    if "steps" not in options:
        options.setdefault("epochs", 2)
    return kind(nn.Linear(3, 2) if model is None else model, 0.1, **options)


def train(optimizer, loader, steps=None):
    """Steps on passes over the loader, so many or until one is refused (60 at most). Returns how many were made."""
    model, made = optimizer._privacy.engine.model, 0
    while made < 60:
        for (x,) in loader:
            model(x).square().sum(1).mean().backward()
            before = [p.detach().clone() for p in model.parameters()]
            history = optimizer.history
            try:
                optimizer.step()
            except StepError as error:
                if "the budget is spent" not in str(error):
                    raise
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                assert optimizer.history == history and not optimizer._privacy.busy
                return made
            optimizer.zero_grad()
            made += optimizer.stepped
            if made == steps:
                return made
    return made


def test_steps_with_correlated_noise_are_in_no_budget_that_comes_later():
    """Of whatever noise: it would be exceeded."""
    loader, model = fixed_order_loader(DATA, batch_size=10), nn.Linear(3, 2)
    train(fastdp.DPSGD(model, 0.1, noise_multiplier=1.0, noise=Bisr(2)), loader, 2)
    for options in ({}, {"loader": loader, "noise": Bisr(2)}):
        with pytest.raises(AccountingError, match=r"cannot be counted with correlated noise, Bisr\(bands=2\)"):
            optimizer_of(model, **options)


def test_other_optimizers_on_a_loader_of_correlated_noise_are_warned_of():
    loader = fixed_order_loader(DATA, batch_size=10)
    models = [nn.Linear(3, 2) for _ in range(2)]
    first, second = (fastdp.DPSGD(model, 0.1, noise_multiplier=1.0, noise=Bisr(2)) for model in models)
    for (x,) in loader:
        for model, optimizer in zip(models, (first, second), strict=True):
            model(x).square().sum(1).mean().backward()
            optimizer.step()
    with pytest.warns(UserWarning, match="1 other private optimizer.*the sum of their epsilons"):
        first.epsilon(1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*other private optimizer")
        alone = fastdp.DPSGD(nn.Linear(3, 2), 0.1, noise_multiplier=1.0, noise=Bisr(2))
        train(alone, fixed_order_loader(DATA, batch_size=10), 2)
        alone.epsilon(1e-3)


def test_a_strategy_of_ones_own_is_given_as_a_matrix():
    class Own(Bisr):
        pass

    with pytest.raises(TypeError, match=r"not Own: .*Matrix\(strategy.rows"):
        fastdp.DPSGD(nn.Linear(3, 2), 0.1, noise_multiplier=1.0, noise=Own(2))
    fastdp.DPSGD(nn.Linear(3, 2), 0.1, noise_multiplier=1.0, noise=Matrix(Own(2).rows(8)))


@pytest.mark.parametrize("graphed", [False, True])
def test_the_planned_steps_spend_it_and_no_step_goes_beyond(graphed):
    loader = loader_of(max_physical_batch_size=6)
    optimizer = optimizer_of(loader=loader, epochs=2.5, graphed=graphed)
    delta = default_delta(RECORDS)
    sigma = fastdp.noise_multiplier_for(target_epsilon=3.0, delta=delta, sample_rate=0.25, steps=10)
    assert optimizer.noise_multiplier == sigma
    assert train(optimizer, loader) == 10
    assert optimizer.history == [(sigma, 0.25, 10)]
    assert 2.98 <= optimizer.epsilon() == optimizer.epsilon(delta) <= 3.0


def test_every_way_to_say_it_gives_the_same_noise():
    steps = 2 * len(loader_of())
    plain = torch.optim.SGD((model := nn.Linear(3, 2)).parameters(), lr=0.1)
    made = [
        optimizer_of(),
        optimizer_of(kind=fastdp.DPAdamW, epochs=None, steps=steps),
        optimizer_of(sample_rate=0.25, delta=default_delta(RECORDS), steps=steps, epochs=None),
        optimizer_of(sample_rate=0.25, expected_batch_size=10),
        fastdp.privatize(plain, model, target_epsilon=3.0, epochs=2, loader=loader_of()),
    ]
    assert len({optimizer.noise_multiplier for optimizer in made}) == 1
    assert optimizer_of(accountant="rdp").noise_multiplier > made[0].noise_multiplier
    cut = optimizer_of(loader=loader_of(max_batch_size=25), delta=1e-3)
    assert cut.noise_multiplier > optimizer_of(delta=1e-3).noise_multiplier
    assert train(cut, loader_of(max_batch_size=25)) == steps and cut.epsilon() <= 3.0


def test_of_persons_delta_counts_persons():
    by = [n // 4 for n in range(RECORDS)]
    optimizer = optimizer_of(loader=loader_of(expected_batch_size=5, group_by=by))
    assert optimizer._privacy.ledger.budget.delta == default_delta(10)


def test_other_noise_than_planned_ends_earlier_or_later():
    """Less noise for three steps, then what was planned: what is left is what the accountant leaves."""
    loader = loader_of()
    optimizer = optimizer_of(loader=loader, epochs=5)
    planned, delta = optimizer.noise_multiplier, default_delta(RECORDS)
    optimizer.noise_multiplier = planned / 1.5
    assert train(optimizer, loader, steps=3) == 3
    optimizer.noise_multiplier = planned
    more = train(optimizer, loader)
    assert 3 + more < 20
    assert optimizer.epsilon() <= 3.0 < epsilon_of([*optimizer.history, (planned, 0.25, 1)], delta)
    later = optimizer_of(loader=loader, epochs=5)
    train(later, loader, steps=3)
    later.noise_multiplier = later.noise_multiplier / 1.5
    assert 0 < train(later, loader) < 17 and later.epsilon() <= 3.0
    careful = optimizer_of(loader=loader, epochs=1)
    careful.noise_multiplier = 2 * careful.noise_multiplier
    assert train(careful, loader) > 4 and 2.9 < careful.epsilon() <= 3.0


def test_a_resumed_run_has_what_is_left():
    loader = loader_of()
    first = optimizer_of(loader=loader)
    train(first, loader, steps=5)
    second = optimizer_of(loader=loader)
    second.load_state_dict(first.state_dict())
    assert train(second, loader) == 3 and second.epsilon() <= 3.0


def test_steps_of_an_optimizer_that_it_replaces_count():
    loader, model = loader_of(), nn.Linear(3, 2)
    train(optimizer_of(model, loader=loader), loader, steps=6)
    with pytest.warns(OptimizerReplacedWarning, match="stay spent"):
        second = optimizer_of(model, loader=loader)
    assert train(second, loader) == 8 and second.epsilon() <= 3.0


def test_batches_that_come_again_cost_what_they_cost():
    """One draw, trained on again and again, is one release of less noise: for the accountant, and on the card."""
    loader = loader_of()
    optimizer = optimizer_of(loader=loader, epochs=3, sample_rate=0.25, expected_batch_size=10)
    assert train(optimizer, list(loader)) < 12
    assert optimizer.epsilon() <= 3.0
    card, told = optimizer.privacy_card().facts, []
    exec(card["recompute"], {"print": told.append})
    assert told == [card["epsilon"]] == [optimizer.epsilon()]


def test_a_history_without_rates_keeps_no_budget():
    model, loader = nn.Linear(3, 2), loader_of()
    first = fastdp.DPSGD(model, 0.1, noise_multiplier=2.0, expected_batch_size=8)
    model(torch.randn(8, 3)).sum(1).mean().backward()
    first.step()
    with pytest.raises(AccountingError, match="the budget cannot be kept: the sample rate of steps"):
        optimizer_of(model, loader=loader)
    assert not first._privacy.detached and len(first.history) == 1


def test_batches_of_another_loader_count_at_their_own_rate():
    other = loader_of(expected_batch_size=20)
    optimizer = optimizer_of(epochs=5)
    assert 0 < train(optimizer, other) < 20
    rate, delta = optimizer.history[0][1], default_delta(RECORDS)
    assert rate == 0.5 and optimizer.epsilon() <= 3.0
    assert epsilon_of([*optimizer.history, (optimizer.noise_multiplier, 0.5, 1)], delta) > 3.0
    stranger = optimizer_of(expected_batch_size=10)
    with pytest.raises(StepError, match="the sample rate of this batch"):
        train(stranger, DataLoader(DATA, 18, shuffle=True))
    assert stranger.history == []


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"target_epsilon": None, "epochs": None, "loader": None},
            TypeError,
            "DPSGD: give noise_multiplier=, or target",
        ),
        ({"noise_multiplier": 1.0}, TypeError, "either noise_multiplier= or target_epsilon="),
        ({"target_epsilon": None, "noise_multiplier": 1.0}, TypeError, "epochs=, loader= goes with target_epsilon="),
        ({"steps": 8, "epochs": 2}, TypeError, "either epochs= or steps="),
        ({"epochs": None}, TypeError, "either epochs= or steps="),
        ({"loader": None}, TypeError, "needs loader=, a fastdp.poisson_loader, or sample_rate="),
        ({"loader": DataLoader(DATA, 10)}, TypeError, r"not DataLoader: fastdp.poisson_loader\(loader\) makes one"),
        ({"sample_rate": 0.25}, TypeError, "needs delta="),
        ({"loader": loader_of(), "sample_rate": 0.5}, AccountingError, "the loader samples at 0.25"),
        ({"delta": 0.03}, ValueError, "not below 1/40.*Leave delta= out for 0.002"),
        ({"epochs": 0}, ValueError, "epochs must be a positive number, not 0"),
        ({"epochs": None, "steps": 2.5}, AccountingError, "steps must be a whole number"),
        ({"target_epsilon": -1.0}, AccountingError, "target_epsilon must be positive"),
        ({"target_epsilon": "3"}, ValueError, "target_epsilon must be a number, not '3'"),
        ({"delta": "1e-5"}, ValueError, "delta must be a number"),
        ({"sample_rate": 0, "loader": None, "expected_batch_size": 10}, AccountingError, r"sample_rate must lie in"),
        ({"loader": loader_of(max_batch_size=12)}, AccountingError, "or a larger max_batch_size of the loader"),
    ],
)
def test_what_does_not_say_it_is_refused(options, error, said):
    model = nn.Linear(3, 2)
    with pytest.raises(error, match=said):
        optimizer_of(model, **options)
    fastdp.DPSGD(model, noise_multiplier=1.0).detach()  # nothing is left on the model


def test_the_loader_of_a_stream_is_named_one_that_can_be_made():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(DATA)

    loader = DataLoader(Stream(), 10)
    with pytest.raises(TypeError, match="makes one of a DataLoader") as caught:
        optimizer_of(loader=loader)
    remedy = str(caught.value).split("not DataLoader: ")[1].split(" makes one")[0]
    made = eval(remedy, {"fastdp": fastdp, "loader": loader})
    assert made.sample_rate == 0.25 and train(optimizer_of(loader=made), made) == 8


def test_epsilon_has_a_delta_of_its_own():
    loader, model = loader_of(), nn.Linear(3, 2)
    optimizer = fastdp.DPSGD(model, 0.1, noise_multiplier=2.0)
    with pytest.raises(AccountingError, match="number n of samples"):
        optimizer.epsilon()
    train(optimizer, loader, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        assert optimizer.epsilon() == optimizer.epsilon(default_delta(RECORDS))


@pytest.mark.filterwarnings("ignore:the ledger file holds")
def test_the_optimizer_of_a_further_round_plans_nothing_anew(tmp_path):
    """Clients of a federation make an optimizer a round: what the first has computed serves the others."""
    made, computed = [], []
    for _ in range(3):
        model, loader = nn.Linear(3, 2), loader_of()
        optimizer = optimizer_of(model, loader=loader, ledger=tmp_path / "ledger", target_epsilon=2.875)
        made.append(train(optimizer, loader, steps=3))
        computed.append(accounting._by_opacus.cache_info().misses)
        optimizer.detach()
    assert made == [3, 3, 2]  # of two epochs of four steps; the third was refused one
    assert computed[1] == computed[0] and computed[2] <= computed[1] + 2  # the refusal names the epsilon


def test_a_budget_that_was_spent_before_is_refused_before_the_old_optimizer_is_replaced():
    model, loader = nn.Linear(3, 2), loader_of()
    first = optimizer_of(model, loader=loader)
    train(first, loader)
    with pytest.raises(AccountingError, match="leaves none of target_epsilon=2 for 4 more: take a larger one"):
        optimizer_of(model, loader=loader, target_epsilon=2.0, epochs=1)
    assert not first._privacy.detached


@pytest.mark.parametrize("target, spends", [(5.0, True), (3.0, True), (2.0, False)])
def test_a_run_that_is_resumed_for_longer_plans_the_rest_anew(target, spends):
    model, loader = nn.Linear(3, 2), loader_of()
    first = optimizer_of(model, loader=loader, target_epsilon=2.9, epochs=1)
    made = train(first, loader)
    first.detach()
    again, other = nn.Linear(3, 2), loader_of()
    second = optimizer_of(again, loader=other, target_epsilon=target, epochs=3)
    with pytest.warns(UserWarning, match="has made 4 steps by another plan") as seen:
        second.load_state_dict(first.state_dict())
    text = next(str(w.message) for w in seen if "another plan" in str(w.message))
    if not spends:
        assert "Its noise stays, and steps end where the budget does: the budget is spent" in text
        return
    assert f"The {2 * made} steps left get {second.noise_multiplier:.4g}" in text
    state, noise = second.state_dict(), second.noise_multiplier
    assert train(second, other) == 2 * made and target - 0.02 < second.epsilon() <= target
    second.detach()
    with warnings.catch_warnings():  # the plan is the same one now, and the noise stays what it was
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the loader|.*noised step")
        third = optimizer_of(nn.Linear(3, 2), loader=loader_of(), target_epsilon=target, epochs=3)
        third.load_state_dict(state)
    assert third.noise_multiplier == noise


def test_an_ordinary_optimizer_that_had_loaded_a_private_state_plans_with_what_that_has_spent():
    model, loader = nn.Linear(3, 2), loader_of()
    first = optimizer_of(model, loader=loader, target_epsilon=2.9, epochs=1)
    made = train(first, loader)
    first.detach()
    again, other = nn.Linear(3, 2), loader_of()
    plain = torch.optim.SGD(again.parameters(), lr=0.1)
    plain.load_state_dict(first.state_dict())
    second = fastdp.privatize(plain, again, target_epsilon=5.0, epochs=2, loader=other)
    assert train(second, other) == 2 * made and 4.98 < second.epsilon() <= 5.0
