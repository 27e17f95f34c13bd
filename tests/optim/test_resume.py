"""A run taken up where it was left: the same samples, the same noise, the same weights."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch.utils.data import TensorDataset

import fastdp
from fastdp.errors import StepError

from ..runs import backward, data, model_of

STEPS = 6


def loader_of(seed=None, workers=0):
    return fastdp.poisson_loader(
        TensorDataset(data(40)), expected_batch_size=10, max_physical_batch_size=4, steps=STEPS, seed=seed,
        num_workers=workers,
    )  # fmt: skip


def train(model, loader, optimizer, passes, keep=None):
    """Weights after each step; and the state of everything after step `keep`."""
    weights, kept = [], None
    for _ in range(passes):
        for (x,) in loader:
            backward(model, x)
            before = sum(n for _, _, n in optimizer.history)
            optimizer.step()
            optimizer.zero_grad()
            if sum(n for _, _, n in optimizer.history) == before:
                continue
            weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            if len(weights) == keep:
                state = loader.state_dict(secret=True), optimizer.state_dict(), optimizer.noise_state()
                kept = copy.deepcopy((model.state_dict(), *state))
    return weights, kept


def optimizer_of(model):
    return fastdp.DPAdamW(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=0.5)


@pytest.mark.parametrize("stop", [1, 4, STEPS, STEPS + 1])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_is_taken_up_exactly(stop, workers):
    if workers and stop != 4:
        pytest.skip("workers start slowly: one stop is enough")
    model, loader = model_of(), loader_of(workers=workers)
    optimizer = optimizer_of(model)
    whole, (weights, place, state, noise) = train(model, loader, optimizer, 2, stop)
    again, other = model_of(seed=7), loader_of(workers=workers)
    again.load_state_dict(weights)
    resumed = optimizer_of(again)
    other.load_state_dict(place)
    resumed.load_state_dict(state)
    resumed.load_noise_state(noise)
    rest, _ = train(again, other, resumed, 2 if stop < STEPS else 1)
    assert resumed.history == [(1.0, 0.25, 2 * STEPS)]
    assert len(rest) == 2 * STEPS - stop and all(torch.equal(a, b) for a, b in zip(whole[stop:], rest, strict=True))


def test_states_of_other_things_are_refused():
    loader = loader_of()
    with pytest.raises(StepError, match="no state"):
        loader.load_state_dict({"step": 1})
    for wrong in ({"pass": 0, "step": 1.7}, {"pass": True, "step": 0}, {"pass": 0, "step": "2"}, [1], None,
                  {"pass": 0, "step": 0, "key": 1.9}, {"pass": 0, "step": 0, "key": -1}):  # fmt: skip
        with pytest.raises(StepError, match="no state"):
            loader.load_state_dict(wrong)
    with pytest.raises(StepError, match="step 7"):
        loader.load_state_dict({"pass": 0, "step": STEPS + 1})
    assert "key" not in loader.state_dict() and "key" in loader.state_dict(secret=True)
    optimizer = optimizer_of(model_of())
    for wrong in ({"key": bytes(32)}, None):
        with pytest.raises(StepError, match="noise_state"):
            optimizer.load_noise_state(wrong)
    with pytest.raises(StepError, match="other normals"):
        optimizer.load_noise_state({"key": bytes(32), "step": 0})
    for state in ({"key": b"short", "step": 0}, {"key": bytes(32), "step": -1}, {"key": bytes(32), "step": True}):
        with pytest.raises(ValueError):
            optimizer.load_noise_state({**optimizer.noise_state(), **state})
    assert optimizer.noise_state()["key"] not in str(optimizer.state_dict()).encode()


def test_without_the_key_the_noise_is_new():
    model = model_of()
    optimizer = optimizer_of(model)
    loader = loader_of(seed=2)
    whole, (weights, place, state, noise) = train(model, loader, optimizer, 1, 2)
    outcomes = []
    for key in (False, False, True):
        again, other = model_of(), loader_of(seed=2)
        again.load_state_dict(weights)
        resumed = optimizer_of(again)
        other.load_state_dict(place)
        resumed.load_state_dict(copy.deepcopy(state))
        if key:
            resumed.load_noise_state(noise)
        outcomes.append(train(again, other, resumed, 1)[0][0])
    assert torch.equal(outcomes[2], whole[2])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(outcomes, 2))


@pytest.mark.parametrize("key_first", [False, True])
def test_a_key_of_another_moment_is_refused(key_first):
    """It would draw noise again that was drawn for other sums."""
    optimizer = optimizer_of(model := model_of())
    early = optimizer.noise_state()
    _, (_, _, state, noise) = train(model, loader_of(), optimizer, 1, 2)
    resumed = optimizer_of(model_of())
    loads = [lambda: resumed.load_state_dict(state), lambda: resumed.load_noise_state(early)]
    with pytest.raises(StepError, match=r"of noised step 0, state_dict\(\) of step 2"):
        for load in reversed(loads) if key_first else loads:
            load()
    if not key_first:
        resumed.load_noise_state(noise)
        assert resumed.noise_state() == noise


@pytest.mark.parametrize("rolled_back", [False, True])
@pytest.mark.parametrize("what", ["the data", "the deviation", "nothing"])
def test_noise_is_drawn_again_for_the_same_sums_only(what, rolled_back):
    """Two releases with one noise show the difference of their sums, or the sum."""
    x, released, state = data(8), [], None
    model, optimizer = (first := model_of()), optimizer_of(first)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.noise_state()))
    for turn in range(2):
        if turn and not rolled_back:
            model = model_of(7)
            optimizer = optimizer_of(model)
        if turn:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(copy.deepcopy(state[1]))
            optimizer.load_noise_state(state[2])
            x = x + 0.3 if what == "the data" else x
            optimizer.noise_multiplier = 1.5 if what == "the deviation" else 1.0
        optimizer._privacy.expected_batch_size = 8
        backward(model, x)
        if turn and what != "nothing":
            with pytest.raises(StepError, match="was drawn before in this process"):
                optimizer.step()
            with pytest.raises(StepError, match="without a backward"):  # the sums are gone
                optimizer.step()
            assert optimizer.history == []
        else:
            optimizer.step()
            released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert what != "nothing" or torch.equal(*released)


def test_correlated_noise_is_not_drawn_again_without_the_earlier_steps_part_of_it():
    """The key alone, without the block that it belongs to: the same sum under both, and the difference is noise."""
    loader = fastdp.mechanisms.fixed_order_loader(TensorDataset(data(36)), batch_size=6)
    make = lambda model: fastdp.DPSGD(model, lr=0.1, noise_multiplier=4.0, noise=fastdp.mechanisms.Lambda(0.9))
    model = model_of()
    _, (weights, place, _, noise) = train(model, loader, make(model), 1, 2)
    again = model_of()
    again.load_state_dict(weights)
    loader.load_state_dict(place)
    other = make(again)
    other.load_noise_state(noise)
    with pytest.raises(StepError, match="was drawn before in this process"):
        train(again, loader, other, 1)
    assert other.history == [], "the first step"


@pytest.mark.parametrize("key_first", [False, True])
@pytest.mark.parametrize("ledger", [False, True])
def test_correlated_noise_is_not_drawn_again_in_another_block(ledger, key_first, tmp_path):
    """The first sum of the new block would get a normal alone that the old block's has with others."""
    make = lambda: fastdp.DPSGD(model, lr=0.1, noise_multiplier=4.0, noise=fastdp.mechanisms.Lambda(0.9),
                                ledger=tmp_path / "steps" if ledger else None)  # fmt: skip
    loader = fastdp.mechanisms.fixed_order_loader(TensorDataset(data(36)), batch_size=6)
    model = model_of()
    optimizer = make()
    early = optimizer.noise_state()
    _, (_, place, state, noise) = train(model, loader, optimizer, 1, 2)
    with pytest.raises(StepError, match="take the noise off"):
        optimizer.load_noise_state(early)
    if ledger:
        optimizer.detach()
        optimizer = make()
    loader.load_state_dict(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loads = [lambda: optimizer.load_state_dict(state), lambda: optimizer.load_noise_state(noise)]
        with pytest.raises(StepError, match="take the noise off"):
            for load in reversed(loads) if key_first else loads:
                load()
            train(model, loader, optimizer, 1)
        if not key_first:  # refused before anything was changed
            planned = optimizer._privacy.blocks_after(STEPS - 2, loader.participation, place["step"])
            train(model, loader, optimizer, 1)
            made = list(optimizer._privacy.mechanism.all.values())
            assert [block.steps for block in made] == [STEPS, STEPS - 2]
            assert [block[1:] for block in planned] == [block[1:] for block in made]


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("kept", [0, 2])
def test_noise_that_the_ledger_knows_is_not_drawn_again(correlated, kept, tmp_path):
    """By another process, for other sums: of the first steps, or of those after a checkpoint."""
    options = {"noise": fastdp.mechanisms.Lambda(0.9)} if correlated else {}
    make = lambda model: fastdp.DPSGD(model, lr=0.1, noise_multiplier=4.0, ledger=tmp_path / "steps", **options)
    dataset = TensorDataset(data(36))
    loader = fastdp.mechanisms.fixed_order_loader(dataset, batch_size=6) if correlated else loader_of()
    first = make(model := model_of())
    state, noise = copy.deepcopy(first.state_dict()), first.noise_state()
    _, later = train(model, loader, first, 1, 2)
    state, noise = (later[2], later[3]) if kept else (state, noise)
    last = first.noise_state()
    first.detach()
    second = make(model := model_of(seed=7))
    with pytest.raises(StepError, match="take the noise off"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.load_state_dict(state)
        second.load_noise_state(noise)
        train(model, loader, second, 1)
    second.detach()
    third = make(model := model_of(seed=7))
    third.load_noise_state(last)  # which begins behind them
    train(model, loader, third, 1)


def test_correlated_noise_before_the_first_step_is_not_drawn_again():
    model, loader = model_of(), fastdp.mechanisms.fixed_order_loader(TensorDataset(data(36)), batch_size=6)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=4.0, noise=fastdp.mechanisms.Lambda(0.9))
    state, noise = copy.deepcopy(optimizer.state_dict()), optimizer.noise_state()
    train(model, loader, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(state)
    with pytest.raises(StepError, match="take the noise off"):
        optimizer.load_noise_state(noise)
    train(model, loader, optimizer, 1)  # with a new key


def test_correlated_noise_of_a_later_block_is_not_drawn_again():
    """The block of the loaded state ended there: what came after it was another."""
    model, loader = model_of(), fastdp.mechanisms.fixed_order_loader(TensorDataset(data(36)), batch_size=6)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=4.0, noise=fastdp.mechanisms.Lambda(0.9))
    train(model, loader, optimizer, 1)
    state, noise = copy.deepcopy(optimizer.state_dict()), optimizer.noise_state()
    optimizer.set_clipping(max_grad_norm=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, loader, optimizer, 1)
        optimizer.load_state_dict(state)
        with pytest.raises(StepError, match="take the noise off"):
            optimizer.load_noise_state(noise)
