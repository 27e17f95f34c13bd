"""Kernels of users: compared before they are taken, used by dispatch, engine and planner, and gone when removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp import ops
from fastdp.grad_sample import cost_model
from fastdp.grad_sample.cost_model import Shape
from fastdp.grad_sample.planner import Planner
from fastdp.ops import registry
from fastdp.ops.registry import OPERATORS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    for operator in OPERATORS.values():
        for device in list(operator.own):
            ops.remove_kernel(operator.name, device=device)


def counting(name: str) -> tuple[Callable[..., Any], list[int]]:
    """An operator's reference that says how often it was called."""
    calls: list[int] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return OPERATORS[name].reference(*args, **kwargs)

    return kernel, calls


def test_a_kernel_serves_the_operator_until_it_is_removed() -> None:
    """Also through the dispatcher; other types go to what served before."""
    kernel, calls = counting("linear_norm_sq")
    before = OPERATORS["linear_norm_sq"].served_by("cpu")
    assert ops.register_kernel("linear_norm_sq", device="cpu", dtypes=[torch.float32])(kernel) is kernel
    checked = len(calls)
    a, g = torch.randn(3, 5, 4), torch.randn(3, 5, 2)
    direct, dispatched = ops.linear_norm_sq(a, g), torch.ops.fastdp.linear_norm_sq(a, g)
    assert len(calls) == checked + 2
    ops.linear_norm_sq(a.bfloat16(), g.bfloat16())
    with registry.forced("reference"):
        ops.linear_norm_sq(a, g)
    assert len(calls) == checked + 2
    ops.remove_kernel("linear_norm_sq", device="cpu")
    torch.testing.assert_close(direct, ops.linear_norm_sq(a, g))
    torch.testing.assert_close(dispatched, direct)
    assert len(calls) == checked + 2 and OPERATORS["linear_norm_sq"].served_by("cpu") == before
    with pytest.raises(ValueError, match="no kernel of yours"):
        ops.remove_kernel("linear_norm_sq", device="cpu")


def test_where_fastdp_has_no_kernel() -> None:
    kernel, calls = counting("routed_per_sample")
    ops.register_kernel("routed_per_sample", device="cpu", check=False)(kernel)
    rows = torch.randn(6, 3), torch.randn(6, 2), torch.zeros(6, dtype=torch.long), torch.arange(6) % 2
    torch.ops.fastdp.routed_per_sample(*rows, 1, 2)
    assert len(calls) == 1


# ---------------------------------------------------------------------- refused


def _norm(a: Tensor, g: Tensor, method: str = "auto", *, dtype: torch.dtype | None = None) -> Tensor:
    return OPERATORS["linear_norm_sq"].reference(a, g, method, dtype=dtype)


WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "too small": ("linear_norm_sq", lambda *a, **k: _norm(*a, **k) * (1 - 5e-5), "too small by 5.0e-05"),
    "wrong": ("linear_norm_sq", lambda *a, **k: _norm(*a, **k) * 1.01, "not close"),
    "another type": ("linear_norm_sq", lambda *a, **k: _norm(*a, **k).half(), "float16"),
    "another shape": ("linear_norm_sq", lambda *a, **k: _norm(*a, **k).sum(), r"\[\]"),
    "raises": ("linear_norm_sq", lambda a, g, m="auto", *, dtype=None: a @ g, "raises RuntimeError"),
    "nothing": ("linear_norm_sq", lambda a, g, m="auto", *, dtype=None: None, "returns 0 tensors, not 1"),
    "one of two": ("norm_affine_per_sample", lambda x, g, mean, rstd: x[:, 0].float(), "returns 1 tensors, not 2"),
    "a dropped sample": ("linear_clipped_sum", lambda a, g, c: torch.einsum(
        "b,bto,bti->oi", c.to(a.dtype), *((g, a) if a.dim() == 3 else (g[:, None], a[:, None]))).to(torch.float64 if
        a.dtype == torch.float64 else torch.float32), "nan"),
    "writes": ("square_sum", lambda rows: OPERATORS["square_sum"].reference(rows.mul_(2)) / 4, "left in argument 0"),
    "does not write": ("noise_", lambda *a, **k: None, "left in argument 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_a_wrong_kernel_is_not_taken(case: str) -> None:
    name, kernel, why = WRONG[case]
    with pytest.raises(ValueError, match=why):
        ops.register_kernel(name, device="cpu", dtypes=[torch.float32])(kernel)
    assert not OPERATORS[name].own
    ops.register_kernel(name, device="cpu", dtypes=[torch.float32], check=False)(kernel)  # on request
    with pytest.raises(ValueError, match=why):
        ops.check_kernel(name, device="cpu", dtypes=[torch.float32])


@pytest.mark.parametrize(
    ("words", "name", "device", "options", "kernel"),
    [
        ("did you mean 'linear_norm_sq'", "linear_norm", "cpu", {}, _norm),
        ("device must be 'cpu' or 'cuda', not 'tpu'", "linear_norm_sq", "tpu", {}, _norm),
        ("dtypes", "linear_norm_sq", "cpu", {"dtypes": [torch.int64]}, _norm),
        ("is called as linear_norm_sq", "linear_norm_sq", "cuda", {}, lambda a, g: a),  # also where the device is not
        ("call remove_kernel first", "square_sum", "cpu", {}, torch.sum),
    ],
)
def test_what_is_unknown_is_refused(words: str, name: str, device: str, options: Any, kernel: Any) -> None:
    ops.register_kernel("square_sum", device="cpu")(OPERATORS["square_sum"].reference)
    with pytest.raises(ValueError, match=words):
        ops.register_kernel(name, device=device, **options)(kernel)


def test_a_kernel_for_a_device_that_is_not_here_waits() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    ops.register_kernel("linear_norm_sq", device="cuda")(_norm)
    assert OPERATORS["linear_norm_sq"].served_by("cuda") == "own: _norm"
    assert not OPERATORS["linear_norm_sq"].served_by("cpu").startswith("own")
    with pytest.raises(RuntimeError, match="no cuda device"):
        ops.check_kernel("linear_norm_sq", device="cuda")


# ---------------------------------------------------------------------- engine and planner


def norms_and_sum(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    engine = fastdp.PerSampleGradients(model)
    model(x).square().flatten(1).sum(1).mean().backward()
    found = engine.norms(), list(engine.clipped_sum(torch.ones(len(x))).values())
    engine.detach()
    return found


@pytest.mark.parametrize(
    ("names", "build", "shape"),
    [
        (("linear_norm_sq", "linear_clipped_sum"), lambda: nn.Linear(300, 200), (4, 3, 300)),
        (("linear_norm_sq", "linear_clipped_sum"),
         lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)), (4, 3, 6)),
        (("conv_norm_sq", "conv_clipped_sum"), lambda: nn.Conv2d(32, 64, 3, padding=1), (4, 32, 4, 4)),
        (("norm_affine_per_sample",), lambda: nn.LayerNorm(8), (4, 3, 8)),
    ],
)  # fmt: skip
def test_the_engine_uses_them(names: tuple[str, ...], build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(*shape)
    truth = norms_and_sum(model, x)
    kernels = {name: counting(name) for name in names}
    for name, (kernel, _) in kernels.items():
        ops.register_kernel(name, device="cpu", check=False)(kernel)
    found = norms_and_sum(model, x)
    assert all(calls for _, calls in kernels.values()), {name: len(calls) for name, (_, calls) in kernels.items()}
    torch.testing.assert_close(found, truth)


def test_a_step_uses_it() -> None:
    model = nn.Linear(4, 2)
    optimizer = fastdp.DPAdamW(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=3)
    kernel, calls = counting("noisy_adamw_step_")
    ops.register_kernel("noisy_adamw_step_", device="cpu", check=False)(kernel)
    model(torch.randn(3, 4)).sum(1).mean().backward()
    optimizer.step()
    assert calls


def test_the_planner_measures_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTDP_CALIBRATE", "1")
    slow = {key: [1.0, 0.0, 0.0, 0.0] for key in cost_model.DEFAULT if key.startswith("linear")}
    measured: list[bool] = []

    def calibrate(*_: Any) -> cost_model.Constants:
        measured.append(registry.any_own())
        cheap = "linear gram" if registry.any_own() else "linear direct"
        return {**slow, cheap: [0.0] * 4, "linear per_sample": [9.0] * 4}

    monkeypatch.setattr(cost_model, "calibrate", calibrate)
    monkeypatch.setattr(cost_model, "_path", lambda *_: tmp_path / "costs.json")
    cost_model._constants.cache_clear()
    planner, shape = Planner(), Shape("linear", 2, 8, 16, 16)
    assert planner.norm_route(shape, CPU, False) == "direct"
    ops.register_kernel("linear_norm_sq", device="cpu", check=False)(_norm)
    assert planner.norm_route(shape, CPU, False) == "gram"
    ops.remove_kernel("linear_norm_sq", device="cpu")
    assert planner.norm_route(shape, CPU, False) == "direct"
    assert measured == [False, True]  # our own kernels' times were kept, and the user's not in their place
    cost_model._constants.cache_clear()
