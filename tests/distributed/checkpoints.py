"""A checkpoint of torch.distributed.checkpoint, saved by two processes and taken up by another number of them, or by an
optimizer with other groups."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)

from fastdp.errors import StepError

from .models import adamw, batch, build, loss_of, whole
from .sharded import sharded

FOLDER = "FASTDP_TEST_CHECKPOINT"


def train(model: nn.Module, optimizer: Any, rank: int, world: int, first: int, last: int) -> None:
    for step in range(first, last):
        loss_of(model, batch(step, 6)[rank::world], total=True).backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(model: nn.Module, **options: Any) -> Any:
    return adamw(model, noise_multiplier=1e-9, loss_reduction="sum", eps=1e-3, **options)


def weights(model: nn.Module) -> list[Any]:
    return [whole(p).detach().numpy().copy() for p in model.parameters()]


def save(model: nn.Module, optimizer: Any, folder: str) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Any, folder: str) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def saved(rank: int, world: int) -> list[Any]:
    model = sharded(build())
    optimizer = optimizer_of(model)
    train(model, optimizer, rank, world, 0, 3)
    save(model, optimizer, os.environ[FOLDER])
    train(model, optimizer, rank, world, 3, 5)
    found = [weights(model), optimizer.history, optimizer.noise_state()["key"]]
    load(
        model, optimizer, os.environ[FOLDER]
    )  # back, by the same optimizer: all ranks know that it has made these steps
    assert optimizer._privacy.ledger.spent == [(1e-9, 0.1, 5)]
    train(model, optimizer, rank, world, 3, 4)
    optimizer.detach()
    return found


def taken_up(rank: int, world: int, wrap: Any = sharded) -> list[Any]:
    """From the checkpoint on; the steps after it are made, and counted, again, with a fresh key."""
    model = wrap(build())
    nn.init.zeros_(model.head.weight)
    optimizer = optimizer_of(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without privacy")
        load(model, optimizer, os.environ[FOLDER])
    assert optimizer.history == [(1e-9, 0.1, 3)] and "fastdp" not in optimizer.param_groups[0]
    train(model, optimizer, rank, world, 3, 5)
    found = [weights(model), optimizer.history, optimizer.noise_state()["key"]]
    optimizer.detach()
    return found


def laid_otherwise(rank: int, world: int) -> None:
    """Moments in parts for a whole parameter, and whole ones for parts: torch's step would fail after its noise."""
    states = []
    for wrap in (sharded, lambda model: model):
        model = wrap(build())
        optimizer = adamw(model)
        train(model, optimizer, rank, world, 0, 1)
        states.append(copy.deepcopy(optimizer.state_dict()))
        if len(states) == 2:
            with pytest.raises(StepError, match="set_optimizer_state_dict"):
                optimizer.load_state_dict(states[0])
        optimizer.detach()
    model = sharded(build())
    optimizer = adamw(model)
    with pytest.raises(StepError, match="set_optimizer_state_dict"):
        optimizer.load_state_dict(states[1])
    assert optimizer.history == [] and not optimizer.state
    optimizer.load_state_dict(states[0])
    train(model, optimizer, rank, world, 1, 2)
    assert optimizer.history == [(1.0, 0.1, 2)]
    optimizer.detach()


CASES = {"saved": saved, "taken_up": taken_up}
STATES = {"laid_otherwise": laid_otherwise}
