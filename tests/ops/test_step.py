"""Noise fused with the optimizer's step: against noise alone and torch.optim in float64; threads, shards, types."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.ops import noise, noisy_adamw_step_, noisy_sgd_step_
from fastdp.ops.checks import words_of
from fastdp.ops.common import sum_type
from fastdp.ops.noise import reference_noise
from fastdp.ops.registry import forced, native
from fastdp.ops.step import StepTable
from fastdp.ops.updates import SGD, Adam, Draw

NATIVE = noise.native_status() == "built"
KEY = bytes(range(32))
SHAPES = [(), (3, 5), (0,), (769,), (7, 11, 13), (3072,), (1,)]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DRAW: dict[str, Any] = {"key": KEY, "step": 7, "std": 0.3, "scale": 0.25}
ADAM: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(params=["reference", "native"] if NATIVE else ["reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced("reference" if request.param == "reference" else "auto"):
        yield str(request.param)


def tensors(dtype: torch.dtype, shapes: list[Any] = SHAPES, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    params = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return params, [torch.randn(s, generator=generator, dtype=torch.float64).to(kind) for s in shapes]


def offsets_of(params: list[Tensor], start: int = 1001) -> list[int]:
    return list(itertools.accumulate([p.numel() for p in params[:-1]], initial=start))


def noised(sums: list[Tensor], offsets: list[int], step: int = 7) -> list[Tensor]:
    """n by the operator that only adds noise, of the sums' types."""
    out = []
    for total, offset in zip(sums, offsets, strict=True):
        normal = reference_noise(total.numel(), KEY, step, offset, dtype=torch.float64).view(total.shape)
        out.append(((total.double() + 0.3 * normal) * 0.25).to(total.dtype))
    return out


def optimizer_of(params: list[Tensor], name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(params, foreach=False, **options)  # type: ignore[no-any-return]


def torch_steps(params: list[Tensor], grads: list[list[Tensor]], name: str, options: dict[str, Any],
                dtype: torch.dtype) -> tuple[list[Tensor], list[dict[str, Any]]]:  # fmt: skip
    """Parameters and states after torch's own steps with these gradients, all in one type."""
    moved = [p.detach().to(dtype, copy=True).requires_grad_() for p in params]
    optimizer = optimizer_of(moved, name, options)
    for found in grads:
        for p, grad in zip(moved, found, strict=True):
            p.grad = grad.to(dtype)
        optimizer.step()
    return [p.detach() for p in moved], [optimizer.state[p] for p in moved]


def assert_close(found: list[Tensor], plain: list[Tensor], truth: list[Tensor], what: str) -> None:
    """The error rule: four times PyTorch's largest error in the type, and 1e-5 of the truth.

    The largest of all tensors: that of a single element may be near 0 by luck.
    """
    allowed = 4 * max(float((a.double() - b).abs().max()) for a, b in zip(plain, truth, strict=True) if a.numel())
    for a, b in zip(found, truth, strict=True):
        assert b.dtype == torch.float64
        error = (a.double() - b).abs()
        assert (error <= allowed + 1e-5 * b.abs() + 1e-12).all(), f"{what}: {float(error.max())}"


SGD_CASES = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05, "maximize": True},
    {"weight_decay": 0.2, "maximize": True},
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", SGD_CASES)
def test_sgd_is_noise_and_torchs_step(backend: str, case: dict[str, Any], dtype: torch.dtype) -> None:
    params, _ = tensors(dtype)
    offsets = offsets_of(params)
    steps = [tensors(dtype, seed=seed)[1] for seed in (1, 2, 3)]
    grads = [noised(sums, offsets, 7 + k) for k, sums in enumerate(steps)]
    truth = torch_steps(params, grads, "SGD", {"lr": 0.1, **case}, torch.float64)
    plain = torch_steps(params, grads, "SGD", {"lr": 0.1, **case}, dtype)
    moved = [p.clone() for p in params]
    buffers = [torch.full_like(p, float("nan")) for p in params] if "momentum" in case else []
    for k, sums in enumerate(steps):
        noisy_sgd_step_(moved, sums, buffers, offsets, lr=0.1, first=k == 0, **{**DRAW, "step": 7 + k}, **case)
        for total, grad in zip(sums, grads[k], strict=True):  # kept
            atol = 1e-13 if dtype == torch.float64 else 7e-7 * 5 * 0.3 * 0.25  # of the longest radius here
            torch.testing.assert_close(total, grad, rtol=3e-7 if dtype != torch.float64 else 1e-13, atol=atol)
    assert_close(moved, plain[0], truth[0], "weight")
    if buffers:
        name = "momentum_buffer"
        assert_close(buffers, [state[name] for state in plain[1]], [state[name] for state in truth[1]], name)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("maximize", [False, True])
def test_adam_is_noise_and_torchs_step(backend: str, name: str, maximize: bool, dtype: torch.dtype) -> None:
    params, _ = tensors(dtype)
    offsets = offsets_of(params)
    steps = [tensors(dtype, seed=seed)[1] for seed in (1, 2, 3)]
    grads = [noised(sums, offsets, 7 + k) for k, sums in enumerate(steps)]
    eps = 1e-3 if dtype == torch.float16 else 1e-8
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": eps, "weight_decay": 0.1, "maximize": maximize}
    truth = torch_steps(params, grads, name, options, torch.float64)
    plain = torch_steps(params, grads, name, options, dtype)
    moved = [p.clone() for p in params]
    averages, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for k, sums in enumerate(steps):
        given = [total.clone() for total in sums]
        noisy_adamw_step_(moved, sums, averages, squares, offsets, t=k + 1, maximize=maximize, keep_grads=False,
                          decoupled=name == "AdamW", **{**DRAW, "step": 7 + k}, **{**ADAM, "eps": eps})  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(sums, given, strict=True))  # not kept: as they were
    assert_close(moved, plain[0], truth[0], "weight")
    for name, states in (("exp_avg", averages), ("exp_avg_sq", squares)):
        assert_close(states, [state[name] for state in plain[1]], [state[name] for state in truth[1]], name)


def adam(params: list[Tensor], sums: list[Tensor], offsets: list[int], **change: Any) -> list[Tensor]:
    """All that one step leaves: parameters, sums, states."""
    params, sums = [p.clone() for p in params], [s.clone() for s in sums]
    averages, squares = ([torch.full_like(p, fill) for p in params] for fill in (0.1, 0.2))
    noisy_adamw_step_(params, sums, averages, squares, offsets, **{**DRAW, **ADAM, "t": 5, **change})
    return params + sums + averages + squares


def test_bits_are_those_of_noise_alone(backend: str) -> None:
    params, sums = tensors(torch.float32, [(70_001,), (5,), (3000,)])
    offsets = offsets_of(params)
    source = noise.Noise(seed=3)
    source.step = 7
    alone = [source.add_scaled_(s.clone(), 0.3, 0.25, o) for s, o in zip(sums, offsets, strict=True)]
    fused = adam(params, sums, offsets, key=source.key)[3:6]
    assert all(torch.equal(a, b) for a, b in zip(alone, fused, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_threads_and_instruction_sets_change_no_bit(dtype: torch.dtype) -> None:
    if not NATIVE:
        pytest.skip("the compiled kernel is absent")
    params, sums = tensors(dtype, [(150_001,), (3,), (0,), (70_000,), (767,), (769,)])
    offsets = offsets_of(params, 37)
    before, module = torch.get_num_threads(), native()
    best = module.instruction_set()  # type: ignore[union-attr]
    try:
        torch.set_num_threads(1)
        whole = adam(params, sums, offsets)
        for threads, at_most in itertools.product((1, 2, 3, 7), range(best + 1)):
            torch.set_num_threads(threads)
            module.instruction_set(at_most)  # type: ignore[union-attr]
            found = adam(params, sums, offsets)
            assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True)), (threads, at_most)
    finally:
        torch.set_num_threads(before)
        if NATIVE:
            module.instruction_set(best)  # type: ignore[union-attr]


def test_any_sharding_gives_the_same(backend: str) -> None:
    params, sums = tensors(torch.float32, [(5000,)])
    whole = adam(params, sums, [123])
    cuts = [0, 1, 645, 1413, 4000, 5000]
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    shards = adam([params[0][p] for p in pieces], [sums[0][p] for p in pieces], [123 + p.start for p in pieces])
    for k, full in enumerate(whole):
        assert torch.equal(torch.cat(shards[k * len(pieces) : (k + 1) * len(pieces)]), full)


def test_counter_is_added_to_step_and_t(backend: str) -> None:
    params, sums = tensors(torch.float32)
    offsets = offsets_of(params)
    plain = adam(params, sums, offsets, step=12, t=10)
    counted = adam(params, sums, offsets, counter=torch.tensor([5]))
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))
    assert not torch.equal(plain[0], adam(params, sums, offsets)[0])


def test_a_sum_that_is_not_finite_stays_in_its_element(backend: str) -> None:
    params, sums = tensors(torch.float32, [(1500,), (600,)])
    good = adam(params, sums, [0, 1500])
    sums[0][700] = float("nan")
    for a, b in zip(good, adam(params, sums, [0, 1500]), strict=True):
        same = a == b
        assert same.all() if a.shape == (600,) else (same.sum() == 1499 and not same[700])


def test_without_noise_it_is_torchs_step(backend: str) -> None:
    params, sums = tensors(torch.float32)
    moved = [p.clone() for p in params]
    noisy_sgd_step_(moved, sums, [], offsets_of(params), **{**DRAW, "std": 0.0, "scale": 1.0}, lr=0.5)
    for a, p, s in zip(moved, params, sums, strict=True):
        torch.testing.assert_close(a, p - 0.5 * s)


def test_mixed_types_and_versions(backend: str) -> None:
    """States of another type than the parameter's, float64 beside bfloat16; autograd sees the change."""
    params = [
        torch.ones(600, dtype=torch.bfloat16),
        torch.ones(5, dtype=torch.float64),
        torch.nn.Parameter(torch.ones(9)),
    ]
    sums = [torch.zeros(600), torch.zeros(5, dtype=torch.float64), torch.zeros(9)]
    averages, squares = ([torch.zeros(p.shape, dtype=torch.float32) for p in params] for _ in range(2))
    versions = [p._version for p in params]
    offsets = offsets_of(params, 0)
    noisy_adamw_step_(params, sums, averages, squares, offsets, t=1, **DRAW, **ADAM)
    assert all(p._version > v for p, v in zip(params, versions, strict=True))
    for param, total, average in zip(params, sums, averages, strict=True):
        torch.testing.assert_close(average.double(), 0.1 * total.double(), rtol=1e-6, atol=1e-9)
        expected = 1 - 0.001 - 0.01 * total.double().sign()  # the first step of Adam has the length lr
        torch.testing.assert_close(param.double(), expected, rtol=torch.finfo(param.dtype).eps, atol=1e-5)


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
    ],
)
def test_refusals(backend: str, error: type[Exception], change: dict[str, Any]) -> None:
    call: dict[str, Any] = {"params": [torch.zeros(4), torch.zeros(6)], "offsets": [0, 4], "t": 1, **DRAW, **ADAM}
    for name in ("sums", "exp_avgs", "exp_avg_sqs"):
        call[name] = [torch.zeros(4), torch.zeros(6)]
    noisy_adamw_step_(**call)
    with pytest.raises(error):
        noisy_adamw_step_(**{**call, **change})


def test_nothing_to_do(backend: str) -> None:
    noisy_sgd_step_([], [], [], [], **DRAW, lr=0.1)
    noisy_sgd_step_([torch.zeros(0)], [torch.zeros(0)], [], [0], **DRAW, lr=0.1)


def test_operators_are_registered_soundly() -> None:
    key = noise.words_of(KEY)
    params, sums = tensors(torch.float32, [(3, 5), (600,)])
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    draw = {**DRAW, "key": key}
    torch.library.opcheck(
        torch.ops.fastdp.noisy_sgd_step_.default,
        (params, sums, states[0], [0, 15]),
        {**draw, "lr": 0.1, "momentum": 0.9},
    )
    torch.library.opcheck(
        torch.ops.fastdp.noisy_adamw_step_.default,
        (params, sums, *states, [0, 15]),
        {**draw, **ADAM, "t": 1, "counter": torch.tensor([1])},
    )
    torch.library.opcheck(torch.ops.fastdp.noise_.default, (torch.zeros(5, 7), 1.0, key, 3, 5))
    torch.library.opcheck(torch.ops.fastdp.add_noise_.default, (torch.zeros(5, 7), 1.0, 0.5, key, 3, 5))


class TestStepTable:
    """The same numbers as the operators, also where tensors change between the steps."""

    @staticmethod
    def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 3), (7,), (2, 2, 2))]

    def both(self, dtype: torch.dtype, change) -> None:
        offsets, one, two = [0, 15, 22], self.tensors(dtype), self.tensors(dtype)
        states = [[[torch.zeros_like(p) for p in params] for _ in range(2)] for params in (one, two)]
        table, rebuilt = StepTable(one, states[0], offsets), 0
        for t in range(1, 5):
            change(t, one, states[0])
            change(t, two, states[1])
            if not table.fits(one, states[0], offsets):
                table, rebuilt = StepTable(one, states[0], offsets), rebuilt + 1
            sums = [torch.full(p.shape, float(t), dtype=sum_type(p)) for p in one]
            again = [total.clone() for total in sums]
            table.run(sums, Draw(words_of(KEY), t, 0.5, 0.1), Adam(0.01 * t, 0.9, 0.99, 1e-8, 0.1, t))
            noisy_adamw_step_(
                two, again, *states[1], offsets, key=KEY, step=t, std=0.5, scale=0.1, lr=0.01 * t, beta1=0.9,
                beta2=0.99, eps=1e-8, weight_decay=0.1, t=t,
            )  # fmt: skip
            for a, b in zip((*one, *sums, *states[0][1]), (*two, *again, *states[1][1]), strict=True):
                assert torch.equal(a, b)
        assert rebuilt == (change is not nothing)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_steps_one_after_another(self, dtype: torch.dtype) -> None:
        self.both(dtype, nothing)

    @pytest.mark.parametrize("what", ["memory", "type", "state"])
    def test_what_changes_is_seen(self, what: str) -> None:
        def change(t: int, params: list[torch.Tensor], states: list[list[torch.Tensor]]) -> None:
            if t == 3 and what == "memory":
                params[1].data = params[1].data.clone() * 2
            if t == 3 and what == "type":
                params[1].data = params[1].data.bfloat16()
            if t == 3 and what == "state":
                states[0][0] = states[0][0].clone() + 1

        self.both(torch.float32, change)

    def test_sums_that_do_not_fit_are_refused(self) -> None:
        params = self.tensors()
        table, draw = StepTable(params, [], [0, 15, 22]), Draw(words_of(KEY), 0, 0.5, 0.1)
        for _ in range(2):
            table.run([torch.ones_like(p) for p in params], draw, SGD(0.1))
        before = [p.clone() for p in params]
        wrong = [
            [torch.ones(3, 5), torch.ones(7), torch.ones(2, 2, 2)],
            [torch.ones(5, 3).half(), torch.ones(7), torch.ones(2, 2, 2)],
            [torch.ones(3, 5).mT, torch.ones(7), torch.ones(2, 2, 2)],
            [torch.ones(5, 3), torch.ones(7)],
            [torch.ones(5, 3, device="meta"), torch.ones(7), torch.ones(2, 2, 2)],
        ]
        for sums in wrong:
            with pytest.raises((ValueError, TypeError)):
                table.run(sums, draw, SGD(0.1))
        with pytest.raises(ValueError, match="std"):
            table.run([torch.ones_like(p) for p in params], draw._replace(std=float("nan")), SGD(0.1))
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        table.run([torch.ones_like(p).double() for p in params], draw, SGD(0.1))  # sums of another type are fine
        assert not torch.equal(params[0], before[0])


def nothing(t: int, params: list[torch.Tensor], states: list[list[torch.Tensor]]) -> None:
    """Nothing changes between the steps."""
