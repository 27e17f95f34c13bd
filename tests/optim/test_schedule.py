"""Schedules of clipping and noise: what the optimizer does, what the accountant counts, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.errors import StepError
from fastdp.schedule import Schedule

from ..runs import backward, data, model_of


def optimizer_of(model, **options):
    given = {
        "accountant": "rdp",
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "expected_batch_size": 6,
        "sample_rate": 0.1,
    }
    return fastdp.DPSGD(model, lr=0.1, **{**given, **options})


def step(optimizer, model):
    backward(model, data())
    optimizer.step()
    optimizer.zero_grad()


MIXED = [(0, {"clipping": "automatic", "max_grad_norm": 0.5}),
         (2, {"noise_multiplier": 2.0, "clipping": "global", "max_grad_norm": 50.0}),
         (4, {"style": "layerwise", "noise_multiplier": 3.0})]  # fmt: skip


def test_the_optimizer_follows_and_the_accountant_counts():
    model, schedule = model_of(), Schedule(MIXED)
    optimizer = optimizer_of(model)
    stds, changes = [], []
    optimizer._privacy.release_hook = lambda release: stds.append(release.std)
    for _ in range(6):
        changes.append(schedule.apply(optimizer))
        step(optimizer, model)
    assert changes == [True, False, True, False, True, False]
    rounded = 1 + 2.0**-20 * 6 - 4e-6  # what the rounding of sums adds to the sensitivity
    sensitivities = [0.5, 0.5, 100.0, 100.0, 150.0, 150.0]  # by sigma
    assert stds == pytest.approx([n * rounded for n in sensitivities], rel=1e-12)
    assert optimizer.history == [(1.0, 0.1, 2), (2.0, 0.1, 2), (3.0, 0.1, 2)]
    assert optimizer.history == schedule.history(6, 0.1, noise_multiplier=1.0)
    assert optimizer.epsilon(1e-5) == epsilon_of(schedule.history(6, 0.1, 1.0), 1e-5, "rdp")
    rule = optimizer._privacy.clipping
    assert (rule.clipping, rule.style, rule.max_grad_norm) == ("global", "layerwise", 50.0)
    assert set(optimizer.norms) == {"0", "2"}


def test_nothing_changes_within_a_logical_batch():
    model, schedule = model_of(), Schedule([(0, {"max_grad_norm": 2.0}), (1, {"noise_multiplier": 5.0})])
    optimizer = optimizer_of(model)
    schedule.apply(optimizer, 0)
    backward(model, data())
    assert not schedule.apply(optimizer, 0)  # nothing to change: nothing to refuse
    with pytest.raises(StepError, match="noise_multiplier at step 1.*pending"):
        schedule.apply(optimizer, 1)
    assert optimizer.noise_multiplier == 1.0
    optimizer.step()
    assert schedule.apply(optimizer, 1) and optimizer.noise_multiplier == 5.0


def test_epochs():
    schedule = Schedule([(0, {"clipping": "local"}), (1.5, {"clipping": "global"})], steps_per_epoch=4)
    assert [schedule.at(n)["clipping"] for n in (5, 6)] == ["local", "global"]
    with pytest.raises(ValueError, match="midst"):
        Schedule([(0.3, {"clipping": "local"})], steps_per_epoch=4)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        Schedule([(1.5, {"clipping": "local"})])
    with pytest.raises(ValueError, match="steps_per_epoch"):
        Schedule([(1, {"clipping": "local"})], steps_per_epoch=0)


@pytest.mark.parametrize(
    "entries, match",
    [
        ([], "at least one"),
        ([(3, {"clipping": "local"}), (1, {"clipping": "global"})], "rise: 1 comes after 3"),
        ([(3, {"clipping": "local"}), (3, {"noise_multiplier": 1.0})], "rise"),
        ([(0, {"sigma": 1.0})], "sigma.*noise_multiplier"),
        ([(0, {})], "nothing"),
        ([(-1, {"clipping": "local"})], "from 0 on"),
        ([(True, {"clipping": "local"})], "from 0 on"),
        ([(0, {"clipping": "locl"})], "locl"),
        ([(0, {"style": "layers"})], "layers"),
        ([(0, {"max_grad_norm": 0.0})], "max_grad_norm"),
        ([(0, {"noise_multiplier": float("inf")})], "noise_multiplier"),
        ([(0, {"noise_multiplier": -1.0})], "noise_multiplier"),
        ([(0, {"gamma": None})], "gamma"),
        ([{"clipping": "local"}], "entry"),
    ],
)
def test_what_is_no_schedule(entries, match):
    with pytest.raises(ValueError, match=match):
        Schedule(entries)


def test_what_cannot_be_applied():
    schedule = Schedule([(0, {"clipping": "local"}), (2, {"noise_multiplier": 2.0})])
    model = model_of()
    with pytest.raises(TypeError, match="private optimizer"):
        schedule.apply(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = optimizer_of(model)
    schedule.apply(optimizer, 2)
    with pytest.raises(StepError, match="step 2 and now at 1"):
        schedule.apply(optimizer, 1)
    with pytest.raises(ValueError, match="noise_multiplier="):
        schedule.history(3, 0.1)
    with pytest.raises(ValueError, match="whole number"):
        schedule.at(1.5)
    optimizer.detach()
    with pytest.raises(StepError, match="detached"):
        schedule.apply(optimizer, 3)


def test_a_run_taken_up_goes_on_with_the_settings_of_its_step():
    model, schedule = model_of(), Schedule(MIXED)
    optimizer = optimizer_of(model)
    for _ in range(3):
        schedule.apply(optimizer)
        step(optimizer, model)
    state, weights = optimizer.state_dict(), model.state_dict()
    optimizer.detach()
    again = model_of(seed=5)
    again.load_state_dict(weights)
    resumed, schedule = optimizer_of(again), Schedule(MIXED)
    resumed.load_state_dict(state)
    for _ in range(3):
        schedule.apply(resumed)
        step(resumed, again)
    assert resumed.history == [(1.0, 0.1, 2), (2.0, 0.1, 2), (3.0, 0.1, 2)]
    assert resumed._privacy.clipping.style == "layerwise"


def test_parts_of_a_batch_are_one_step():
    """A loader that hands out logical batches in parts: the schedule counts noised steps."""
    model = nn.Linear(4, 2)
    loader = fastdp.poisson_loader(
        TensorDataset(torch.randn(40, 4)), sample_rate=0.5, max_physical_batch_size=4, seed=0
    )
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    numbers = {"noise_multiplier": np.float64(2.0), "max_grad_norm": np.float64(0.5), "clipping": "global"}
    schedule, parts = Schedule([(1, numbers)]), 0
    for _ in range(2):
        for (x,) in loader:
            schedule.apply(optimizer)
            model(x).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            parts += 1
    assert optimizer.history == [(1.0, 0.5, 1), (2.0, 0.5, 3)] and parts > 8
