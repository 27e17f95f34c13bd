"""Noise and clip schedulers change what the optimizer really does, in every mode."""

from __future__ import annotations

import opacus.schedulers as theirs
import pytest
import torch

from fastdp.compat.opacus import schedulers as ours

from .compat_runs import MODES, clipped_sum, data, model, private, weights

CLIP = {
    "ExponentialGradClip": ({"gamma": 0.5}, [1.0, 0.5, 0.25, 0.125]),
    "StepGradClip": ({"step_size": 2, "gamma": 0.5}, [1.0, 1.0, 0.5, 0.5]),
    "LambdaGradClip": ({"scheduler_function": lambda epoch: 1 / (1 + epoch)}, [1.0, 0.5, 1 / 3, 0.25]),
}
NOISE = {
    "ExponentialNoise": ({"gamma": 0.5}, [1.0, 0.5, 0.25, 0.125]),
    "StepNoise": ({"step_size": 2, "gamma": 0.5}, [1.0, 1.0, 0.5, 0.5]),
    "LambdaNoise": ({"noise_lambda": lambda epoch: 1 / (1 + epoch)}, [1.0, 0.5, 1 / 3, 0.25]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLIP)
def test_clip_schedulers_clip(mode, name):
    """In mode ghost Opacus goes on clipping by the first norm, and adds noise for the new one."""
    options, factors = CLIP[name]
    net = model()
    _, module, optimizer, criterion, loader = private(mode, module=net, batch_size=32, max_grad_norm=0.6)
    scheduler = getattr(ours, name)(optimizer, **options)
    assert isinstance(scheduler, getattr(theirs, name))
    (x, y) = data().tensors
    for factor in factors:
        assert optimizer.max_grad_norm == pytest.approx(0.6 * factor)
        plain = model()
        plain.load_state_dict(net.state_dict())
        want = weights(net) - clipped_sum(plain, x, y, 0.6 * factor) / 32
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
        torch.testing.assert_close(weights(net), want, rtol=1e-5, atol=1e-6)
        scheduler.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NOISE)
def test_noise_schedulers_make_noise_and_are_accounted(mode, name):
    options, factors = NOISE[name]
    net = torch.nn.Linear(100, 100)
    records = torch.utils.data.TensorDataset(torch.zeros(8, 100), torch.zeros(8, dtype=torch.long))
    settings = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "lr": 1.0}
    engine, module, optimizer, criterion, _ = private(mode, module=net, data=records, **settings)
    scheduler = getattr(ours, name)(optimizer, **options)
    for factor in factors:
        before = net.weight.detach().clone()
        optimizer.zero_grad()
        criterion(module(records.tensors[0]), records.tensors[1]).backward()
        optimizer.step()
        std = (net.weight.detach() - before).std().item() * 8  # inputs are zero: the weight gets noise alone
        assert std == pytest.approx(2.0 * factor * 0.5, rel=0.05)
        scheduler.step()
    told = [sigma for sigma, _, steps in engine.accountant.history for _ in range(steps)]
    assert told == pytest.approx([2.0 * factor for factor in factors])


@pytest.mark.parametrize("name", [*CLIP, *NOISE])
def test_a_loaded_schedule_continues_from_its_value(name):
    """Opacus saves the epoch only: the multiplier begins again at its first value."""
    options, factors = (CLIP if name in CLIP else NOISE)[name]
    value = "max_grad_norm" if name in CLIP else "noise_multiplier"
    first, second = (private("hooks", noise_multiplier=1.0, max_grad_norm=1.0)[2] for _ in range(2))
    scheduler = getattr(ours, name)(first, **options)
    for _ in range(2):
        scheduler.step()
    setattr(second, value, 3.0)  # the user's own, which no state overrides
    again = getattr(ours, name)(second, **options)
    again.load_state_dict(scheduler.state_dict())
    assert getattr(second, value) == pytest.approx(3 * factors[2])
    again.load_state_dict(getattr(theirs, name)(second, **options).state_dict())  # a state of Opacus's
    assert again.last_epoch == 0
