"""The invariants that make a step private: properties over random shapes, data and clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fastdp
from fastdp import ops
from fastdp.errors import SampleMixingError

from .. import cases
from ..truth import norms_of, take, truth

FUNCTIONS, STYLES = ("local", "global", "automatic"), ("flat", "layerwise")
ANY = {"clipping": st.sampled_from(FUNCTIONS), "style": st.sampled_from(STYLES), "seed": st.integers(0, 99)}


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def clipped_sum(model: nn.Module, x: Tensor, scale: float = 1.0, **options: Any) -> Tensor:
    """The sum that the optimizer would noise, read off a step with lr 0 and no noise."""
    options = {"max_grad_norm": 1.0, **options}
    optimizer = fastdp.DPSGD(model, lr=0.0, noise_multiplier=0.0, loss_reduction="sum", **options)
    (model(x).square().flatten(1).sum(1) * scale).sum().backward()
    optimizer.step()
    found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    optimizer.detach()
    optimizer.zero_grad()
    return found


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(1e-3, 1e6), radius=st.floats(1e-3, 1e3), **ANY)
def test_one_sample_contributes_at_most_r(scale: float, radius: float, clipping: str, style: str, seed: int) -> None:
    """Rounding included: the norm of one sample's clipped gradient, in float64, is at most R."""
    torch.manual_seed(seed)
    x = torch.randn(1, 4, 6)
    found = clipped_sum(mlp(seed), x, scale, clipping=clipping, style=style, max_grad_norm=radius)
    assert float(found.norm()) <= radius


@settings(max_examples=20, deadline=None)
@given(row=st.integers(0, 4), **ANY)
def test_removing_or_replacing_one_sample(clipping: str, style: str, seed: int, row: int) -> None:
    torch.manual_seed(seed)
    x, options = 3 * torch.randn(5, 4, 6), {"clipping": clipping, "style": style}
    model, other = mlp(seed), x.clone()
    other[row] = 100 * torch.randn(4, 6)
    whole = clipped_sum(model, x, **options)
    rest = clipped_sum(model, torch.cat([x[:row], x[row + 1 :]]), **options)
    assert float((whole - rest).norm()) <= 1 + 1e-5
    assert float((whole - clipped_sum(model, other, **options)).norm()) <= 2 + 1e-5


def test_groups_of_ones_own_and_their_sensitivity() -> None:
    model = mlp()
    style = [
        {"params": ["0.weight", "0.bias"], "max_grad_norm": 0.3, "name": "first"},
        {"params": [model[1].weight, model[1].bias, *model[3].parameters()], "max_grad_norm": 0.4},
    ]
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, loss_reduction="sum", style=style)
    (1e3 * model(torch.randn(1, 6)).square().sum()).backward()
    assert set(optimizer.norms) == {"first", "group1"}
    optimizer.step()
    sizes = [p.grad.double().square().sum() for p in model.parameters()]
    first, second = math.sqrt(sum(sizes[:2])), math.sqrt(sum(sizes[2:]))
    assert 0.3 * (1 - 1e-4) < first <= 0.3 and 0.4 * (1 - 1e-4) < second <= 0.4
    assert optimizer._privacy.clipping.sensitivity == pytest.approx(0.5)


@pytest.mark.parametrize(
    "name", ["linear_3d_bias", "conv2d_padding", "embedding_repeated", "mha_self", "lstm_plain", "weight_norm"]
)
def test_norms_do_not_depend_on_the_other_samples(name: str) -> None:
    model, batch, losses = cases.build(name)
    engine = fastdp.PerSampleGradients(model)
    losses(model, batch).mean().backward()
    together = engine.norms()
    for i in range(cases.B):
        for rows in ([(i + k) % cases.B for k in range(cases.B)], [i]):
            losses(model, take(batch, rows)).mean().backward()
            assert float(engine.norms()[0]) == pytest.approx(float(together[i]), rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("clipping", FUNCTIONS)
@pytest.mark.parametrize("style", STYLES)
def test_a_sample_that_is_not_finite_contributes_nothing(bad: float, clipping: str, style: str) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 5, 6), mlp()
    rest = clipped_sum(model, x[[0, 1, 3]], clipping=clipping, style=style)
    x[2, 1, 3] = bad
    torch.testing.assert_close(clipped_sum(model, x, clipping=clipping, style=style), rest, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    "conv2d_padding conv2d_large_image embedding_repeated mha_self group_norm tied_embedding_head weight_norm "
    "stack_of_matrices lstm_plain".split(),
)
def test_not_finite_in_every_kind_of_use(name: str) -> None:
    """NaN in one sample's loss: 0 * NaN must not reach the sum of any kind of use."""
    model, batch, losses = cases.build(name)
    exact = truth(model, batch, losses)
    engine = fastdp.PerSampleGradients(model)
    (losses(model, batch) * torch.tensor([1.0, float("nan"), 1.0])).mean().backward()
    assert torch.isfinite(engine.norms()).tolist() == [True, False, True]
    sums = engine.clipped_sum(torch.tensor([1.0, 0.0, 1.0]))
    engine.detach()
    for n, g in exact.items():
        assert torch.allclose(sums[n].double(), g[0] + g[2], rtol=1e-4, atol=1e-6 * float(norms_of(exact).max())), n


@pytest.mark.parametrize(
    "layer, x",
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(4, 3, 6, 6)),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)), torch.randn(4, 3)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)), torch.randn(4, 3, 6, 6)),
    ],
)
def test_layers_that_mix_samples_are_refused_by_name(layer: nn.Module, x: Tensor) -> None:
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
    "layer_norm": lambda x: nn.functional.layer_norm(x, x.shape),
    "other_dimension": lambda x: x.unsqueeze(0) * x.unsqueeze(1),
}


@pytest.mark.parametrize("name", MIXERS)
def test_operations_that_mix_samples_are_refused(name: str) -> None:
    """All dimensions have the size of the batch, so that shapes tell nothing."""
    model = cases.Net(lambda m, x: m.b(MIXERS[name](m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError, match="Net|module"):
        model(torch.randn(4, 4)).square().sum(1).mean().backward()
    engine.detach()


@pytest.mark.parametrize(("i", "o"), [(24, 70), (70, 24), (5, 3)])
@pytest.mark.parametrize("positions", [1, 9])
def test_sums_of_several_products_have_factors_of_their_own(i: int, o: int, positions: int) -> None:
    """And a dropped sample of one is dropped there, whatever it holds."""
    torch.manual_seed(0)
    count, batch = 3, 33
    a, g = torch.randn(count * batch, positions, i), torch.randn(count * batch, positions, o)
    for dropped in ([], [0, 40]):
        c = torch.rand(count * batch)
        c[dropped] = 0
        exact = torch.einsum("kb,kbto,kbti->koi", *(t.double().unflatten(0, (count, batch)) for t in (c, g, a)))
        a[dropped] = torch.nan
        torch.testing.assert_close(ops.linear.clipped_sums(a, g, c, count).double(), exact, rtol=1e-5, atol=1e-5)
