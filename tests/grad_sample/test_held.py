"""What uses hold until the end of backward: shared inputs count once, adapters keep gradients of their rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.grad_sample.cost_model import DEFAULTS, Shape
from fastdp.grad_sample.planner import HeldBytes, Planner

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
    monkeypatch.setattr("fastdp.grad_sample.planner.constants", lambda device, short: DEFAULTS["cpu"])


@pytest.fixture
def no_storing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No use is fastest by storing per-sample gradients."""
    monkeypatch.setattr(Planner, "fastest", lambda self, shape, device, short: ("direct", "direct"))


class Projections(nn.Module):
    """Query, key and value of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x).tanh() * self.key(x).tanh() * self.value(x).tanh()


def held_by(model: nn.Module, x: Tensor, budget: int | None) -> tuple[int, str]:
    engine = fastdp.PerSampleGradients(model, memory_budget=budget)
    try:
        model(x).square().mean().backward()
        return engine.planner.held, engine.explain()
    finally:
        engine.detach()


def test_memory_is_counted_once() -> None:
    held, x = HeldBytes(), torch.zeros(4, 6)
    assert held.hold([x, x.view(24), x.mT]) == x.nbytes and held.adds([x[:]]) == 0
    assert held.adds([x[:2], torch.zeros(3)]) == 2 * 6 * 4 + 12  # a part is not known to lie in the whole
    assert held.adds([torch.zeros(1).expand(1000)]) == 4  # no more than its storage
    assert held.bytes == x.nbytes


@pytest.mark.parametrize("budget", [None, 10**9])
def test_projections_of_one_input_hold_it_once(budget: int | None, no_storing: None) -> None:
    torch.manual_seed(0)
    side = 4 * B * T * D
    held, plan = held_by(Projections(), torch.randn(B, T, D), budget)
    assert "materialise" not in plan, plan
    assert held == 4 * side  # the input, and three output gradients
    assert plan.splitlines()[-1] == f"3 uses, {4 * side / 1024:.1f} KiB held until the end of backward"


def test_a_budget_goes_further_with_shared_inputs(no_storing: None) -> None:
    """What fits into the budget is not dropped: with the input counted three times the last use would not fit."""
    side = 4 * B * T * D

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Projections()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(B, T, D, requires_grad=True)
    assert "two backwards" not in held_by(model, x, 4 * side)[1]
    assert "two backwards" in held_by(model, x, 4 * side - 1)[1]


def test_what_is_held_already_is_not_replaced() -> None:
    """Storing a use's gradients frees no input that another use holds."""
    planner = Planner()
    a, g = torch.zeros(8, 64, 64), torch.zeros(8, 64, 64)
    assert planner.adds(a, g) == a.nbytes + g.nbytes
    planner.hold([a])
    assert planner.adds(a, g) == g.nbytes
    planner.begin()
    assert planner.adds(a, g) == a.nbytes + g.nbytes


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("t", [128, 2048])
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("d", [768, 4096])
@pytest.mark.parametrize("size", [2, 4])
def test_adapters_are_stored(batch: int, t: int, rank: int, d: int, size: int, default_costs: None) -> None:
    """A of [r, d] and B of [d, r], of 16- and 32-bit inputs: at most a quarter of what they replace."""
    for i, o in ((d, rank), (rank, d)):
        shape, replaced = Shape("linear", batch, t, i, o), size * batch * t * (i + o)
        assert shape.gradient_bytes() <= replaced / 4
        assert Planner().materialises(shape, replaced, CPU, size == 2)


def test_adapters_hold_gradients_of_their_rank_alone(default_costs: None) -> None:
    """Nothing wide is held, though the query's and the value's adapters see one input."""
    rank, width, t = 4, 64, 48

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(width, width).requires_grad_(False)
            self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(x) + self.up(self.down(x))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.value = Adapter(), Adapter()

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.query(x) @ x.mT, -1) @ self.value(x)

    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    held, plan = held_by(model, torch.randn(B, t, width), None)
    assert plan.count("materialise") == 8, plan
    assert held == 8 * 4 * B * rank * width
