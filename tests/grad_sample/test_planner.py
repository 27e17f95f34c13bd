"""The planner: predictions from constants, choices, budgets, and what `explain` says of them."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp import PerSampleGradients
from fastdp.grad_sample import cost_model
from fastdp.grad_sample.cost_model import ROUTES, Shape, fit, seconds, terms
from fastdp.grad_sample.planner import MORE, Planner

from ..routes import BUDGET, FASTEST, constants, forced

CPU = torch.device("cpu")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch):
    """Constants of one's choice."""

    def use(**jobs: list[float]) -> None:
        found = constants(**jobs)
        monkeypatch.setattr("fastdp.grad_sample.planner.constants", lambda device, short: found)

    return use


def test_a_fit_finds_the_constants_of_exact_times() -> None:
    truth = [3e-5, 4e-12, 2e-11, 1e-10]
    shapes = [
        Shape("linear", b, t, i, o) for b in (1, 8) for t in (16, 200) for i, o in ((8, 700), (300, 40), (512, 512))
    ]
    rows = [terms("direct", s) for s in shapes]
    found = fit(rows, [sum(x * k for x, k in zip(row, truth, strict=True)) for row in rows])
    for row in rows:
        exact = sum(x * k for x, k in zip(row, truth, strict=True))
        assert sum(x * k for x, k in zip(row, found, strict=True)) == pytest.approx(exact, rel=0.05)
    assert all(k >= 0 for k in found)


def test_times_are_sums_over_the_jobs_of_a_route() -> None:
    shape = Shape("linear", 2, 10, 30, 20)
    known = constants(gram=[1.0, 0, 0, 0], direct=[0, 1.0, 0, 0], sum=[10.0, 0, 0, 0], per_sample=[3.0, 0, 0, 0],
                      weighted=[0.5, 0, 0, 0])  # fmt: skip
    assert seconds("gram", shape, known) == 11
    assert seconds("direct", shape, known) == 10 + 2 * 2 * 10 * 30 * 20
    assert seconds("materialise", shape, known) == 3.5


def test_the_fastest_route_is_taken(known) -> None:
    shape = Shape("linear", 4, 16, 64, 64)
    known(gram=[1.0, 0, 0, 0], direct=[2.0, 0, 0, 0], sum=[1.0, 0, 0, 0], per_sample=[9.0, 0, 0, 0])
    assert Planner().fastest(shape, CPU, False) == ("gram", "gram")
    known(gram=[3.0, 0, 0, 0], direct=[2.0, 0, 0, 0], sum=[1.0, 0, 0, 0], per_sample=[0.1, 0, 0, 0])
    assert Planner().fastest(shape, CPU, False) == ("materialise", "direct")
    assert Planner().norm_route(shape._replace(t=1), CPU, False) == "T=1"
    grouped = shape._replace(groups=2)
    known(gram=[0.0] * 4, direct=[2.0, 0, 0, 0], sum=[1.0, 0, 0, 0], per_sample=[9.0, 0, 0, 0])
    assert Planner().norm_route(grouped, CPU, False) == "direct"  # gram needs whole rows


def test_memory_decides_what_is_materialised(known) -> None:
    known(gram=[1.0, 0, 0, 0], direct=[1.0, 0, 0, 0], sum=[1.0, 0, 0, 0])  # storing costs nothing
    shape = Shape("linear", 4, 16, 64, 64)
    stored = shape.gradient_bytes()
    assert stored == 4 * 4 * 64 * 64
    free = Planner()
    least = -(-stored // MORE)  # a little more than it replaces may be stored
    assert free.materialises(shape, least, CPU, False) and not free.materialises(shape, least - 1, CPU, False)
    rich = Planner(memory_budget=10 * stored)
    assert rich.materialises(shape, 1, CPU, False)  # more than it replaces, but within the budget
    most, all_of_it = (torch.empty(size, dtype=torch.uint8) for size in (9 * stored + 1, 10 * stored))
    rich.hold([most])
    assert not rich.materialises(shape, 1, CPU, False)
    rich.hold([all_of_it])  # used up: the smaller of the two
    assert rich.materialises(shape, stored + 1, CPU, False) and not rich.materialises(shape, stored, CPU, False)
    rich.begin()
    assert rich.held == 0


def model_and_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    x, y = torch.randn(6, 9, 20), torch.randint(0, 5, (6, 9))
    return (
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(6, 9).mean(1).mean(),
    )


@pytest.mark.parametrize("route", FASTEST)
def test_every_route_gives_the_same_norms_and_sums(route: str) -> None:
    model, loss = model_and_loss()
    truth = PerSampleGradients(model)
    loss().backward()
    rows = truth.materialize()
    truth.detach()
    engine = PerSampleGradients(model, memory_budget=BUDGET)
    with forced(route):
        loss().backward()
    plan = engine.explain()
    assert [line.split("  ")[-4:] for line in plan.splitlines() if route in line].__len__() == 2, plan
    norms = torch.stack([g.double().flatten(1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
    torch.testing.assert_close(engine.norms().double(), norms, rtol=1e-5, atol=0)
    factors = torch.rand(6)
    for name, total in engine.clipped_sum(factors).items():
        torch.testing.assert_close(total, torch.einsum("b,b...->...", factors, rows[name]), rtol=1e-4, atol=1e-6)


def test_explain_with_profile_measures_every_use() -> None:
    model, loss = model_and_loss()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6)
    loss().backward()
    lines = optimizer.explain(profile=True).splitlines()
    assert lines[0].split()[-4:] == ["predicted", "ms", "measured", "ms"]
    weights = [line for line in lines if ".weight" in line]
    assert len(weights) == 2
    for line in weights:
        predicted, measured = (float(v) for v in line.split()[-2:])
        assert predicted > 0 and measured > 0
    assert "ms measured" in lines[-1] and "measured" not in optimizer.explain()


def test_a_calibration_is_kept_and_read_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDP_CALIBRATE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def calibrate(device, dtype, *rest):
        calls.append(dtype)
        return {key: [1.0, 2.0, 3.0, 4.0] for key in cost_model.DEFAULTS["cpu"]}

    monkeypatch.setattr(cost_model, "calibrate", calibrate)
    for _ in range(2):
        cost_model._constants.cache_clear()
        assert set(map(tuple, cost_model.constants(CPU, False).values())) == {(1.0, 2.0, 3.0, 4.0)}
    assert calls == [torch.float32] and len(list((tmp_path / "fastdp").glob("*.json"))) == 1
    for file in (tmp_path / "fastdp").glob("*.json"):
        file.write_text("{broken")
    cost_model._constants.cache_clear()
    cost_model.constants(CPU, False)
    assert len(calls) == 2 and all(json.loads(f.read_text()) for f in (tmp_path / "fastdp").glob("*.json"))
    monkeypatch.setattr(cost_model, "calibrate", lambda *args: None)  # a machine too busy to tell
    cost_model._constants.cache_clear()
    assert cost_model.constants(CPU, True) == cost_model.DEFAULTS["cpu"]
    cost_model._constants.cache_clear()


def test_a_real_calibration_gives_usable_constants() -> None:
    found = cost_model.calibrate(CPU, torch.float32, 60.0)
    assert found is not None and set(found) == set(cost_model.DEFAULTS["cpu"])
    for route in ROUTES:
        times = [seconds(route, Shape("linear", 8, 64, n, n), found) for n in (32, 1024)]
        assert 0 < times[0] < times[1]


def test_depthwise_gradients_are_stored_on_a_cpu_where_they_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner()
    slow = {route: 1.0 if route == "materialise" else 0.1 for route in ROUTES}  # were the predicted times to decide
    monkeypatch.setattr("fastdp.grad_sample.planner.seconds", lambda route, shape, known: slow[route])
    shape = Shape("conv", 4, 56 * 56, 49, 96, 96)
    data = 2 * 4 * 4 * 96 * 56 * 56  # bytes of x and g
    assert planner.materialises(shape, data, CPU, False)
    assert not planner.materialises(shape, int(shape.gradient_bytes() / MORE) - 1, CPU, False)
    assert planner.norm_route(shape, CPU, False) == "direct"
    assert planner.norm_route(shape._replace(o=192), CPU, False) == "direct"  # two outputs a group: as it was
