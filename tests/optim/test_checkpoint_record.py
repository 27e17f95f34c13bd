"""The record of privacy that rides in a checkpoint is of the steps that were made, or it is not taken up."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.errors import StepError

PLAIN = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
PRIVATE = {"sgd": fastdp.DPSGD, "adamw": fastdp.DPAdamW}
OPTIONS = {"sgd": {"lr": 0.1, "momentum": 0.9}, "adamw": {"lr": 0.1}}
GIVEN = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.1, "expected_batch_size": 8}
pytestmark = pytest.mark.filterwarnings("ignore::fastdp.errors.NotVerifiedWarning")


def step(model, optimizer, count=1):
    for _ in range(count):
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()


def kept(state):
    """As it comes from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def private(kind, model):
    return PRIVATE[kind](model, **OPTIONS[kind], **GIVEN)


@pytest.fixture
def saved():
    def make(kind):
        model = nn.Linear(4, 3)
        optimizer = private(kind, model)
        step(model, optimizer, 2)
        state = optimizer.state_dict()
        optimizer.detach()
        return model, kept(state)

    return make


@pytest.mark.parametrize("kind", PLAIN)
def test_an_ordinary_optimizer_does_not_hand_on_a_record_after_steps_of_its_own(kind, saved):
    model, state = saved(kind)
    ordinary = PLAIN[kind](model.parameters(), **OPTIONS[kind])
    ordinary.load_state_dict(state)
    step(model, ordinary, 3)
    optimizer = private(kind, model)
    with pytest.warns(UserWarning, match="saved by an optimizer without privacy"):
        optimizer.load_state_dict(kept(ordinary.state_dict()))
    assert optimizer.history == []


@pytest.mark.parametrize("kind", PLAIN)
def test_a_record_without_steps_after_it_is_taken_up(kind, saved):
    model, state = saved(kind)
    ordinary = PLAIN[kind](model.parameters(), **OPTIONS[kind])
    ordinary.load_state_dict(state)
    optimizer = private(kind, model)
    optimizer.load_state_dict(kept(ordinary.state_dict()))
    assert optimizer.history == [(1.0, 0.1, 2)]
    assert "fastdp" not in optimizer.param_groups[0]


@pytest.mark.parametrize("kind", PLAIN)
def test_flattened_states_of_torch_lose_the_record_and_are_refused(kind):
    from torch.distributed.checkpoint import state_dict as torchs

    model = nn.Linear(4, 3)
    optimizer = private(kind, model)
    step(model, optimizer, 2)
    for options in (torchs.StateDictOptions(flatten_optimizer_state_dict=True), torchs.StateDictOptions()):
        found = torchs.get_optimizer_state_dict(model, optimizer, options=options)
        if options.flatten_optimizer_state_dict:
            with pytest.raises(StepError, match="flatten_optimizer_state_dict=True"):
                torchs.set_optimizer_state_dict(model, optimizer, found, options=options)
        else:
            torchs.set_optimizer_state_dict(model, optimizer, found, options=options)
        assert optimizer.history == [(1.0, 0.1, 2)]
