"""Clipping functions: their formulas, one's own, and a change between steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fastdp
from fastdp.errors import ClippingError, StepError

from ..runs import backward, data, model_of, steps


def test_set_clipping_changes_factors_and_noise_but_not_the_accounting():
    model = model_of()
    optimizer = fastdp.DPSGD(
        model, lr=0.0, noise_multiplier=1.0, max_grad_norm=0.1, expected_batch_size=6, sample_rate=0.1
    )
    steps(optimizer, model, 1)
    optimizer.set_clipping("global", max_grad_norm=20.0)
    assert optimizer.max_grad_norm == 20.0 and optimizer._privacy.clipping.sensitivity == 20.0
    steps(optimizer, model, 1)
    assert optimizer.history == [(1.0, 0.1, 2)]
    backward(model, data())
    with pytest.raises(StepError, match="between steps"):
        optimizer.set_clipping("local")


def test_a_clipping_function_of_ones_own():
    model = model_of()
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, expected_batch_size=6, clipping=lambda n: 0.5 / (n + 1)
    )
    steps(optimizer, model, 1)
    for wrong, message in (
        (lambda n: n / n, "exceed"),
        (lambda n: n.sum(), "one factor"),
        (lambda n: -2 / n, "exceed"),
    ):
        optimizer.set_clipping(wrong)
        with pytest.raises(ClippingError, match=message):
            backward(model, 100 * data())
        optimizer.zero_grad()


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_a_clipping_norm_made_of_the_batchs_own_norms_is_refused(style):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, style=style, expected_batch_size=7)
    model(torch.randn(7, 4)).square().sum(1).mean().backward()
    norms = optimizer.norms if style == "flat" else next(iter(optimizer.norms.values()))
    optimizer.step()
    for found in (norms.median().item(), norms.mean().item(), norms.quantile(0.9).item(), float(norms.max())):
        with pytest.raises(ClippingError, match="adaptive"):
            optimizer.set_clipping(max_grad_norm=found)
    optimizer.set_clipping(max_grad_norm=2.5)
    optimizer.detach()


FORMULAS = {
    "local": lambda n, r: min(1.0, r / n),
    "global": lambda n, r: float(n <= r),
    "automatic": lambda n, r: r / (n + 0.01),
}


@pytest.mark.parametrize("style", ["flat", "layerwise", "groups"])
@pytest.mark.parametrize("clipping", FORMULAS)
def test_a_step_is_the_sum_of_samples_gradients_times_their_factors(clipping: str, style: str) -> None:
    """By the formulas, of norms of one-sample backwards: some above the clipping norm, some below."""
    model, x = model_of(), data() * torch.tensor([0.01, 0.05, 0.3, 1.0, 3.0, 9.0])[:, None]
    parameters = list(model.parameters())
    alone = [torch.autograd.grad(model(row[None]).square().sum(), parameters) for row in x]
    layers = [parameters] if style == "flat" else [parameters[:2], parameters[2:]]
    bounds = [0.5, 1.5] if style == "groups" else [1.0 / math.sqrt(len(layers))] * len(layers)
    groups = [{"params": layer, "max_grad_norm": bound} for layer, bound in zip(layers, bounds, strict=True)]
    want, seen = [torch.zeros_like(p, dtype=torch.float64) for p in parameters], set()
    for grads in alone:
        for layer, bound in zip(layers, bounds, strict=True):
            mine = [k for k, p in enumerate(parameters) if any(p is q for q in layer)]
            norm = math.sqrt(sum(float(grads[k].double().square().sum()) for k in mine))
            seen.add(norm > bound)
            for k in mine:
                want[k] += FORMULAS[clipping](norm, bound) * grads[k].double()
    assert seen == {True, False}
    before = [p.detach().clone() for p in parameters]
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, max_grad_norm=1.0, clipping=clipping,
        style=groups if style == "groups" else style, loss_reduction="sum",
    )  # fmt: skip
    model(x).square().sum().backward()
    optimizer.step()
    for was, now, total in zip(before, parameters, want, strict=True):
        torch.testing.assert_close((was - now).double(), total, rtol=1e-4, atol=1e-5)


def tiny(norms: torch.Tensor) -> torch.Tensor:
    return torch.full_like(norms, 1e-40)


@pytest.mark.parametrize("clipping", [*FORMULAS, tiny])
def test_samples_that_are_no_numbers_or_zero_have_no_factor(clipping: object) -> None:
    """Of a gradient that is no number in one group in none; of a zero one; where float32 would round the factor."""
    optimizer = fastdp.DPSGD(model_of(), lr=1.0, noise_multiplier=0.0, clipping=clipping, style="layerwise")
    squares = [torch.tensor([math.nan, 0.0, 0.04, math.inf]), torch.tensor([0.04, 0.04, 0.0, 0.04])]
    one, two = optimizer._privacy.clipping.factors([each.double() for each in squares])
    some = callable(clipping)
    assert [float(c) > 0 for c in one] == [False, False, not some, False]
    assert [float(c) > 0 for c in two] == [False, not some, False, False]
