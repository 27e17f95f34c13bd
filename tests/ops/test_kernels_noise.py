"""Noise and fused updates by Triton's kernels, which serve a GPU without nvcc, against the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.ops import noise as plain
from fastdp.ops import registry
from fastdp.ops import step as plain_step
from fastdp.ops.updates import SGD, Adam, implementation

from .kernels_truth import DEVICE

pytest.importorskip("triton")
from fastdp.kernels import noise, step

from .by_triton import launches

KEY = plain.words_of(bytes(range(32)))
# (the interpreter cuts off where a card rounds to bfloat16)
HALF_UNIT = {
    torch.float32: 2**-24, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7, torch.float16: 2**-11,
    torch.float64: 2**-53,
}  # fmt: skip
SIZES, OFFSETS = (1, 70, 800, 0, 1600), [0, 5, 1000, 1900, 2000]
ADAM = dict(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, t=3)


def _close(found: Tensor, truth: Tensor, slack: float) -> bool:
    """Within a rounding to the type, and the normals' own error."""
    return bool(((found.double() - truth).abs() <= 1.01 * HALF_UNIT[found.dtype] * truth.abs() + slack).all())


@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize(
    ("count", "offset", "number"),
    [(0, 3, 0), (1, 0, 0), (700, 5, 3), (1537, 767, (1 << 47) + 5), (769, (1 << 61) + 11, 1 << 33)],
)
def test_noise_is_that_of_the_reference(dtype: torch.dtype, count: int, offset: int, number: int) -> None:
    slack = 1e-13 if dtype == torch.float64 else 8.6 * 7e-7 * 1.5
    wanted = torch.empty(count, dtype=torch.float64, device=DEVICE)
    plain._noise(wanted, 1.5, KEY, number, offset)
    found = torch.full((count,), math.nan, dtype=dtype, device=DEVICE)
    noise.noise_(found, 1.5, KEY, number, offset)
    assert _close(found, wanted, slack)
    total = torch.randn(count, device=DEVICE).to(dtype)
    wanted = total.double()
    plain._add_noise(wanted, 1.5, 0.25, KEY, number, offset)
    noise.add_noise_(total, 1.5, 0.25, KEY, number, offset)
    assert _close(total, wanted, slack)


def test_parts_are_those_of_the_whole() -> None:
    whole, part = (torch.full((n,), math.nan, device=DEVICE) for n in (2000, 300))
    noise.noise_(whole, 1.0, KEY, 4, 90)
    noise.noise_(part, 1.0, KEY, 4, 90 + 700)
    assert torch.equal(part, whole[700:1000])
    view = torch.full((2100,), math.nan, device=DEVICE)[3:2003]  # not aligned
    noise.noise_(view, 1.0, KEY, 4, 90)
    assert torch.equal(view, whole) and bool(view.isfinite().all())


def test_the_size_of_noise_is_rounded_up() -> None:
    assert noise.rounded_up(0.1, torch.float32) >= 0.1 and noise.rounded_up(0.5, torch.float32) == 0.5
    with pytest.raises(ValueError, match="finite as a float32"):
        noise.noise_(torch.empty(3, device=DEVICE), 1e39, KEY, 0)


def _step(kernel: Callable[..., None], reference: Callable[..., None], states: int, kinds: tuple[Any, Any],
          options: dict[str, Any]) -> None:  # fmt: skip
    param, state = kinds
    total = torch.float64 if param == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    draw = lambda dtype: [torch.randn(n, generator=generator).to(dtype).to(DEVICE) for n in SIZES]
    lists = [draw(param), draw(total), *([x.abs() for x in draw(state)] for _ in range(states))]
    found, wanted = ([[t.clone() for t in each] for each in lists] for _ in range(2))
    shared = {"key": KEY, "step": 7, "std": 0.8, "scale": 0.25, "lr": 0.1, "keep_grads": True, **options}
    kernel(*found, OFFSETS, **shared)
    reference(*wanted, OFFSETS, **shared)
    for name, mine, others in zip(("weights", "gradients", "state", "state"), found, wanted, strict=False):
        for a, b in zip(mine, others, strict=True):
            # two roundings: the reference rounds sums and products of 16-bit states on its way
            assert bool(((a.double() - b.double()).abs() <= 4 * HALF_UNIT[a.dtype] * b.double().abs() + 4e-6).all()), (
                name
            )


KINDS = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64), (torch.float16, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_adamw(kinds: tuple[Any, Any]) -> None:
    reference = implementation(Adam, plain_step._reference)
    _step(step.noisy_adamw_step_, reference, 2, kinds, {**ADAM, "decoupled": True, "maximize": False})


@pytest.mark.parametrize("options", [{"decoupled": False}, {"maximize": True, "keep_grads": False}], ids=str)
def test_options_of_adamw(options: dict[str, Any]) -> None:
    reference = implementation(Adam, plain_step._reference)
    _step(step.noisy_adamw_step_, reference, 2, KINDS[0], {**ADAM, "decoupled": True, "maximize": False, **options})


def test_states_of_two_types_are_refused_before_anything_is_written() -> None:
    p, total = torch.ones(9, dtype=torch.bfloat16, device=DEVICE), torch.ones(9, device=DEVICE)
    draw = {"key": KEY, "step": 0, "std": 1.0, "scale": 1.0, "lr": 0.1}
    with pytest.raises(ValueError, match="all be of one type"):
        step.noisy_adamw_step_([p], [total], [torch.zeros_like(p)], [torch.zeros_like(total)], [0], **draw, **ADAM)
    assert bool((p == 1).all()) and bool((total == 1).all())


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_sgd(kinds: tuple[Any, Any]) -> None:
    reference = implementation(SGD, plain_step._reference)
    _step(step.noisy_sgd_step_, reference, 1, kinds, dict(momentum=0.9))


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "first": True},
     {"momentum": 0.9, "dampening": 0.3, "maximize": True}],
    ids=str,
)  # fmt: skip
def test_options_of_sgd(options: dict[str, Any]) -> None:
    reference = implementation(SGD, plain_step._reference)
    _step(step.noisy_sgd_step_, reference, 1, KINDS[0], options)


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are counted in the interpreter")
def test_one_launch_updates_all_parameters_of_a_type() -> None:
    """The reference takes 714 calls for 1.6 million elements: some 350,000 for a large model's step."""
    params = [torch.randn(n) for n in (5, 30, 7, 800)]
    sums, averages, squares = ([torch.rand(len(p)) for p in params] for _ in range(3))
    with launches() as found:
        step.noisy_adamw_step_(
            params, sums, averages, squares, [0, 5, 35, 42], key=KEY, step=0, std=1.0, scale=1.0, lr=0.1, **ADAM
        )
    assert found == {"step_kernel": 1}


def test_they_serve_where_nvcc_built_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "native_cuda", lambda: "not built")
    for name in ("noise_", "add_noise_", "noisy_sgd_step_", "noisy_adamw_step_"):
        kernel = registry.OPERATORS[name].kernels["cuda"]
        fresh = registry.Kernel(kernel.backend, lambda: registry.native_cuda(), kernel.instead)
        assert fresh.serves() == "Triton" and fresh.load() is kernel.instead.load()
