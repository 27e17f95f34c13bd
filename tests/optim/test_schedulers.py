"""What stands in a loop beside a private optimizer: schedulers, averages, teachers, other models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import fastdp

from ..by_hand import EXPECTED, Loop, network, records
from ..data.test_loop_checks import Q, backward, loader_of, sgd

SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 4)], milestones=[3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_torchs(name):
    """The same weights as torch's optimizer under the same schedule, where nothing is clipped or noised."""
    plain, private = network(), network()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.05)
    ours = fastdp.DPAdamW(private, lr=0.05, noise_multiplier=0.0, max_grad_norm=1e4, expected_batch_size=EXPECTED)
    x, y = records()[:EXPECTED]
    for model, optimizer in ((plain, theirs), (private, ours)):
        schedule = SCHEDULES[name](optimizer)
        for _ in range(6):
            loss = backward(model, x, y)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(*([float(loss)] if name == "ReduceLROnPlateau" else []))
    assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"])
    for a, b in zip(plain.parameters(), private.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)


def test_averages_and_teachers_beside_the_model():
    """Copies carry no engine; a teacher's forward and an evaluation between physical batches change nothing."""
    model = network()
    truth, optimizer = Loop(model), sgd(model)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    teacher, other = copy.deepcopy(model), nn.Linear(4, 3)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    mean = None
    for x, y in loader_of():
        with torch.no_grad():
            teacher(x)
            average(x)
        backward(model, x, y)
        F.cross_entropy(other(x), y).backward()  # a second model, trained without privacy
        plain.step()
        model.eval()
        with torch.inference_mode():  # in the middle of a logical batch
            model(records()[:7][0])
        model.train()
        optimizer.step()
        truth.see(x, y)
        if optimizer.stepped:
            truth.step()
            average.update_parameters(model)
            flat = nn.utils.parameters_to_vector(model.parameters()).detach()
            mean = flat if mean is None else 0.5 * (mean + flat)
    truth.assert_equal(model)
    assert torch.allclose(nn.utils.parameters_to_vector(average.module.parameters()), mean, atol=1e-6)
    x, y = records()[:3]
    F.cross_entropy(teacher(x), y).backward()  # an ordinary model, with ordinary gradients
    assert all(p.grad is not None for p in teacher.parameters()) and optimizer.history == [(0.0, Q, 4)]


def test_the_last_gradient_does_not_stay_for_an_optimizer_of_ones_own():
    """p.grad between backward and step is None: what is not clipped and noised yet is not to be had."""
    model = network()
    optimizer = fastdp.privatize(
        torch.optim.Adagrad(model.parameters(), lr=0.1), model, noise_multiplier=1.0, expected_batch_size=EXPECTED
    )
    backward(model, *records()[:EXPECTED])
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is None for p in model.parameters())
