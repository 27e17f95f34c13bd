"""torch.compile: what was compiled before the optimizer runs as it is, exactly; what was compiled after is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp import PerSampleGradients
from fastdp.errors import FastDPError, StepError

from ..compiled_models import MODELS, B, D, Way, assert_exact, build, in_place, losses, parts, whole

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("way", [whole, in_place, parts])
def test_exact(name: str, way: Callable[..., Way]) -> None:
    """Compiled again without gradients and after detach, where gradients are ordinary ones."""
    plain, batch = build(name, **({"layers": 2} if way is parts and name == "language" else {}))
    model = way("eager")(copy.deepcopy(plain))
    engine = PerSampleGradients(model)
    for _ in range(2):
        assert_exact(engine, model, plain, batch())
        with torch.no_grad():
            x = batch()
            torch.testing.assert_close(model.eval()(x), plain(x))
            model.train()
    engine.detach()
    x = batch()
    losses(model, x).mean().backward()
    losses(plain, x).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_attaching_says_that_compiled_code_does_not_run() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2))
    model[0].compile(backend="eager")
    with pytest.warns(UserWarning, match=r"1 compiled module\(s\) run as they are, not compiled.*graphed"):
        PerSampleGradients(model)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(D, D), nn.Linear(D, 2), nn.LayerNorm(D)
        self.scale = nn.Parameter(torch.rand(D))
        self.function: Callable[[Tensor, Tensor], Tensor] = scaled

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.norm(self.a(x)), self.scale))


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return F.gelu(x) * scale


def centred(x: Tensor, scale: Tensor) -> Tensor:
    return (x - x.mean(0, keepdim=True)) * scale


def net() -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    return plain, copy.deepcopy(plain)


def _forward(model: Net) -> None:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]


def _function(model: Net) -> None:
    model.function = torch.compile(scaled, backend="eager")


def _inner_in_place(model: Net) -> None:
    model.norm.compile(backend="eager")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", [_forward, _function, _inner_in_place])
def test_compiled_methods_and_functions(way: Callable[[Net], None], late: bool) -> None:
    """They run as plain Python, before the optimizer and after; the user's own setting of torch stays."""
    plain, model = net()
    if not late:
        way(model)
    engine = PerSampleGradients(model)
    if late:
        assert_exact(engine, model, plain, torch.randn(B, D))
        way(model)
    for _ in range(2):
        assert_exact(engine, model, plain, torch.randn(B, D))
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("compiled", ["function", "model"])
def test_compiled_code_that_mixes_samples_is_refused(compiled: str) -> None:
    _, model = net()
    model.function = centred
    if compiled == "function":
        model.function = torch.compile(centred, backend="eager")
    run = torch.compile(model, backend="eager") if compiled == "model" else model
    PerSampleGradients(run)
    for _ in range(2):
        with pytest.raises(FastDPError, match="mean"):
            run(torch.randn(B, D)).sum().backward()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_compiled_losses() -> None:
    """Of a model that was compiled in place: exact. Of a plain model: its uses would go unseen, refused."""
    plain, model = net()
    loss = torch.compile(losses, backend="eager")
    engine = PerSampleGradients(model)
    with pytest.raises(StepError, match="called by a compiled function"):
        loss(model, torch.randn(B, D))
    engine.detach()
    model.compile(backend="eager")
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, torch.randn(B, D), lambda m, x: losses(m, x) if m is plain else loss(m, x))


def test_compiled_afterwards_is_refused() -> None:
    plain, batch = build("lora")
    engine = PerSampleGradients(plain)
    later = torch.compile(plain, backend="eager")
    with pytest.raises(StepError, match="compiled after"):
        later(batch())
    with torch.no_grad():
        later(batch())
    engine.detach()
    later(batch()).sum().backward()
    plain.zero_grad()
    engine = PerSampleGradients(later)  # made anew: taken
    before = copy.deepcopy(plain)
    assert_exact(engine, later, before, batch())


def test_code_compiled_before_that_runs_past_the_engine_makes_no_step() -> None:
    model = nn.Linear(D, 2)
    alias = torch.compile(model, backend="eager")
    alias(torch.randn(B, D)).sum().backward()
    model.zero_grad()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B)
    before = model.weight.detach().clone()
    with pytest.raises(FastDPError):
        alias(torch.randn(B, D)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_model_compiled_afterwards_and_run_as_it_is_is_exact() -> None:
    """While a loader's batch is followed, nothing is compiled."""
    model = nn.Linear(D, 2)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1e9)
    later = torch.compile(model, backend="eager")
    data = torch.utils.data.TensorDataset(torch.randn(40, D))
    for (x,) in fastdp.poisson_loader(data, expected_batch_size=20, steps=1):
        before = copy.deepcopy(model).double()
        later(x).square().sum(1).mean().backward()
        optimizer.step()
        grad = torch.autograd.grad(before(x.double()).square().sum() / 20, before.weight)[0]
        torch.testing.assert_close(before.weight - 0.1 * grad, model.weight.double(), rtol=1e-4, atol=1e-6)


def test_within_public_a_compiled_model_runs() -> None:
    plain, batch = build("lora")
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B)
    x = batch()
    with optimizer.public():
        losses(model, x).mean().backward()
    losses(plain, x).mean().backward()
    found: Any = model
    torch.testing.assert_close(found._orig_mod.head.weight.grad, plain.head.weight.grad)
