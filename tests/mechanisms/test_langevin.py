"""DP-SGD as a sampler: the posterior of a conjugate regression, in closed form; what is clipped is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastdp
from fastdp.errors import StepError
from fastdp.mechanisms import check_unclipped, noise_multiplier_for_temperature, temperature

pytestmark = pytest.mark.slow  # `make test-all` runs it


@pytest.mark.parametrize(("momentum", "heat"), [(0.0, 0.5), (0.8, 1.0)])
def test_whole_batches_sample_the_posterior_of_a_linear_regression(momentum: float, heat: float) -> None:
    """Each output is a regression with the same posterior, so one run is as many chains as there are outputs."""
    records, chains, lr, decay, bound = 16, 2000, 0.02, 0.1, 1e6
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(records, 2, generator=draw, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -0.5], dtype=torch.float64) + torch.randn(records, generator=draw, dtype=torch.float64)
    curvature = x.T @ x + records * decay * torch.eye(2, dtype=torch.float64)  # of U, with unit variance
    mean = torch.linalg.solve(curvature, x.T @ y)
    model = nn.Linear(2, chains, bias=False, dtype=torch.float64)
    numbers = dict(lr=lr, max_grad_norm=bound, batch_size=records, records=records, momentum=momentum)
    sigma = noise_multiplier_for_temperature(heat, **numbers)
    assert temperature(noise_multiplier=sigma, **numbers) == pytest.approx(heat)
    optimizer = fastdp.DPSGD(
        model, lr=lr, momentum=momentum, weight_decay=decay, noise_multiplier=sigma, max_grad_norm=bound,
        expected_batch_size=records, sample_rate=1.0, seed=1,
    )  # fmt: skip
    for _ in range(400):
        (0.5 * (model(x) - y[:, None]).square().sum(1)).mean().backward()
        check_unclipped(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    found = model.weight.detach()
    deviations = (heat * torch.linalg.inv(curvature).diagonal()).sqrt()
    assert ((found.mean(0) - mean).abs() < 5 * deviations / chains**0.5).all()
    covariance = torch.cov(found.T)
    expected = heat * torch.linalg.inv(curvature)
    error = (covariance - expected).abs() / torch.outer(deviations, deviations)
    assert error.max() < 0.15, error  # 5 (2 / chains)^0.5 = 0.16 for a variance, and h a / 2 below 0.02


def test_clipped_samples_and_other_clipping_are_refused() -> None:
    model = nn.Linear(3, 1)
    for clipping, match in (("local", "2 of 4 samples"), ("automatic", "changes every gradient")):
        optimizer = fastdp.DPSGD(
            model, lr=0.1, noise_multiplier=1.0, max_grad_norm=5.0, expected_batch_size=4, clipping=clipping
        )
        x = torch.tensor([[1.0], [2.0], [10.0], [20.0]]).expand(4, 3)
        model(x).sum(1).mean().backward()
        with pytest.raises(StepError, match=match):
            check_unclipped(optimizer)
        optimizer.detach()
