"""Noise and clip schedulers change what the optimizer really does, in every mode."""

from __future__ import annotations

import math

import opacus.schedulers as theirs
import pytest
import torch

from fastdp.compat.opacus import PrivacyEngine
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
def test_a_loaded_schedule_goes_on_where_it_stood(name, tmp_path):
    """Opacus saves the epoch only: the multiplier begins again at its first value."""
    options, factors = (CLIP if name in CLIP else NOISE)[name]
    value = "max_grad_norm" if name in CLIP else "noise_multiplier"
    which = "grad_clip_scheduler" if name in CLIP else "noise_scheduler"
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    engine, module, optimizer, _, _ = private("hooks", **settings)
    scheduler = getattr(ours, name)(optimizer, **options)
    for _ in range(2):
        scheduler.step()
    state = {k: v for k, v in scheduler.state_dict().items() if not callable(v)}
    assert state["last_epoch"] == 2 and state["factor"] == pytest.approx(factors[2])
    if not any(callable(v) for v in scheduler.state_dict().values()):
        engine.save_checkpoint(path=tmp_path / "run", module=module, optimizer=optimizer, **{which: scheduler})
    _, new_module, new_optimizer, _, _ = private("hooks", **settings)
    setattr(new_optimizer, value, 3.0)  # the user's own, which no state overrides
    again = getattr(ours, name)(new_optimizer, **options)
    if (tmp_path / "run").exists():
        engine.load_checkpoint(path=tmp_path / "run", module=new_module, optimizer=new_optimizer, **{which: again})
    else:
        again.load_state_dict(state)
    assert getattr(new_optimizer, value) == pytest.approx(3 * factors[2])
    if not any(callable(v) for v in state.values()) and "Lambda" not in name:
        again.step()
        assert getattr(new_optimizer, value) == pytest.approx(3 * factors[3])
    old = getattr(theirs, name)(new_optimizer, **options).state_dict()  # a state of Opacus's
    again.load_state_dict(old)
    assert again.last_epoch == 0


def test_the_optimizer_must_have_what_is_scheduled():
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="max_grad_norm"):
        ours.ExponentialGradClip(plain, gamma=0.9)
    with pytest.raises(ValueError, match="noise_multiplier"):
        ours.ExponentialNoise(plain, gamma=0.9)


@pytest.mark.filterwarnings("ignore")
def test_epsilon_of_a_schedule_is_composed():
    engine, module, optimizer, criterion, loader = private(
        "hooks", PrivacyEngine(accountant="rdp"), noise_multiplier=4.0
    )
    scheduler = ours.ExponentialNoise(optimizer, gamma=0.5)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
        scheduler.step()
    spent = engine.get_epsilon(1e-3)
    assert math.isfinite(spent)
    engine.accountant.history = [(4.0, 0.25, 4)]
    assert spent > engine.get_epsilon(1e-3) > 0
