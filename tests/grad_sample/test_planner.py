"""The planner: predictions from constants, choices, budgets, and what `explain` says of them."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.grad_sample import cost_model
from fastdp.grad_sample.cost_model import ROUTES, Shape, seconds
from fastdp.grad_sample.planner import Planner

CPU = torch.device("cpu")


def model_and_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    x, y = torch.randn(6, 9, 20), torch.randint(0, 5, (6, 9))
    return (
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(6, 9).mean(1).mean(),
    )


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

    def calibrate(device, dtype, family):
        calls.append((dtype, family))
        return {key: [1.0, 2.0, 3.0, 4.0] for key in cost_model.DEFAULTS["cpu"] if key.startswith(family)}

    monkeypatch.setattr(cost_model, "calibrate", calibrate)
    for _ in range(2):
        cost_model._constants.cache_clear()
        assert set(map(tuple, cost_model.constants(CPU, False, "linear").values())) == {(1.0, 2.0, 3.0, 4.0)}
    assert calls == [(torch.float32, "linear")] and len(list((tmp_path / "fastdp").glob("*.json"))) == 1
    for file in (tmp_path / "fastdp").glob("*.json"):
        file.write_text("{broken")
    cost_model._constants.cache_clear()
    cost_model.constants(CPU, False, "linear")
    assert len(calls) == 2 and all(json.loads(f.read_text()) for f in (tmp_path / "fastdp").glob("*.json"))
    monkeypatch.setattr(cost_model, "calibrate", lambda *args: None)  # a machine too busy to tell
    cost_model._constants.cache_clear()
    known = {key: values for key, values in cost_model.DEFAULTS["cpu"].items() if key.startswith("conv")}
    assert cost_model.constants(CPU, True, "conv") == known
    cost_model._constants.cache_clear()


@pytest.mark.parametrize("family", ["linear", "conv"])
def test_a_real_calibration_gives_usable_constants(family: str) -> None:
    found = cost_model.calibrate(CPU, torch.float32, family, 60.0)
    assert found is not None and set(found) == {f"{family} {key.split()[1]}" for key in cost_model.DEFAULTS["cpu"]}
    for route in ROUTES:
        times = [seconds(route, Shape(family, 8, 64, n, n), found) for n in (32, 1024)]
        assert 0 < times[0] < times[1]


def test_a_launch_costs_no_layer_anything_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There kernels take many layers in one."""
    known = {f"linear {job}": [0.0, 1.0, 0.0, 0.0] for job in ("gram", "direct", "sum", "per_sample", "weighted")}
    known["linear gram"][0] = 1e12
    monkeypatch.setattr("fastdp.grad_sample.planner.constants", lambda device, short, family: known)
    shape = Shape("linear", 8, 16, 64, 64)  # few positions: gram has less arithmetic
    assert [Planner().norm_route(shape, torch.device(kind), True) for kind in ("cpu", "cuda")] == ["direct", "gram"]


def test_what_is_kept_goes_before_what_is_measured() -> None:
    kept = {f"{family} {job}": [3.0] * 4 for family in ("linear", "conv") for job in ("gram", "direct")}
    try:
        cost_model.keep(CPU, True, kept)
        assert cost_model.constants(CPU, True, "conv") == {"conv gram": [3.0] * 4, "conv direct": [3.0] * 4}
        assert cost_model.constants(CPU, False, "conv") != cost_model.constants(CPU, True, "conv")
    finally:
        cost_model.forget()
    assert len(cost_model.constants(CPU, True, "conv")) == 5


class Twice(nn.Module):
    """A wide layer, used once or twice, of few positions: its gradient is larger than what it is made of."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses, self.layer = uses, nn.Linear(400, 400)

    def forward(self, x):
        for _ in range(self.uses):
            x = torch.tanh(self.layer(x))
        return x


@pytest.mark.parametrize(("batch", "uses", "route"), [(1, 1, "materialise"), (2, 1, "direct"), (1, 2, "direct")])
def test_the_gradient_of_an_only_sample_takes_the_place_of_the_sum(batch: int, uses: int, route: str, monkeypatch):
    known = {f"linear {job}": [0.0, 1.0, 0.0, 0.0] for job in ("direct", "sum", "per_sample", "weighted", "gram")}
    known["linear gram"][1] = 1e9
    monkeypatch.setattr("fastdp.grad_sample.planner.constants", lambda device, short, family: known)
    torch.manual_seed(0)
    model, x = Twice(uses), torch.randn(batch, 96, 400)
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=10.0, expected_batch_size=1)
    truth = []
    for row in x.double():
        own = copy.deepcopy(model).double()
        own(row[None]).sum().backward()
        truth.append(torch.cat([p.grad.flatten() for p in own.parameters()]))
    want = sum(grad * min(1.0, 10.0 / grad.norm()) for grad in truth)
    for _ in range(2):  # the second one is like the first
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        out = model(x)
        out.retain_grad()
        kept = torch.ones_like(out) / batch
        out.sum((1, 2)).mean().backward()
        assert torch.equal(out.grad, kept)
        assert all(f" {route} " in line for line in optimizer.explain().splitlines() if "weight" in line)
        optimizer.step()
        moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
        assert (moved.double() - want).norm() < 1e-5 * want.norm()
        optimizer.zero_grad()
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(before, model.parameters())
    weight = model.layer.weight.detach().clone()
    (model(x) * float("nan")).sum((1, 2)).mean().backward()
    optimizer.step()
    assert torch.equal(weight, model.layer.weight)


def test_gradients_of_the_user_s_are_not_written_to():
    """A large bias of one sample at one position has the output's gradient for its own."""
    model = nn.Linear(4, 20_000)
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=1e-3, expected_batch_size=1)
    out = model(torch.randn(1, 4))
    out.retain_grad()
    out.sum(1).mean().backward()
    optimizer.step()
    assert torch.equal(out.grad, torch.ones_like(out))
