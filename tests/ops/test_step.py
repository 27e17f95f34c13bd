"""Noise, alone and fused with the optimizer's step: against the generator and torch.optim in float64, on every backend
of the CPU (test_cuda.py has CUDA's kernels)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.ops import noise, noisy_adamw_step_, noisy_sgd_step_
from fastdp.ops.checks import words_of
from fastdp.ops.common import sum_type
from fastdp.ops.registry import native
from fastdp.ops.step import StepTable
from fastdp.ops.updates import SGD, Adam, Draw

from . import past_checks
from . import step_checks as checks
from .backends import CPU, NATIVE, TRITON, threads

pytestmark = pytest.mark.slow  # `make test-all` runs it

KEY = checks.KEY
DRAW: dict[str, Any] = {"key": KEY, "step": 7, "std": 0.3, "scale": 0.25}
ADAM: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
# the reference rounds sums and products of 16-bit states on its way; the interpreter cuts off where a card rounds
ON = {
    "reference": checks.On("cpu", 4, single=False),
    "C++": checks.On("cpu"),
    "Triton": checks.On("cpu", 2.1, small=True),
}
BACKENDS = pytest.mark.parametrize("backend", [*CPU, *TRITON[:1]], indirect=True)


@BACKENDS
@pytest.mark.parametrize(
    "check", [*checks.CHECKS, *past_checks.CHECKS], ids=lambda check: check.__name__.removeprefix("check_")
)
def test_what_holds_everywhere(check: Callable[[checks.On], None], backend: str) -> None:
    if backend in CPU or check is not checks.check_many_tensors:
        check(ON[backend])


@BACKENDS
@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_noise(dtype: torch.dtype, backend: str) -> None:
    checks.check_noise(ON[backend], dtype)


@BACKENDS
@pytest.mark.parametrize(("dtype", "state_dtype"), checks.PAIRS)
@pytest.mark.parametrize(("rule", "options"), checks.RULES)
def test_torchs_step(rule: Any, options: Any, dtype: torch.dtype, state_dtype: torch.dtype, backend: str) -> None:
    if backend in CPU or dtype == torch.float32 or "momentum" in options or options == {"weight_decay": 0.1}:
        rule(ON[backend], dtype, state_dtype, **options)  # all types by all rules would take the interpreter long


def adam(params: list[Tensor], sums: list[Tensor], offsets: list[int], **change: Any) -> list[Tensor]:
    """All that one step leaves: parameters, sums, states."""
    params, sums = [p.clone() for p in params], [s.clone() for s in sums]
    averages, squares = ([torch.full_like(p, fill) for p in params] for fill in (0.1, 0.2))
    noisy_adamw_step_(params, sums, averages, squares, offsets, **{**DRAW, **ADAM, "t": 5, **change})
    return params + sums + averages + squares


@pytest.mark.parametrize("backend", CPU, indirect=True)
def test_bits_are_those_of_noise_alone_and_of_any_sharding(backend: str) -> None:
    params, offsets = checks.problem(torch.float32, "cpu", [(70_001,), (5,), (3000,)])
    sums = checks.sums_like(params, 1)
    source = noise.Noise(seed=3)
    source.step = 7
    alone = [source.add_scaled_(s.clone(), 0.3, 0.25, o) for s, o in zip(sums, offsets, strict=True)]
    whole = adam(params, sums, offsets, key=source.key)
    assert all(torch.equal(a, b) for a, b in zip(alone, whole[3:6], strict=True))
    pieces = [slice(a, b) for a, b in itertools.pairwise([0, 1, 645, 1413, 2000, 3000])]
    shards = adam([params[2][p] for p in pieces], [sums[2][p] for p in pieces], [offsets[2] + p.start for p in pieces],
                  key=source.key)  # fmt: skip
    for k, full in enumerate(whole[2::3]):
        assert torch.equal(torch.cat(shards[k * len(pieces) : (k + 1) * len(pieces)]), full)


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("at_most", [0, 1, 2])
@pytest.mark.parametrize("check", past_checks.CHECKS[:3], ids=lambda check: check.__name__.removeprefix("check_"))
def test_earlier_steps_by_each_instruction_set(check: Callable[[checks.On], None], at_most: int) -> None:
    module: Any = native()
    best = module.instruction_set()
    if at_most > best:
        pytest.skip("the processor has no such instructions")
    try:
        module.instruction_set(at_most)
        check(ON["C++"])
    finally:
        module.instruction_set(best)


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("past", [{}, past_checks.options(past_checks.FOUR)], ids=["alone", "correlated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_threads_and_instruction_sets_change_no_bit(dtype: torch.dtype, past: dict[str, Any]) -> None:
    params, offsets = checks.problem(dtype, "cpu", [(150_001,), (3,), (0,), (70_000,), (1023,), (1025,)])
    sums, module = checks.sums_like(params, 1), native()
    best = module.instruction_set()  # type: ignore[union-attr]
    try:
        with threads(1):
            whole = adam(params, sums, offsets, **past)
        for count, at_most in itertools.product((1, 2, 3, 7), range(best + 1)):
            module.instruction_set(at_most)  # type: ignore[union-attr]
            with threads(count):
                found = adam(params, sums, offsets, **past)
            assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True)), (count, at_most)
    finally:
        module.instruction_set(best)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (ValueError, {"offsets": [0]}),
        (ValueError, {"offsets": [0, 3]}),  # overlap
        (ValueError, {"offsets": [0, -9]}),
        (ValueError, {"sums": [torch.zeros(4), torch.zeros(5)]}),
        (TypeError, {"sums": [torch.zeros(4), torch.zeros(6).bfloat16()]}),
        (TypeError, {"params": [torch.zeros(4).double(), torch.zeros(6)]}),
        (ValueError, {"params": [torch.zeros(4), torch.zeros(12)[::2]]}),
        (ValueError, {"exp_avgs": []}),
        (ValueError, {"key": b"short"}),
        (ValueError, {"step": -1}),
        (ValueError, {"std": float("inf")}),
        (ValueError, {"t": 0}),
        (ValueError, {"counter": torch.zeros(1)}),
        (ValueError, {"offsets": [0, (1 << 62) - 5]}),
        (ValueError, {"std": -1.0}),
        (ValueError, {"std": float("nan")}),
        (ValueError, {"key": [-1] * 8}),
        (ValueError, {"step": 1 << 48}),
    ],
)
def test_refusals(error: type[Exception], change: dict[str, Any]) -> None:
    call: dict[str, Any] = {"params": [torch.zeros(4), torch.zeros(6)], "offsets": [0, 4], "t": 1, **DRAW, **ADAM}
    for name in ("sums", "exp_avgs", "exp_avg_sqs"):
        call[name] = [torch.zeros(4), torch.zeros(6)]
    noisy_adamw_step_(**call)
    with pytest.raises(error):
        noisy_adamw_step_(**{**call, **change})


@pytest.mark.parametrize("backend", [*CPU, *TRITON[:1]], indirect=True)
def test_nothing_to_do_and_states_of_two_types(backend: str) -> None:
    noisy_sgd_step_([], [], [], [], **DRAW, lr=0.1)
    noisy_sgd_step_([torch.zeros(0)], [torch.zeros(0)], [], [0], **DRAW, lr=0.1)
    p, total = torch.ones(9, dtype=torch.bfloat16), torch.ones(9)
    states = [torch.zeros_like(p)], [torch.zeros_like(total)]
    if backend in TRITON:
        with pytest.raises(ValueError, match="all be of one type"):
            noisy_adamw_step_([p], [total], *states, [0], **DRAW, **ADAM, t=1)
        assert bool((p == 1).all()) and bool((total == 1).all()), "nothing is written before"


# ---------------------------------------------------------------------- one step after the other


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 3), (7,), (2, 2, 2))]


@pytest.mark.parametrize(("dtype", "what"), [
    (torch.float32, ""), (torch.float64, ""), (torch.bfloat16, ""), (torch.float32, "memory"), (torch.float32, "type"),
    (torch.float32, "state"),
])  # fmt: skip
def test_a_table_gives_the_numbers_of_the_operators(dtype: torch.dtype, what: str) -> None:
    """Also where tensors change between the steps, which it sees."""
    offsets, sides = [0, 15, 22], [tensors(dtype), tensors(dtype)]
    states = [[[torch.zeros_like(p) for p in params] for _ in range(2)] for params in sides]
    table, rebuilt = StepTable(sides[0], states[0], offsets), 0
    for t in range(1, 5):
        for params, own in zip(sides, states, strict=True):
            if t == 3 and what == "memory":
                params[1].data = params[1].data.clone() * 2
            if t == 3 and what == "type":
                params[1].data = params[1].data.bfloat16()
            if t == 3 and what == "state":
                own[0][0] = own[0][0].clone() + 1
        if not table.fits(sides[0], states[0], offsets):
            table, rebuilt = StepTable(sides[0], states[0], offsets), rebuilt + 1
        sums, again = ([torch.full(p.shape, float(t), dtype=sum_type(p)) for p in sides[0]] for _ in range(2))
        table.run(sums, Draw(words_of(KEY), t, 0.5, 0.1), Adam(0.01 * t, 0.9, 0.99, 1e-8, 0.1, t))
        noisy_adamw_step_(sides[1], again, *states[1], offsets, key=KEY, step=t, std=0.5, scale=0.1,
                          **{**ADAM, "lr": 0.01 * t}, t=t)  # fmt: skip
        for a, b in zip((*sides[0], *sums, *states[0][1]), (*sides[1], *again, *states[1][1]), strict=True):
            assert torch.equal(a, b)
    assert rebuilt == bool(what)


def test_sums_that_do_not_fit_a_table_are_refused() -> None:
    params = tensors()
    table, draw = StepTable(params, [], [0, 15, 22]), Draw(words_of(KEY), 0, 0.5, 0.1)
    for _ in range(2):
        table.run([torch.ones_like(p) for p in params], draw, SGD(0.1))
    before, rest = [p.clone() for p in params], [torch.ones(7), torch.ones(2, 2, 2)]
    for sums in ([torch.ones(3, 5), *rest], [torch.ones(5, 3).half(), *rest], [torch.ones(3, 5).mT, *rest],
                 [torch.ones(5, 3), torch.ones(7)], [torch.ones(5, 3, device="meta"), *rest]):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            table.run(sums, draw, SGD(0.1))
    with pytest.raises(ValueError, match="std"):
        table.run([torch.ones_like(p) for p in params], draw._replace(std=float("nan")), SGD(0.1))
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    table.run([torch.ones_like(p).double() for p in params], draw, SGD(0.1))  # sums of another type are fine
    assert not torch.equal(params[0], before[0])
