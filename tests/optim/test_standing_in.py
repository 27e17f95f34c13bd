"""A record that stands in for a batch without any: the model runs on it, and nothing of it is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastdp

NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2)
    ),
}


@pytest.mark.parametrize("style", ["flat", "layerwise"])
@pytest.mark.parametrize("value", [1.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_record_that_stands_in_counts_for_nothing(network, value, style):
    """Not even by a gradient that is not finite, which 0 times itself would not remove."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    optimizer = fastdp.DPSGD(model, lr=0.5, noise_multiplier=0.0, max_grad_norm=1.0, style=style)
    loader = fastdp.poisson_loader(list(torch.randn(20, 3)), expected_batch_size=0.001, seed=0)
    before = [p.detach().clone() for p in model.parameters()]
    for steps, batch in enumerate(loader, start=1):
        assert len(batch) == 0
        with optimizer._privacy.loader_batch.standing_in():
            model(torch.full((1, 3), value)).sum().backward()
        norms = optimizer.norms if style == "layerwise" else {"all": optimizer.norms}
        assert all(len(own) == 0 for own in norms.values())
        optimizer.step()
        optimizer.zero_grad()
        if steps == 2:
            break
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert optimizer.nonfinite_samples == 0 and optimizer.history[0][2] == 2
