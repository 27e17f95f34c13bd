"""Adaptive clipping in mode ghost: the norm follows the quantile, the samples are clipped, the noise is accounted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastdp.compat.opacus.utils.adaptive_clipping import (
    DPLossFastGradientAdaptiveClipping,
    PrivacyEngineAdaptiveClipping,
)
from fastdp.compat.opacus.utils.batch_memory_manager import BatchMemoryManager

from .compat_runs import clipped_sum, data, model, private, weights

pytestmark = pytest.mark.filterwarnings("ignore")


def adaptive(**options):
    settings = {"batch_size": 32, "min_clipbound": 0.01, "max_clipbound": 10.0, **options}
    return private("ghost", PrivacyEngineAdaptiveClipping(accountant="rdp"), **settings)


def step(module, optimizer, criterion, x, y):
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    optimizer.step()


def test_a_step_is_clipped_by_the_norm_before_it():
    """Opacus's adaptive criterion does not clip: one sample scaled by 1000 moves the sum beyond every bound."""
    net = model()
    x, y = data().tensors
    x = x.clone()
    x[0] *= 1000
    want = weights(net) - clipped_sum(net, x, y, 0.5) / 32
    engine, module, optimizer, criterion, _ = adaptive(module=net)
    assert isinstance(criterion, DPLossFastGradientAdaptiveClipping)
    step(module, optimizer, criterion, x, y)
    torch.testing.assert_close(weights(net), want, rtol=1e-5, atol=1e-6)
    assert optimizer.max_grad_norm == module.max_grad_norm != 0.5
    assert engine.accountant.history == [(0.0, 1.0, 1)]


def test_noise_makes_room_for_that_of_the_count():
    size, net = 64, nn.Linear(100, 100)
    records = TensorDataset(torch.zeros(size, 100), torch.zeros(size, dtype=torch.long))
    engine, module, optimizer, criterion, _ = adaptive(
        module=net, data=records, batch_size=size, noise_multiplier=2.0, lr=1.0, min_clipbound=0.5, max_clipbound=0.5
    )
    before = net.weight.detach().clone()
    step(module, optimizer, criterion, *records.tensors)
    std = (net.weight.detach() - before).std().item() * size
    expected = (2.0**-2 - (2 * size / 20) ** -2) ** -0.5
    assert expected > 2.09 and std == pytest.approx(expected * 0.5, rel=0.02)
    assert engine.accountant.history == [(2.0, 1.0, 1)]
    optimizer.noise_multiplier = 1.0  # a scheduler's change holds from the next step on
    before = net.weight.detach().clone()
    step(module, optimizer, criterion, *records.tensors)
    std = (net.weight.detach() - before).std().item() * size
    assert std == pytest.approx((1 - (2 * size / 20) ** -2) ** -0.5 * 0.5, rel=0.02)


def test_physical_batches_count_as_one():
    def run(limit):
        torch.manual_seed(7)
        net = model()
        _, module, optimizer, criterion, loader = adaptive(module=net, noise_multiplier=0.1)
        bounds = []
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=limit, optimizer=optimizer) as batches:
            for _ in range(3):
                for x, y in batches:
                    criterion(module(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                bounds.append(optimizer.max_grad_norm)
        return weights(net), bounds

    whole, parts = run(32), run(5)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-5, atol=1e-6)
    assert parts[1] == pytest.approx(whole[1]) and len(set(parts[1])) == 3


@pytest.mark.parametrize("how", ["ghost", "optimizer"])
@pytest.mark.parametrize("size", [0.01, 100.0])
def test_one_sample_moves_the_count_by_a_half(how, size):
    """Theorem 1 takes 2 unclipped_num_std for the count's noise multiplier: that of a count that one record, added or
    removed, moves by 1/2. And nothing else may depend on the size of a Poisson sample: an empty one is no exception."""

    def moved(samples):
        net = nn.Linear(2, 1, bias=False)
        options = {"max_grad_norm": 1.0, "noise_multiplier": 0.0, "batch_size": 32, "clipbound_learning_rate": 0.2,
                   "target_unclipped_quantile": 0.5, "min_clipbound": 1e-3, "max_clipbound": 1e3}  # fmt: skip
        if how == "ghost":
            _, module, optimizer, _, _ = adaptive(module=net, **options)
            optimizer.quantile.unclipped_num_std = 1e-12
        else:
            _, module, optimizer, _, _ = private(
                "hooks", module=net, clipping="adaptive", unclipped_num_std=1e-12, **options
            )
        module(torch.full((samples, 2), size)).sum(1).mean().backward()
        optimizer.step()
        return -math.log(float(optimizer.max_grad_norm)) / 0.2 * 32

    counts = [moved(samples) for samples in (0, 1, 2, 5)]
    one = 0.5 if size < 1 else -0.5
    assert counts == pytest.approx([0.0, one, 2 * one, 5 * one], abs=1e-6)


def test_bounds_and_arguments():
    _, module, optimizer, criterion, _ = adaptive(min_clipbound=0.4, max_clipbound=0.45)
    x, y = data().tensors
    step(module, optimizer, criterion, x, y)
    assert 0.4 <= optimizer.max_grad_norm <= 0.45
    with pytest.raises(AssertionError, match="Batch size is too small"):
        adaptive(noise_multiplier=4.0)
    with pytest.raises(ValueError, match="clipbounds"):
        adaptive(min_clipbound=2.0, max_clipbound=1.0)
    with pytest.raises(ValueError, match="quantile"):
        adaptive(target_unclipped_quantile=1.5)
