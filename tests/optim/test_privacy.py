"""The noise of a private step: of the stated size, fresh, once for a logical batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.ops.noise_reference import Grid


def noise_of(steps=1, **options):
    """The difference of the gradient with and without noise, of a large model, in units of 1 / batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 100))
    sizes = {"expected_batch_size": 8, **options}
    optimizer = fastdp.DPSGD(model, lr=1.0, **sizes)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    (0 * model(torch.ones(4, 200)).sum(1)).mean().backward()
    optimizer.step()
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return (before - after).double()


@pytest.mark.parametrize(
    "options, std",
    [
        ({"noise_multiplier": 1.0, "max_grad_norm": 2.0}, 2.0 / 8),
        ({"noise_multiplier": 0.5, "max_grad_norm": 2.0, "style": "layerwise"}, 1.0 / 8),
        ({"noise_multiplier": 0.5, "max_grad_norm": 20.0, "clipping": "global"}, 10.0 / 8),
        ({"noise_multiplier": 0.5, "max_grad_norm": 2.0, "loss_reduction": "sum"}, 1.0),
        ({"noise_multiplier": 2.0, "style": [{"params": ["0.weight", "0.bias"], "max_grad_norm": 3.0},
                                             {"params": ["1.weight", "1.bias"], "max_grad_norm": 4.0}]}, 10.0 / 8),
    ],
)  # fmt: skip
def test_noise_has_the_stated_deviation(options, std):
    noise = noise_of(**options)
    n = noise.numel()
    assert abs(float(noise.std()) / std - 1) < 5 / math.sqrt(2 * n)
    assert abs(float(noise.mean())) < 5 * std / math.sqrt(n)


def test_noise_is_drawn_afresh_and_a_seed_repeats_it():
    a, b = noise_of(noise_multiplier=1.0), noise_of(noise_multiplier=1.0)
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
    assert torch.equal(noise_of(noise_multiplier=1.0, seed=3), noise_of(noise_multiplier=1.0, seed=3))
    assert not torch.equal(noise_of(noise_multiplier=1.0, seed=3), noise_of(noise_multiplier=1.0, seed=4))


def test_noise_differs_by_step_and_parameter():
    model = nn.ModuleList([nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)])
    net = nn.Sequential(*model)
    optimizer = fastdp.DPSGD(net, lr=1.0, noise_multiplier=1.0, expected_batch_size=1, seed=0)
    drawn = []
    for _ in range(2):
        before = [p.detach().clone() for p in net.parameters()]
        (0 * net(torch.ones(2, 100)).sum(1)).mean().backward()
        optimizer.step()
        drawn += [(b - p.detach()).flatten() for b, p in zip(before, net.parameters(), strict=True)]
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.05


def test_noise_once_for_a_logical_batch():
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    loader = fastdp.poisson_loader(
        TensorDataset(torch.zeros(400, 100)), sample_rate=0.2, max_physical_batch_size=16, steps=1, seed=0
    )
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, max_grad_norm=1.0)
    before = model.weight.detach().clone()
    physical = 0
    for (x,) in loader:
        model.weight.data.copy_(before) if physical == 0 else None
        (0 * model(x).sum(1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        physical += 1
    assert physical > 3 and len(optimizer.history) == 1 and optimizer.history[0] == (1.0, 0.2, 1)
    assert float((before - model.weight).std()) * 80 == pytest.approx(1.0, rel=0.05)


OPTIONS = {"noise_multiplier": 1.3, "max_grad_norm": 0.7, "expected_batch_size": 8}
MAKERS = {
    "fused": lambda model: fastdp.DPSGD(model, lr=0.1, momentum=0.9, **OPTIONS),
    "two passes": lambda model: fastdp.DPAdam(model, lr=0.1, amsgrad=True, **OPTIONS),
    "layerwise": lambda model: fastdp.DPAdamW(model, lr=0.1, style="layerwise", **OPTIONS),
    "privatize": lambda model: fastdp.privatize(torch.optim.RMSprop(model.parameters(), 0.1), model, **OPTIONS),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_released_lies_on_a_grid_with_the_sum(name):
    """No sum is left beside noise that is rounded alone: its low bits would be bare."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = MAKERS[name](model)
    for _ in range(2):
        model(torch.randn(8, 40)).square().sum(1).mean().backward()
        optimizer.step()
        std = 1.3 * optimizer._accounted().clipping.sensitivity
        for p in model.parameters():
            units = p.grad.double() * 8 / Grid.of(std, torch.float32).unit
            assert torch.equal(units, units.round()) and units.abs().max() > 64
        optimizer.zero_grad()
