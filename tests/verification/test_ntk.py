"""The empirical NTK under clipping: against autograd's Jacobian, real private steps, and matrices done by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fastdp
from fastdp.errors import SampleMixingError
from fastdp.ntk import ntk, positivity
from fastdp.optim.clipping import Clipping


def model_of(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def batch(n=5):
    made = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=made) * torch.arange(1.0, n + 1)[:, None], torch.arange(n) % 3


def cross_entropy(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


def jacobian(model, x):
    """{parameter: [B C, P]} by torch.func, in float64."""
    twin = copy.deepcopy(model).double()
    found = torch.func.jacrev(lambda p: torch.func.functional_call(twin, p, x.double()))(dict(twin.named_parameters()))
    return {name: part.detach().flatten(0, 1).flatten(1) for name, part in found.items()}


def test_kernel_is_that_of_autograds_jacobian():
    model, (x, y) = model_of(), batch()
    found = ntk(model, x, y, cross_entropy)
    parts = jacobian(model, x)
    for name, part in parts.items():
        assert torch.allclose(found.kernels[name], part @ part.T, rtol=1e-10, atol=1e-12)
    whole = torch.cat(list(parts.values()), 1)
    assert torch.allclose(found.matrix, whole @ whole.T, rtol=1e-10, atol=1e-12)
    assert set(found.layers) == {"0", "2"} and found.size == (5, 3)
    assert torch.allclose(sum(found.layers.values()), found.matrix)
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())


def test_norms_are_those_of_the_engine():
    model, (x, y) = model_of(), batch()
    found = ntk(model, x, y, cross_entropy)
    engine = fastdp.PerSampleGradients(model)
    F.cross_entropy(model(x), y).backward()
    assert torch.allclose(found.norms(found.clipping())[0].float(), engine.norms(), rtol=1e-4)
    engine.detach()


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("style", ["flat", "layerwise", "groups"])
@pytest.mark.parametrize("clipping", ["local", "global", "automatic", lambda n: 0.5 / (1 + n).square()])
def test_predicted_derivative_is_that_of_a_private_step_without_noise(outputs, style, clipping):
    model, (x, y) = model_of(outputs).double(), batch()
    loss = cross_entropy if outputs == 3 else lambda f, y: (f[:, 0] - y).square()
    if style == "groups":  # a group that cuts through a layer
        style = [{"params": ["0.weight", "2.bias"], "max_grad_norm": 0.9},
                 {"params": [model[0].bias, "2.weight"], "max_grad_norm": 0.7}]  # fmt: skip
    found = ntk(model, x, y, loss)
    largest = float(found.norms(found.clipping())[0].max()) / 2
    predicted = found.derivative(found.clipped(clipping, max(largest, 1.0), style))
    rate, x = 1e-7, x.double()
    before = loss(model(x), y).mean()
    optimizer = fastdp.DPSGD(model, lr=rate, noise_multiplier=0.0, max_grad_norm=max(largest, 1.0), style=style,
                             clipping=clipping, expected_batch_size=len(x))  # fmt: skip
    loss(model(x), y).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.detach()
    measured = float((loss(model(x), y).mean() - before).detach()) / rate
    assert measured == pytest.approx(predicted, rel=1e-4, abs=1e-7)
    unclipped = found.derivative(found.matrix)
    assert abs(predicted - unclipped) > 0.01 * abs(unclipped)  # clipping did something


def test_clipped_kernels_by_hand():
    """One linear layer of one output, without bias: H_ij = x_i x_j."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    x, y = torch.tensor([[1.0], [2.0]]), torch.zeros(2)
    found = ntk(model, x, y, lambda f, y: (f[:, 0] - y).square() / 2)  # g = f = (1, 2), norms 1 and 4
    assert torch.allclose(found.matrix, torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double())
    assert torch.allclose(found.clipped("local", 2.0), torch.tensor([[1.0, 1.0], [2.0, 2.0]]).double(), rtol=1e-4)
    assert torch.allclose(found.clipped("global", 2.0), torch.tensor([[1.0, 0.0], [2.0, 0.0]]).double())
    assert found.derivative(found.matrix, "sum") == pytest.approx(-25.0)
    assert found.derivative(found.clipped("local", 2.0)) == pytest.approx(-15.0 / 4, rel=1e-4)
    assert torch.allclose(found.batch_clipped(2.5), found.matrix / 2)
    with pytest.raises(ValueError, match="reduction"):
        found.derivative(found.matrix, "max")


def test_positivity_tells_the_three_apart():
    assert positivity(torch.eye(3))[:3] == (True, True, True)
    skew = torch.tensor([[1.0, -3.0], [3.0, 1.0]])  # x^T A x = |x|^2
    assert positivity(skew)[:3] == (False, True, True)
    sheared = torch.tensor([[1.0, 10.0], [0.0, 1.0]])  # eigenvalues 1 and 1; symmetric part 1 +- 5
    found = positivity(sheared)
    assert found[:3] == (False, False, True) and found.least_quadratic == pytest.approx(-4.0)
    assert positivity(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))[:3] == (True, False, False)
    assert positivity(torch.tensor([[-1.0, -5.0], [5.0, -1.0]])).least_eigenvalue == pytest.approx(-1.0)
    rounded = torch.eye(3).double() - torch.diag(torch.tensor([1 + 1e-12, 0.0, 0.0]))
    assert positivity(rounded)[:3] == (True, True, True)
    for wrong in (torch.zeros(2, 3), torch.full((2, 2), float("nan"))):
        with pytest.raises(ValueError):
            positivity(wrong)


def test_flat_clipping_keeps_the_eigenvalues_positive():
    model, (x, _) = model_of(1), batch()
    found = ntk(model, x, torch.arange(-5.0, 5.0, 2.0), lambda f, y: (f[:, 0] - y).square())
    clipped = positivity(found.clipped("local", 0.5))
    assert not clipped.symmetric and clipped.eigenvalues
    assert positivity(found.clipped("local", 1e6))[:3] == (True, True, True)


def test_a_frozen_part_is_left_out():
    model, (x, y) = model_of(), batch()
    model[0].requires_grad_(False)
    found = ntk(model, x, y, cross_entropy)
    assert set(found.kernels) == {"2.weight", "2.bias"}
    assert torch.allclose(found.matrix, sum(ntk(model_of(), x, y, cross_entropy).kernels[n] for n in found.kernels))
    other = model_of()
    chosen = ntk(other, x, y, cross_entropy, params=other[2].parameters())
    assert torch.allclose(chosen.matrix, found.matrix)
    with pytest.raises(ValueError, match="params"):
        ntk(other, x, y, cross_entropy, params=model.parameters())


def test_what_is_refused():
    model, (x, y) = model_of(), batch()
    with pytest.raises(ValueError, match=r"GiB.*fewer samples"):
        ntk(model, x, y, cross_entropy, memory_limit=1000)
    with pytest.raises(ValueError, match="reduction='none'"):
        ntk(model, x, y, F.cross_entropy)
    with pytest.raises(ValueError, match="outputs"):
        ntk(nn.Sequential(model, nn.Unflatten(1, (3, 1))), x, y, cross_entropy)
    with pytest.raises(ValueError, match="eval"):
        ntk(nn.Sequential(model, nn.Dropout(0.5)), x, y, cross_entropy)
    with pytest.raises(ValueError, match="not all finite"):
        ntk(model, x * math.nan, y, cross_entropy)
    with pytest.raises(SampleMixingError, match="sample 0"):
        ntk(model, x, y, lambda f, y: cross_entropy(f - f.mean(0), y))
    with pytest.raises(SampleMixingError):
        ntk(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), x, y, cross_entropy)


def test_layers_are_those_of_layerwise_clipping():
    model, (x, y) = model_of(), batch()
    found = ntk(model, x, y, cross_entropy)
    rule = Clipping(dict(model.named_parameters()), "local", 0.3, "layerwise")
    assert set(found.layers) == {group.name for group in rule.groups} == set(found.factors(rule))
