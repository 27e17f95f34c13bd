"""torch.compile in the many ways that users call it: regions, functions, stances, losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp import PerSampleGradients
from fastdp.errors import FastDPError, StepError

from ..compiled_models import B, D, assert_exact, losses

pytestmark = pytest.mark.usefixtures("fresh")


class Net(nn.Module):
    def __init__(self, out: int = 2) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(D, D), nn.Linear(D, out), nn.LayerNorm(D)
        self.scale = nn.Parameter(torch.rand(D))
        self.function: Callable[[Tensor, Tensor], Tensor] = scaled

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.norm(self.a(x)), self.scale))


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return F.gelu(x) * scale


def centred(x: Tensor, scale: Tensor) -> Tensor:
    return (x - x.mean(0, keepdim=True)) * scale


@pytest.fixture
def stance() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")


def net() -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    return plain, copy.deepcopy(plain)


def test_many_regions_of_one_class_share_their_code(ran: dict[str, int]) -> None:
    """More blocks than torch keeps versions of one function."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Net(D) for _ in range(10)])
    model = copy.deepcopy(plain)
    for block in model:
        block.compile(backend="eager")
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, torch.randn(B, D))
    assert ran["interpreted"] <= 2 and ran["compiled"] >= 28


def test_regions_beyond_the_limit_of_recompilation_run_as_they_are() -> None:
    plain, model = net()
    compiled = torch.compile(model, backend="eager")
    engine = PerSampleGradients(compiled)
    with torch._dynamo.config.patch(recompile_limit=1):
        for training in (True, False, True, False):
            plain.train(training), compiled.train(training)
            assert_exact(engine, compiled, plain, torch.randn(B, D))


def _forward(model: Net) -> None:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]


def _inner_forward(model: Net) -> None:
    model.a.forward = torch.compile(model.a.forward, backend="eager")  # type: ignore[method-assign]


def _function(model: Net) -> None:
    model.function = torch.compile(scaled, backend="eager")


def _inner_in_place(model: Net) -> None:
    model.norm.compile(backend="eager")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", [_forward, _inner_forward, _function, _inner_in_place])
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


def test_a_compiled_function_that_mixes_samples_is_refused() -> None:
    _, model = net()
    model.function = torch.compile(centred, backend="eager")
    PerSampleGradients(model)
    for _ in range(2):
        with pytest.raises(FastDPError, match="mean"):
            model(torch.randn(B, D)).sum().backward()
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("name", ["force_eager", "eager_on_recompile", "eager_then_compile", "disabled"])
def test_where_torch_does_not_compile_the_model_runs_as_it_is(name: str, stance: None) -> None:
    plain, model = net()
    compiled = torch.compile(model, backend="eager")
    engine = PerSampleGradients(compiled)
    with torch._dynamo.config.patch(disable=name == "disabled"):
        if name != "disabled":
            torch.compiler.set_stance(name)
        for _ in range(3):
            assert_exact(engine, compiled, plain, torch.randn(B, D))


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


def test_explain_tells_what_was_compiled_and_why_not() -> None:
    class Picking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[torch.tensor([0, 1, 2]).sort().indices])

    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = nn.Sequential(nn.Linear(D, D), Picking(D, D), Broken(D, 2))
    for layer in model:
        layer.compile(backend="eager")
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B)
    for _ in range(2):
        losses(model, torch.randn(B, D)).mean().backward()
        optimizer.step()
    lines = [line for line in optimizer.explain().splitlines() if line.startswith("torch.compile: ")]
    assert len(lines) == 3
    assert "module '0': compiled for 1 kind(s) of inputs" in lines[0]
    assert "module '1': compiled for 0" in lines[1] and "__getitem__(): the place of the samples" in lines[1]
    assert "module '2' runs as it is, not compiled (" in lines[2]
    plain = PerSampleGradients(nn.Linear(D, 2))
    plain.model(torch.randn(B, D)).sum().backward()
    assert "torch.compile" not in plain.explain()
