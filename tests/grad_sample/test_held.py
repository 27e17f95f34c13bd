"""What uses hold until the end of backward: shared inputs count once, adapters keep gradients of their rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.grad_sample.cost_model import DEFAULTS
from fastdp.grad_sample.planner import Planner

from ..cases import Net

B, T, D = 3, 5, 16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def none_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses as small as these are counted and stored as large ones are."""
    monkeypatch.setattr("fastdp.grad_sample.linear.Matmul.abreast_limit", 0)
    monkeypatch.setattr("fastdp.grad_sample.parameter_use._FEW", 0)


@pytest.fixture
def default_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same routes on every machine."""
    monkeypatch.setattr("fastdp.grad_sample.planner.constants", lambda device, short, family: DEFAULTS["cpu"])


@pytest.fixture
def no_storing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No use is fastest by storing per-sample gradients."""
    monkeypatch.setattr(Planner, "fastest", lambda self, shape, device, short: ("direct", "direct"))


def projections() -> Net:
    """Query, key and value of one input."""
    torch.manual_seed(0)
    return Net(
        lambda m, x: m.query(x).tanh() * m.key(x).tanh() * m.value(x).tanh(),
        **{name: nn.Linear(D, D, bias=False) for name in ("query", "key", "value")},
    )


def held_by(model: nn.Module, x: Tensor, budget: int | None) -> tuple[int, str]:
    engine = fastdp.PerSampleGradients(model, memory_budget=budget)
    try:
        model(x).square().mean().backward()
        return engine.planner.held, engine.explain()
    finally:
        engine.detach()


@pytest.mark.parametrize("budget", [None, 10**9])
def test_projections_of_one_input_hold_it_once(budget: int | None, no_storing: None) -> None:
    side = 4 * B * T * D
    held, plan = held_by(projections(), torch.randn(B, T, D), budget)
    assert "materialise" not in plan, plan
    assert held == 4 * side  # the input, and three output gradients
    assert plan.splitlines()[-1] == f"3 uses, {4 * side / 1024:.1f} KiB held until the end of backward"


def test_a_budget_goes_further_with_shared_inputs(no_storing: None) -> None:
    """What fits into the budget is not dropped: with the input counted three times the last use would not fit."""
    side = 4 * B * T * D

    model = Net(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=projections())
    x = torch.randn(B, T, D, requires_grad=True)
    assert "two backwards" not in held_by(model, x, 4 * side)[1]
    assert "two backwards" in held_by(model, x, 4 * side - 1)[1]


def test_adapters_hold_gradients_of_their_rank_alone(default_costs: None) -> None:
    """Nothing wide is held, though the query's and the value's adapters see one input."""
    rank, width, t = 4, 64, 48

    def adapter() -> Net:
        down, up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        frozen = nn.Linear(width, width).requires_grad_(False)
        return Net(lambda m, x: m.frozen(x) + m.up(m.down(x)), frozen=frozen, down=down, up=up)

    def attention() -> Net:
        forward = lambda m, x: torch.softmax(m.query(x) @ x.mT, -1) @ m.value(x)
        return Net(forward, query=adapter(), value=adapter())

    torch.manual_seed(0)
    model = nn.Sequential(attention(), attention())
    held, plan = held_by(model, torch.randn(B, t, width), None)
    assert plan.count("materialise") == 8, plan
    assert held == 8 * 4 * B * rank * width
