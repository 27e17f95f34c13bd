"""Compiled steps of LSTM and GRU against the formulas in float64, and that samples stay apart in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastdp.ops import recurrent
from fastdp.ops.registry import forced, native

from .backends import random

KINDS = ("lstm", "gru")
SHAPES = [(5, 3, 17), (1, 1, 1), (3, 2, 64), (4, 40, 300)]  # steps, samples, size; the last by several threads


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if isinstance(found := native(), str):
        pytest.skip(found)


def data(kind: str, shape: tuple[int, int, int], ends: bool, biased: bool) -> list:
    t, b, size = shape
    gates = recurrent.GATES[kind] * size
    state = tuple(random(b, size) for _ in range(2 if kind == "lstm" else 1))
    active = (torch.arange(t)[:, None] < torch.arange(b) % t + 1) if ends else None
    bias = random(gates) if biased else None
    return [2 * random(t, b, gates), state, random(gates, size) / size**0.5, bias, active, random(t, b, size)]


def run(kind: str, x: Tensor, state: tuple, weight: Tensor, bias: Tensor | None, active, out: Tensor) -> list[Tensor]:
    """The states, and all gradients."""
    made = recurrent.forward(kind, x, state, weight, bias, active)
    g, of_product, of_state = recurrent.backward(kind, made, weight, out, state, active)
    return [made.states, g, of_product, *of_state]


def doubled(value):
    if isinstance(value, tuple):
        return tuple(map(doubled, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_the_formulas(kind: str, shape: tuple[int, int, int], ends: bool) -> None:
    torch.manual_seed(0)
    for biased in (True, False):
        given = data(kind, shape, ends, biased)
        with forced("reference"):
            exact = run(kind, *map(doubled, given))
        for found, truth in zip(run(kind, *given), exact, strict=True):
            assert (found - truth).abs().max() <= 2e-6 * truth.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_small_and_large_numbers_keep_their_digits(kind: str) -> None:
    """Of tanh near 0 and of functions that are at their ends."""
    torch.manual_seed(0)
    for scale in (1e-6, 1e-2, 1e3):
        x, state, weight, bias, active, out = data(kind, (1, 3, 400), False, False)
        given = [x * scale, tuple(0 * h for h in state), weight, bias, active, out]
        with forced("reference"):
            exact = run(kind, *map(doubled, given))
        found = run(kind, *given)
        assert ((found[0] - exact[0]).abs() <= 1e-6 * exact[0].abs() + (1e-37 if scale < 1 else 2e-7)).all()
        assert all(part.isfinite().all() for part in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_number_stays_in_its_sample(kind: str, bad: float) -> None:
    torch.manual_seed(0)
    x, *rest = data(kind, (4, 3, 20), True, True)
    clean = run(kind, x, *rest)
    x[1, 1, 3] = bad
    found = run(kind, x, *rest)
    for before, after in zip(clean, found, strict=True):
        dim = before.dim() - 2
        others = torch.tensor([0, 2])
        assert torch.equal(before.index_select(dim, others), after.index_select(dim, others))
    if bad != bad:
        assert found[0][2:, 1].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_threads_change_nothing(kind: str) -> None:
    torch.manual_seed(0)
    x, state, weight, bias, active, out = data(kind, (4, 40, 300), True, True)
    expected = run(kind, x, state, weight, bias, active, out)
    other = lambda tensor: tensor.mT.contiguous().mT  # the same numbers, other strides
    strided = run(kind, other(x), tuple(map(other, state)), weight, bias, active.t().contiguous().t(), other(out))
    assert all(map(torch.equal, expected, strided))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        alone = run(kind, x, state, weight, bias, active, out)
    finally:
        torch.set_num_threads(threads)
    for one, many in zip(alone, expected, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)  # (products may be cut elsewhere)
