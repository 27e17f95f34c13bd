"""Training under another default dtype of torch: native kernels wrote float32 into memory of the default's size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fastdp

from .. import cases
from ..truth import norms_of, truth
from .test_dtypes import NAMES as SIXTEEN


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


NAMES = [*SIXTEEN, "group_norm", "lstm_plain", "conv2d_large_image", "encoder_layer_True_False"]


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_sums(name: str, default: torch.dtype) -> None:
    """The model and its data are float32 as ever."""
    model, batch, losses = cases.build(name)
    exact = truth(model, batch, losses)
    twin = fastdp.PerSampleGradients(model)
    losses(model, batch).mean().backward()
    factors = torch.linspace(0.2, 1.0, twin.norms().numel())
    plain = twin.clipped_sum(factors)
    twin.detach()
    torch.set_default_dtype(default)
    engine = fastdp.PerSampleGradients(model)
    losses(model, batch).mean().backward()
    norms, sums = engine.norms(), engine.clipped_sum(factors)
    assert norms.dtype == torch.float32
    if default == torch.float64:
        torch.testing.assert_close(norms.double(), norms_of(exact), rtol=1e-4, atol=1e-6)
        for key, total in sums.items():
            error = (total.double() - plain[key].double()).norm() / plain[key].double().norm().clamp(min=1e-6)
            assert error < 1e-4, (key, float(error))
    assert all(total.dtype == plain[key].dtype for key, total in sums.items())


@pytest.mark.parametrize("make", [fastdp.DPSGD, fastdp.DPAdamW])
def test_steps(make: type, default: torch.dtype) -> None:
    def trained(dtype: torch.dtype) -> list[Tensor]:
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        parts = [
            nn.Conv2d(3, 8, 3),
            nn.GroupNorm(2, 8),
            nn.Flatten(),
            nn.Linear(128, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 4),
        ]
        model, x = nn.Sequential(*parts), torch.randn(6, 3, 6, 6)
        torch.set_default_dtype(dtype)
        optimizer = make(model, lr=0.01, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=6)
        for _ in range(2):
            model(x).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(trained(default), trained(torch.float32), strict=True):
        torch.testing.assert_close(a, b)


def test_float64_parameters_cast_before_their_use() -> None:
    """As norms do that compute in float32: the sums are of the parameter's type again."""
    torch.manual_seed(0)
    model = cases.Net(
        lambda m, x: (m.a(x) * (1 + m.scale.float()).double()) * m.own.float(),
        a=nn.Linear(6, 4), scale=cases.P(4), own=cases.P(4),
    ).double()  # fmt: skip
    x = torch.randn(5, 6, dtype=torch.float64)
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=1e9, expected_batch_size=5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    cases.square(model, x).mean().backward()
    optimizer.step()
    optimizer.detach()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(before)
    wanted = torch.autograd.grad(cases.square(model, x).mean(), list(model.parameters()))
    for (name, value), g in zip(before.items(), wanted, strict=True):
        torch.testing.assert_close(value - after[name], g, rtol=1e-5, atol=1e-7)
