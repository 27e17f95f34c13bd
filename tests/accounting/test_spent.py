"""What was spent stays spent: histories that get shorter, and optimizers that begin anew on a trained model."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import fastdp
from fastdp.accounting import epsilon_of

from ..runs import model_of, steps

RATE = 0.1


def optimizer_of(model, **options):
    return fastdp.DPAdamW(
        model,
        **{"lr": 0.1, "noise_multiplier": 1.0, "expected_batch_size": 6, "sample_rate": RATE,
           "accountant": "rdp", **options},
    )  # fmt: skip


def test_going_back_to_an_earlier_state_keeps_what_was_spent():
    model = model_of()
    optimizer = optimizer_of(model)
    steps(optimizer, model, 10)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(optimizer, model, 20)
    spent = optimizer.epsilon(1e-5)
    model.load_state_dict(state[0])
    with pytest.warns(UserWarning, match=r"20 noised step\(s\) that this optimizer has made are not in"):
        optimizer.load_state_dict(state[1])
    assert optimizer.history == [(1.0, RATE, 10)] and optimizer.epsilon(1e-5) == spent
    steps(optimizer, model, 5)
    assert optimizer.epsilon(1e-5) == pytest.approx(epsilon_of([(1.0, RATE, 35)], 1e-5, "rdp"))
    with pytest.warns(UserWarning, match="5 noised"):  # and once more
        optimizer.load_state_dict(state[1])
    assert optimizer.epsilon(1e-5) == pytest.approx(epsilon_of([(1.0, RATE, 35)], 1e-5, "rdp"))


def test_what_was_lost_goes_into_checkpoints(silent):
    model = model_of()
    optimizer = optimizer_of(model)
    empty = copy.deepcopy(optimizer.state_dict())
    steps(optimizer, model, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(empty)
    steps(optimizer, model, 2)
    other = model_of()
    resumed = optimizer_of(other)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.history == [(1.0, RATE, 2)]
    assert resumed.epsilon(1e-5) == optimizer.epsilon(1e-5) == epsilon_of([(1.0, RATE, 9)], 1e-5, "rdp")
    optimizer.load_state_dict(optimizer.state_dict())  # the same: nothing more is lost
    assert optimizer.epsilon(1e-5) == resumed.epsilon(1e-5)


def test_a_new_optimizer_on_a_trained_model_says_what_it_does_not_count():
    model = model_of()
    first = optimizer_of(model)
    steps(first, model, 8)
    state = copy.deepcopy(first.state_dict())
    first.detach()
    second = optimizer_of(model, params=model[2].parameters())
    with pytest.warns(UserWarning, match=r"8 noised step\(s\) were made"):
        assert second.epsilon(1e-5) == 0
    second.detach()
    third = optimizer_of(model)
    third.load_state_dict(state)
    steps(third, model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        assert third.epsilon(1e-5) == epsilon_of([(1.0, RATE, 9)], 1e-5, "rdp")
    third.detach()
    with pytest.warns(UserWarning, match=r"^9 noised"):  # the first's are within the third's
        optimizer_of(model).epsilon(1e-5)


def test_two_ways_on_from_one_state_are_both_counted():
    model = model_of()
    optimizer = optimizer_of(model)
    steps(optimizer, model, 2)
    early = copy.deepcopy(optimizer.state_dict())
    steps(optimizer, model, 3)
    late = copy.deepcopy(optimizer.state_dict())
    other = model_of()
    resumed = optimizer_of(other)
    resumed.load_state_dict(early)
    steps(resumed, other, 1)
    with pytest.warns(UserWarning, match="^1 noised"):  # it is none of the three that the first made
        resumed.load_state_dict(late)
    assert resumed.epsilon(1e-5) == pytest.approx(epsilon_of([(1.0, RATE, 6)], 1e-5, "rdp"))


def test_a_head_on_a_trained_body_that_is_frozen_says_what_the_body_has_spent():
    body = model_of()
    first = optimizer_of(body)
    steps(first, body, 5)
    first.detach()
    body.requires_grad_(False)
    model = torch.nn.Sequential(body, torch.nn.Linear(2, 2))
    head = optimizer_of(model)
    steps(head, model, 1)
    with pytest.warns(UserWarning, match=r"^5 noised step\(s\) were made on this model's parameters"):
        head.epsilon(1e-5)
    with warnings.catch_warnings():  # the body's history has nothing of the head's
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        first.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_no_epsilon_is_below_zero(accountant):
    for delta in (0.3, 0.5, 0.99):
        assert epsilon_of([(1.0, RATE, 3)], delta, accountant) >= 0
    model = model_of()
    optimizer = optimizer_of(model, accountant=accountant, sample_rate=0.1, expected_batch_size=None)
    optimizer._privacy.ledger.add(1.0, 0.1)
    with pytest.warns(UserWarning, match=r"delta=0\.5 is too large: publishing one sample of 2 in full"):
        assert optimizer.epsilon(0.5) >= 0
