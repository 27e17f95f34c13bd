"""Loops by hand: what people write around a private optimizer, and what each of it does."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastdp
from fastdp.errors import StepError

from ..by_hand import EXPECTED, RECORDS, Loop, R, network, records

Q = EXPECTED / RECORDS


@pytest.fixture(autouse=True)
def nothing_left():
    """Loaders and engines of the tests before are gone, which the process is asked about."""
    gc.collect()


def loader_of(limit=4, steps=4, seed=1):
    return fastdp.poisson_loader(
        records(), expected_batch_size=EXPECTED, max_physical_batch_size=limit, steps=steps, seed=seed
    )


def sgd(model, **options):
    return fastdp.DPSGD(model, **{"lr": 1.0, "noise_multiplier": 0.0, "max_grad_norm": R, **options})


def backward(model, x, y, divide=1):
    loss = F.cross_entropy(model(x), y) / divide
    loss.backward()
    return loss


# --------------------------------------------------------------------------- batches and steps


@pytest.mark.parametrize("where", ["after", "before", "between", "model", "never"])
def test_zero_grad_wherever_it_stands(where):
    """Once a step took a batch, dropping gradients drops nothing: physical batches add up to one logical batch."""
    model = network()
    truth, optimizer = Loop(model), sgd(model)
    for x, y in loader_of():
        if where == "before":
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if where == "between":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.see(x, y)
        if optimizer.stepped:
            truth.step()
        if where == "after":
            optimizer.zero_grad()
        if where == "model":
            model.zero_grad()
    assert optimizer.history == [(0.0, Q, 4)] and truth.steps == 4
    truth.assert_equal(model)


def test_accumulation_over_the_loaders_batches_without_a_step_is_refused():
    """Two logical batches in one step: a record in both would count twice."""
    model = network()
    optimizer = sgd(model)
    with pytest.raises(StepError, match="no step"):
        for number, (x, y) in enumerate(loader_of(limit=None), 1):
            backward(model, x, y, divide=2)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.history == []


def test_batches_fetched_ahead_are_refused_even_where_their_sizes_agree():
    model = network()
    optimizer = sgd(model)
    loader = fastdp.poisson_loader(records(), sample_rate=1.0, max_physical_batch_size=8, steps=2)
    batches = iter(loader)
    held = next(batches)
    with pytest.raises(StepError, match="fetches batches ahead"):
        for following in batches:
            backward(model, *held)
            optimizer.step()
            held = following
    assert optimizer.history == []


def test_accumulation_by_hand_adds_up_and_warns():
    """Of an ordinary loader: clipped sums add, and the loss must not be divided by the number of backwards."""
    outcomes = []
    for size in (EXPECTED, EXPECTED // 2):
        model = network()
        truth, optimizer = Loop(model), sgd(model, expected_batch_size=EXPECTED)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, (x, y) in enumerate(DataLoader(records(), batch_size=size), 1):
                backward(model, x, y)
                truth.see(x, y)
                if number * size % EXPECTED == 0:
                    optimizer.step()
                    truth.step()
                    optimizer.zero_grad()
        truth.assert_equal(model)
        assert sum("Divide no loss" in str(w.message) for w in caught) == (size < EXPECTED)
        outcomes.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(*outcomes, atol=1e-6)


# --------------------------------------------------------------------------- what others do to gradients and losses


@pytest.mark.parametrize("how", ["step", "unscale", "fused"])
def test_a_gradient_scaler_is_refused(how):
    """Its scale makes every norm too large; some of torch's optimizers would divide what is clipped by it again."""
    model = network()
    options = {"fused": True} if how == "fused" else {}
    optimizer = fastdp.DPAdamW(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=EXPECTED, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = records()[:EXPECTED]
    before = copy.deepcopy(model.state_dict())
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if how == "unscale":
        scaler.unscale_(optimizer)
    with pytest.raises(StepError, match="GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(StepError, match="without a backward"):
        optimizer.step()  # what was scaled is gone
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and optimizer.history == []
    backward(model, x, y)  # and the optimizer works without
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert optimizer.history == [(0.0, None, 1)]


def test_a_closure_may_not_add_to_backwards_before_it():
    model = network()
    x, y = records()[:EXPECTED]
    optimizer = sgd(model, expected_batch_size=EXPECTED)
    backward(model, x, y, divide=2)
    with pytest.raises(StepError, match="accumulate_grad_batches"):
        optimizer.step(lambda: backward(model, x, y, divide=2))
    optimizer.zero_grad()
    truth = Loop(model)

    def closure():
        optimizer.zero_grad()
        return backward(model, x, y)

    backward(model, x, y)  # which the closure drops
    optimizer.step(closure)
    backward(model, x, y)
    optimizer.step(lambda: None)
    for _ in range(2):
        truth.see(x, y)
        truth.step()
    truth.assert_equal(model)


def test_processes_that_join_later_are_refused(monkeypatch):
    model = network()
    sgd(model, expected_batch_size=EXPECTED)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    with pytest.raises(StepError, match="2 processes"):
        backward(model, *records()[:EXPECTED])
