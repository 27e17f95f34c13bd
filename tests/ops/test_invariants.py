"""The invariants that make a step private: properties over random shapes, data and clipping."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import fastdp
from fastdp.errors import SampleMixingError

from .. import cases
from ..truth import norms_of, take, truth

FUNCTIONS = ("local", "global", "automatic")
STYLES = ("flat", "layerwise")


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def clipped_sum(model: nn.Module, x: torch.Tensor, scale: float = 1.0, **options: object) -> dict[str, torch.Tensor]:
    """The sum that the optimizer would noise, read off a step with lr 1 and no noise."""
    options = {"max_grad_norm": 1.0, **options}
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, loss_reduction="sum", **options)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (model(x).square().flatten(1).sum(1) * scale).sum().backward()
    optimizer.step()
    sums = {n: before[n].double() - p.detach().double() for n, p in model.named_parameters()}
    grads = {n: p.grad.double() for n, p in model.named_parameters()}
    optimizer.detach()
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(before[n])
            p.grad = None
    assert set(sums) == set(grads)
    return grads


def norm(sums: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in sums.values()))


@settings(max_examples=30, deadline=None)
@given(
    scale=st.floats(1e-3, 1e6),
    radius=st.floats(1e-3, 1e3),
    clipping=st.sampled_from(FUNCTIONS),
    style=st.sampled_from(STYLES),
    seed=st.integers(0, 99),
)
def test_one_sample_contributes_at_most_r(scale, radius, clipping, style, seed):
    """Rounding included: the norm of one sample's clipped gradient, in float64, is at most R."""
    torch.manual_seed(seed)
    x = torch.randn(1, 4, 6)
    sums = clipped_sum(mlp(seed), x, scale, clipping=clipping, style=style, max_grad_norm=radius)
    assert norm(sums) <= radius


@settings(max_examples=20, deadline=None)
@given(
    clipping=st.sampled_from(FUNCTIONS), style=st.sampled_from(STYLES), seed=st.integers(0, 99), row=st.integers(0, 4)
)
def test_removing_or_replacing_one_sample(clipping, style, seed, row):
    torch.manual_seed(seed)
    x = 3 * torch.randn(5, 4, 6)
    model = mlp(seed)
    whole = clipped_sum(model, x, clipping=clipping, style=style)
    rest = clipped_sum(model, torch.cat([x[:row], x[row + 1 :]]), clipping=clipping, style=style)
    assert norm({n: whole[n] - rest[n] for n in whole}) <= 1 + 1e-5
    other = x.clone()
    other[row] = 100 * torch.randn(4, 6)
    replaced = clipped_sum(model, other, clipping=clipping, style=style)
    assert norm({n: whole[n] - replaced[n] for n in whole}) <= 2 + 1e-5


def test_groups_of_ones_own_and_their_sensitivity():
    model = mlp()
    style = [
        {"params": ["0.weight", "0.bias"], "max_grad_norm": 0.3, "name": "first"},
        {"params": [model[1].weight, model[1].bias, *model[3].parameters()], "max_grad_norm": 0.4},
    ]
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, loss_reduction="sum", style=style)
    (1e3 * model(torch.randn(1, 6)).square().sum()).backward()
    assert set(optimizer.norms) == {"first", "group1"}
    optimizer.step()
    first = norm({n: p.grad.double() for n, p in model.named_parameters() if n.startswith("0")})
    second = norm({n: p.grad.double() for n, p in model.named_parameters() if not n.startswith("0")})
    assert 0.3 * (1 - 1e-4) < first <= 0.3 and 0.4 * (1 - 1e-4) < second <= 0.4
    assert optimizer._privacy.clipping.sensitivity == pytest.approx(0.5)


@pytest.mark.parametrize(
    "name", ["linear_3d_bias", "conv2d_padding", "embedding_repeated", "mha_self", "lstm_plain", "weight_norm"]
)
def test_norms_do_not_depend_on_the_other_samples(name):
    model, batch, losses = cases.build(name)
    engine = fastdp.PerSampleGradients(model)
    losses(model, batch).mean().backward()
    together = engine.norms()
    for i in range(cases.B):
        rows = [(i + k) % cases.B for k in range(cases.B)]
        losses(model, take(batch, rows)).mean().backward()
        assert float(engine.norms()[0]) == pytest.approx(float(together[i]), rel=1e-5)
        losses(model, take(batch, [i])).mean().backward()
        assert float(engine.norms()[0]) == pytest.approx(float(together[i]), rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("clipping", FUNCTIONS)
@pytest.mark.parametrize("style", STYLES)
def test_a_sample_that_is_not_finite_contributes_nothing(bad, clipping, style):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6)
    model = mlp()
    rest = clipped_sum(model, x[[0, 1, 3]], clipping=clipping, style=style)
    x[2, 1, 3] = bad
    whole = clipped_sum(model, x, clipping=clipping, style=style)
    for n, t in whole.items():
        assert torch.isfinite(t).all()
        assert torch.allclose(t, rest[n], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    "conv2d_padding conv2d_large_image embedding_repeated mha_self group_norm tied_embedding_head weight_norm "
    "stack_of_matrices".split(),
)
def test_not_finite_in_every_kind_of_use(name):
    """NaN in one sample's loss: 0 * NaN must not reach the sum of any kind of use."""
    model, batch, losses = cases.build(name)
    factors = torch.ones(cases.B)
    engine = fastdp.PerSampleGradients(model)
    weights = torch.tensor([1.0, float("nan"), 1.0])
    (losses(model, batch) * weights).mean().backward()
    norms = engine.norms()
    assert torch.isfinite(norms).tolist() == [True, False, True]
    factors[1] = 0
    sums = engine.clipped_sum(factors)
    engine.detach()
    exact = truth(model, batch, losses)
    for n, g in exact.items():
        want = g[0] + g[2]
        assert torch.allclose(sums[n].double(), want, rtol=1e-4, atol=1e-6 * float(norms_of(exact).max())), n


@pytest.mark.parametrize(
    "layer, x",
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(4, 3, 6, 6)),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)), torch.randn(4, 3)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)), torch.randn(4, 3, 6, 6)),
    ],
)
def test_layers_that_mix_samples_are_refused_by_name(layer, x):
    engine = fastdp.PerSampleGradients(layer)
    with pytest.raises(SampleMixingError, match="module '1'"):
        layer(x)
    layer.eval()
    layer(x).square().mean().backward()
    assert engine.norms().shape == (4,)


MIXERS = {
    "mean": lambda x: x - x.mean(0),
    "mean_keepdim": lambda x: x - x.mean(0, keepdim=True),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "contrastive": lambda x: x @ x.T,
    "shuffle": lambda x: x + x[torch.tensor([1, 0, 3, 2])],
    "flip": lambda x: x * x.flip(0),
    "roll": lambda x: x + x.roll(1, 0),
    "first": lambda x: x + x[0],
    "norm": lambda x: x / x.norm(),
    "transposed": lambda x: x.T.reshape(4, 4),
    "sort": lambda x: x.sort(0)[0],
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape),
    "other_dimension": lambda x: x.unsqueeze(0) * x.unsqueeze(1),
}


@pytest.mark.parametrize("name", MIXERS)
def test_operations_that_mix_samples_are_refused(name):
    """All dimensions have the size of the batch, so that shapes tell nothing."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    model = cases.Net(lambda m, x: m.b(MIXERS[name](m.a(x))), a=a, b=b)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError, match="Net|module"):
        model(torch.randn(4, 4)).square().sum(1).mean().backward()
    engine.detach()
