"""What must hold of correlated noise, which normals of earlier steps are drawn again for: as in step_checks.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.ops import noisy_adamw_step_, noisy_sgd_step_
from fastdp.ops.noise_reference import Grid, reference_noise
from fastdp.ops.registry import OPERATORS

from .noise_truth import nearly_halves
from .step_checks import ADAMW, COMMON, KEY, SMALL, WORDS, On, adamw_state, problem, same, sums_like

FOUR = [39, 2, 2**48 - 1, 0], [-0.5, 1.75, 0.003, -3.0]
PASTS: list[tuple[list[int], list[float]]] = [
    FOUR, ([3], [1.0]), ([4, 4], [1e-12, -900.0]), ([5, 6], [0.0, -0.25]),
    (list(range(70)), [-(0.9**k) for k in range(70)]),
]  # fmt: skip
NAMES = "earlier_steps", "earlier_weights"


def add_noise_(tensor: Tensor, std: float, step: int, offset: int, past: Any) -> Tensor:
    OPERATORS["add_noise_"](tensor, std, 0.25, WORDS, step, offset, *past)
    return tensor


def released(total: Tensor, std: float, step: int, offset: int, past: Any) -> Tensor:
    """By the reference."""
    found = total.detach().cpu().clone()
    OPERATORS["add_noise_"].reference(found, std, 0.25, WORDS, step, offset, *past)
    return found


def options(past: Any) -> dict[str, Any]:
    return dict(zip(NAMES, past, strict=True))


def check_earlier_steps_by_type(on: On) -> None:
    """Bit for bit as by the reference, and as real numbers give it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for number, past in enumerate(PASTS[:1] if on.small else PASTS):
            offset, std = (0, 1023, 12345, 2**45 + 3, 640)[number], (0.37 + 1e-9, 1.9, 64.0, 1.0, 5e-4)[number]
            given = torch.randn(900 if on.small else 3001, generator=torch.Generator().manual_seed(number)).to(dtype)
            found = add_noise_(given.clone().to(on.device), std, 40, offset, past)
            assert same(on, found, released(given, std, 40, offset, past)), (dtype, number)
            if dtype != torch.bfloat16:
                size, unit = Grid.of(std, dtype)
                draws = [*zip(*past, strict=True), (40, 1.0)]
                normal = sum(reference_noise(len(given), KEY, step, offset) * weight for step, weight in draws)
                exact = given.double() + size * unit * normal
                slack = (0.5 + 2e-7 * size * sum(abs(weight) for _, weight in draws)) * unit
                assert bool(((found.cpu().double() * 4 - exact).abs() <= slack).all()), (dtype, number)


def check_what_earlier_steps_leave_open(on: On) -> None:
    """Sums that every element must look at more bits of all draws for, alone and before an update."""
    for dtype, std in ((torch.float32, 0.37 + 1e-9), (torch.float64, 1.9)):
        count = 60 if on.small else 200
        total, halves = nearly_halves(std, count, 6, 77, dtype, FOUR)
        truth = released(total, std, 6, 77, FOUR)
        assert torch.equal(add_noise_(total.clone().to(on.device), std, 6, 77, FOUR).cpu(), truth)
        total, param = total.to(on.device), torch.zeros(count, dtype=dtype, device=on.device)
        noisy_sgd_step_([param], [total], [], [77], **{**COMMON, "std": std}, step=6, **options(FOUR))
        assert torch.equal(total.cpu(), truth) and torch.allclose(param.cpu(), -0.05 * truth, rtol=1e-6, atol=0)
        above = truth.double() / (Grid.of(std, dtype).unit * 0.25) - halves
        assert set(above.tolist()) == {-0.5, 0.5} and above.mean().abs() < 2 / count**0.5


def check_earlier_steps_before_an_update(on: On) -> None:
    """The sums are what noise alone leaves; the rest is the update without noise. A counter moves the earlier steps."""
    counter = torch.tensor([5], device=on.device)
    moved = [step - 5 for step in FOUR[0][:2]], FOUR[1][:2]
    moved[0][1] += 20
    past = [step + 5 for step in moved[0]], moved[1]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        params, offsets = problem(dtype, on.device, SMALL if on.small else [(1023,), (0,), (16, 64), (1700,)])
        sums = sums_like(params, 3)
        truths = [released(s, 0.7, 46, at, past) for s, at in zip(sums, offsets, strict=True)]
        plain = {**COMMON, "std": 0.0, "scale": 1.0}
        for run, rest in ((noisy_sgd_step_, {"momentum": 0.9}), (noisy_adamw_step_, ADAMW)):
            results = []
            for kind in ("step", "counter", "plain"):
                held, total = [p.clone() for p in params], [s.clone() for s in sums]
                states = adamw_state(params)[: 1 if run is noisy_sgd_step_ else 2]
                draw = {**COMMON, "step": 46, **options(past)}
                if kind == "counter":
                    draw = {**COMMON, "step": 41, **options(moved), "counter": counter}
                if kind == "plain":
                    draw, total = {**plain, "step": 0, **options(FOUR)}, [t.clone().to(on.device) for t in truths]
                if run is noisy_adamw_step_:
                    draw["t"] = 2 if kind == "counter" else 7
                run(held, total, *states, offsets, **draw, **rest)
                assert all(torch.equal(t.cpu(), truth) for t, truth in zip(total, truths, strict=True)), (dtype, kind)
                results.append([*held, *(t for state in states for t in state)])
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), dtype


def check_a_first_step_has_none(on: On) -> None:
    """Without earlier steps, or with weights of 0, noise is independent; with its own normals taken back, none."""
    total = torch.randn(800, generator=torch.Generator().manual_seed(1))
    alone = total.clone().to(on.device)
    OPERATORS["add_noise_"](alone, 0.7, 0.25, WORDS, 9, 5)
    for past in (([], []), ([3, 8], [0.0, -0.0])):
        assert torch.equal(add_noise_(total.clone().to(on.device), 0.7, 9, 5, past), alone)
    assert not torch.equal(add_noise_(total.clone().to(on.device), 0.7, 9, 5, ([8], [0.01])), alone)
    unit = Grid.of(0.7, torch.float32).unit
    found = add_noise_(total.clone().to(on.device), 0.7, 9, 5, ([9], [-1.0]))
    assert torch.equal(found.cpu(), (total / unit).round() * (unit * 0.25) + 0.0)


REFUSED: list[tuple[list[int], list[float]]] = [
    ([-1], [0.5]), ([1 << 48], [0.5]), ([1, 2], [0.5]), ([], [0.5]), ([1, 2], [1000.0, -100.0]), ([1], [float("nan")]),
    ([1], [float("inf")]),
]  # fmt: skip


def check_wrong_earlier_steps_are_refused(on: On) -> None:
    for past in REFUSED:
        tensor, param = torch.ones(6, device=on.device), torch.ones(6, device=on.device)
        with pytest.raises(ValueError, match="earlier step"):
            add_noise_(tensor, 0.7, 9, 0, past)
        for run, rest in ((noisy_sgd_step_, {}), (noisy_adamw_step_, {**ADAMW, "t": 1})):
            states = adamw_state([param])[: 2 if rest else 0] or ([],)
            with pytest.raises(ValueError, match="earlier step"):
                run([param], [tensor], *states, [0], **{**COMMON, **rest}, step=9, **options(past))
        assert bool((tensor == 1).all()) and bool((param == 1).all())


CHECKS = [
    check_earlier_steps_by_type, check_what_earlier_steps_leave_open, check_earlier_steps_before_an_update,
    check_a_first_step_has_none, check_wrong_earlier_steps_are_refused,
]  # fmt: skip
