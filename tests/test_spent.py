"""What was spent stays spent: histories that get shorter, and optimizers that begin anew on a trained model."""

from __future__ import annotations

import copy
import warnings

import pytest

import fastdp
from fastdp.accounting import Ledger, beyond, epsilon_of

from .runs import model_of, steps

RATE = 0.1


def optimizer_of(model, **options):
    return fastdp.DPAdamW(
        model,
        **{"lr": 0.1, "noise_multiplier": 1.0, "expected_batch_size": 6, "sample_rate": RATE,
           "accountant": "rdp", **options},
    )  # fmt: skip


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        yield


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


def test_a_history_of_another_run_does_not_take_the_place_of_ones_own():
    model, other = model_of(), model_of()
    optimizer, long = optimizer_of(model), optimizer_of(other, noise_multiplier=3.0)
    steps(optimizer, model, 4)
    steps(long, other, 50)
    with pytest.warns(UserWarning, match="4 noised"):
        optimizer.load_state_dict(copy.deepcopy(long.state_dict()))
    assert optimizer.epsilon(1e-5) == epsilon_of([(1.0, RATE, 4), (3.0, RATE, 50)], 1e-5, "rdp")


def test_taking_up_a_run_hears_nothing(silent):
    model = model_of()
    optimizer = optimizer_of(model)
    steps(optimizer, model, 3)
    early = copy.deepcopy(optimizer.state_dict())
    optimizer.noise_multiplier = 2.0
    steps(optimizer, model, 3)
    late = copy.deepcopy(optimizer.state_dict())
    for state in (early, late):
        other = model_of()
        resumed = optimizer_of(other)
        resumed.load_state_dict(state)
        resumed.load_state_dict(late)  # longer, and of the same run
        assert resumed.epsilon(1e-5) == optimizer.epsilon(1e-5)


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


def test_optimizers_of_different_parameters_or_without_steps_hear_nothing(silent):
    model = model_of()
    body = optimizer_of(model, params=model[0].parameters())
    body.detach()
    whole = optimizer_of(model)
    steps(whole, model, 2)
    assert whole.epsilon(1e-5) > 0
    other = model_of()
    steps(again := optimizer_of(other), other, 1)
    assert again.epsilon(1e-5) > 0


@pytest.mark.parametrize("history, known, rest", [
    ([], [(1.0, 0.1, 3)], []),
    ([(1.0, 0.1, 3)], [], [(1.0, 0.1, 3)]),
    ([(1.0, 0.1, 3)], [(1.0, 0.1, 5)], []),
    ([(1.0, 0.1, 5)], [(1.0, 0.1, 3)], [(1.0, 0.1, 2)]),
    ([(1.0, 0.1, 5), (2.0, 0.1, 1)], [(1.0, 0.1, 3)], [(1.0, 0.1, 2), (2.0, 0.1, 1)]),
    ([(1.0, 0.1, 3), (2.0, 0.1, 1)], [(1.0, 0.1, 5)], [(2.0, 0.1, 1)]),
    ([(1.0, 0.1, 3), (2.0, 0.1, 1)], [(1.0, 0.1, 3), (2.0, 0.1, 1), (1.0, None, 1)], []),
    ([(1.0, 0.1, 3)], [(1.0, None, 3)], [(1.0, 0.1, 3)]),
])  # fmt: skip
def test_what_is_beyond_a_common_beginning(history, known, rest):
    assert beyond(history, known) == rest


def test_a_ledger_keeps_all_of_several_losses():
    ledger = Ledger()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            ledger.add(1.0, 0.1)
            ledger.add(2.0, 0.1)
            ledger.load([(1.0, 0.1, 1)], [])
    assert sum(n for *_, n in ledger.spent) == 1 + 3 + 2
