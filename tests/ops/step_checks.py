"""What must hold of the operators that draw noise and make a step, wherever they run: test_step.py runs them on every
backend of the CPU and on the emulation of CUDA, test_device.py on a GPU."""

import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdp.ops import cuda, noise, noisy_adamw_step_, noisy_sgd_step_
from fastdp.ops.checks import MASK
from fastdp.ops.noise import noise_
from fastdp.ops.noise_reference import SIGMA, Grid, reference_box_muller, reference_chacha20, reference_noise
from fastdp.ops.registry import OPERATORS

from .noise_truth import LONGEST, VECTORS, block_of, nearly_halves, words_of

KEY = bytes(range(32))
WORDS = noise.words_of(KEY)
SEED_KEY = noise.words_of(noise.key_of(7))
HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A float normal is within 7e-7 of its pair's radius of the exact one.
NORMAL_ERROR = 7e-7


class On(NamedTuple):
    """Where it runs, and how exactly. roundings: units in the last place (half ones) of a result; single: normals of
    all types but float64 are computed in float."""

    device: str
    roundings: float = 1.001
    single: bool = True
    small: bool = False  # few numbers, where each takes long


def unwritten(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)


# Of something computed in float (double) and rounded once: half a unit of the type it is stored in, and what its
# operations lose, relative to the numbers in play (all near 1).
HALF_UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-53}


def rounded(on: On, found: Tensor, truth: Tensor, kind: torch.dtype, std: float = 1.0) -> bool:
    """kind: of the parameter, by which it is computed in float64 or float."""
    slack = 1e-13 if kind == torch.float64 else max(2e-6, 5 * NORMAL_ERROR * std)  # radii are near 1
    bound = on.roundings * HALF_UNIT[found.dtype] * truth.abs() + slack
    return bool(((found.double().cpu() - truth).abs() <= bound).all())


def add_noise_(tensor: Tensor, std: float, scale: float, step: int, offset: int = 0) -> None:
    OPERATORS["add_noise_"](tensor, std, scale, WORDS, step, offset)


# ---------------------------------------------------------------------- the generator


def check_block_function(on: On) -> None:
    states, streams = [], []
    for key, counter, nonce, stream in VECTORS:
        key_words = struct.unpack("<8I", bytes.fromhex(key))
        states.append([*SIGMA, *key_words, counter, *words_of(nonce)])
        streams.append(stream)
    state = torch.tensor(states).T.contiguous()  # [16, n]
    high = state.clone()
    high[12], high[13] = 0xFFFFFFFF, 0x80000001
    for given in (state, high):
        words = torch.full(given.shape, 7, dtype=torch.int32, device=on.device)
        put = given.to(torch.int32).to(on.device)
        place = cuda._place(words.device)
        cuda._native().chacha20(put.data_ptr(), words.data_ptr(), given.size(1), *place)
        found = words.cpu().long() & MASK
        assert torch.equal(found, reference_chacha20(given))
    words_first = reference_chacha20(state)
    for column, stream in enumerate(streams):
        assert struct.pack("<16I", *words_first[:, column].tolist()).hex() == stream


def transformed(words: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """words [16, n] -> normals [16, n] float64 on the CPU."""
    out = unwritten(16, words.size(1), dtype=dtype, device=device)
    given = words.to(torch.int32).contiguous().to(device)
    place = cuda._place(out.device)
    cuda._native().box_muller(given.data_ptr(), out.data_ptr(), cuda.DTYPES[dtype], words.size(1), *place)
    return out.cpu().double()


def check_transform(on: On) -> None:
    """Random bits and chosen ones: x = 0 and near it, the largest x, x = 1/2 from both sides, all quarters."""
    words = torch.randint(0, 1 << 32, (16, 20_000), generator=torch.Generator().manual_seed(3))
    top, half, low, points = 0xFFFFFFFF, 1 << 31, 15, 1 << 28
    radii = [(0, 0), (0, 1), (0, low), (1, 0), (top, low), (top, low - 1), (top, 0), (top - 1, low)]
    radii += [(half, 0), (half, 1), (half - 1, low), (half - 1, 0), (half - 128, low), (half + 128, 0)]
    radii += [(3 << 30, 0), (1 << 30, 0), (77, 9), (1 << 20, 5)]
    angles = [points * k // 4 - below for k in range(1, 5) for below in (0, 1)][:-2] + [0, points - 1, 1, points // 8]
    rows = torch.tensor([(*r, a) for r in radii for a in angles])  # [n, 3]
    chosen = block_of(*rows.T[:, None].expand(3, 8, -1))
    for given in (words, chosen):
        truth = reference_box_muller(given).view(8, 2, -1)
        radius = truth.square().sum(1).sqrt()  # [8, n]
        single = transformed(given, torch.float32, on.device).view(8, 2, -1)
        assert bool(((single - truth).abs() <= NORMAL_ERROR * radius[:, None]).all())
        found_radius = single.square().sum(1).sqrt()
        assert bool((found_radius <= LONGEST * (1 + NORMAL_ERROR)).all())  # never outside the double's tail
        assert bool(((found_radius == 0) == (radius == 0)).all())
        double = transformed(given, torch.float64, on.device).view(8, 2, -1)
        assert bool(((double - truth).abs() <= 4e-15 * radius[:, None] + 1e-22).all())
    assert found_radius.max() > 7.06


# ---------------------------------------------------------------------- noise


def released(total: Tensor, std: float, scale: float, step: int, offset: int) -> Tensor:
    """(total + std N) scale on its grid, by the reference."""
    found = total.detach().cpu().clone()
    OPERATORS["add_noise_"].reference(found, std, scale, WORDS, step, offset)
    return found


def check_noise(on: On, dtype: torch.dtype) -> None:
    """What is released bit for bit as by the reference. (The interpreter cuts off where a card rounds to 16 bits.)"""
    for count, offset, step in ((1, 0, 0), (1025, 1023, 1), (64, 37, 5), (3000, (1 << 45) + 3, (1 << 40) + 7)):
        out = noise_(unwritten(count, dtype=dtype, device=on.device), 2.5, WORDS, step, offset)
        truth = 2.5 * reference_noise(count, KEY, step, offset, dtype=torch.float64)
        assert rounded(on, out, truth, dtype, 2.5), (count, offset)
        held = torch.full((count,), -0.01, dtype=dtype, device=on.device)
        add_noise_(held, 2.5, 1.0, step, offset)
        assert same(on, held, released(torch.full((count,), -0.01, dtype=dtype), 2.5, 1.0, step, offset))
    noise_(unwritten(0, dtype=dtype, device=on.device), 1.0, WORDS, 0)
    torch.manual_seed(0)
    given = torch.randn(700, 3).to(dtype)
    held, edges = given.clone().to(on.device), torch.full((5,), 3.0, dtype=dtype, device=on.device)
    add_noise_(held, 0.3, 0.125, 2, 1234)
    assert same(on, held, released(given, 0.3, 0.125, 2, 1234))
    add_noise_(edges[1:4], 1.0, 1.0, 0)
    assert edges[0] == 3 and edges[4] == 3 and (edges[1:4] != 3).all()


def same(on: On, found: Tensor, truth: Tensor) -> bool:
    if on.small and found.dtype in HALF:
        return bool(((found.cpu() - truth).abs() <= torch.finfo(found.dtype).eps * truth.abs()).all())
    return torch.equal(found.cpu(), truth) and torch.equal(found.cpu().signbit(), truth.signbit())


def check_what_the_first_bits_leave_open(on: On) -> None:
    """Sums that every element must look at more of the key stream's bits for, alone and before an update."""
    for dtype, std in ((torch.float32, 0.37 + 1e-9), (torch.float64, 1.9)):
        count = 200 if on.small else 600
        total, halves = nearly_halves(std, count, 6, 77, dtype)
        held, param = total.clone().to(on.device), torch.zeros(count, dtype=dtype, device=on.device)
        add_noise_(held, std, 0.25, 6, 77)
        truth = released(total, std, 0.25, 6, 77)
        assert torch.equal(held.cpu(), truth)
        total = total.to(on.device)
        noisy_sgd_step_([param], [total], [], [77], **{**COMMON, "std": std}, step=6)
        assert torch.equal(total.cpu(), truth) and torch.allclose(param.cpu(), -0.05 * truth, rtol=1e-6, atol=0)
        above = truth.double() / (Grid.of(std, dtype).unit * 0.25) - halves
        assert set(above.tolist()) == {-0.5, 0.5} and above.mean().abs() < 2 / math.sqrt(count)


def check_shards(on: On) -> None:
    whole = noise_(unwritten(3000, dtype=torch.float32, device=on.device), 1.0, WORDS, 9, 100)
    for low, high in ((0, 1), (1, 700), (700, 3000), (511, 513), (923, 925), (924, 1948)):
        part = noise_(unwritten(high - low, dtype=torch.float32, device=on.device), 1.0, WORDS, 9, 100 + low)
        assert torch.equal(part, whole[low:high])


def check_edges(on: On) -> None:
    """Arrays that end at, before and behind the edges of tiles: written whole, and nothing beside them."""
    for offset, count in ((0, 1022), (0, 1024), (1, 1023), (1, 1024), (1023, 1), (1023, 1026), (0, 2047), (1, 2049)):
        held = unwritten(count + 131, dtype=torch.float32, device=on.device)
        noise_(held[67:-64], 1.0, WORDS, 0, offset)
        assert bool(held[:67].isnan().all() and held[-64:].isnan().all() and held[67:-64].isfinite().all())


# ---------------------------------------------------------------------- noise and step

SIZES = [(1,), (1023,), (16, 64), (1025,), (0,), (64,), (3, 7), (1700,), (5, 257)]
SMALL = [(1,), (0,), (7, 10), (800,)]
START = 12345  # of the global index; the sizes put the others anywhere in the grid
COMMON = {"key": WORDS, "std": 0.7, "scale": 0.25, "lr": 0.05}


def problem(dtype: torch.dtype, device: str, sizes: Any = SIZES) -> tuple[list[Tensor], list[int]]:
    """Parameters and global offsets."""
    torch.manual_seed(1)
    params = [torch.randn(size).to(dtype).to(device) for size in sizes]
    offsets, at = [], START
    for param in params:
        offsets.append(at)
        at += param.numel() + (17 if param.numel() == 64 else 0)
    return params, offsets


def sums_like(params: list[Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    exact = [torch.float64 if p.dtype == torch.float64 else torch.float32 for p in params]
    return [
        (torch.randn(p.shape, dtype=torch.float64) * 3).to(kind).to(p.device)
        for p, kind in zip(params, exact, strict=True)
    ]


def noised(sums: list[Tensor], offsets: list[int], step: int) -> list[Tensor]:
    """(sum + std N) scale on its grid, in float64."""
    std, scale = COMMON["std"], COMMON["scale"]
    return [released(s, std, scale, step, at).double() for s, at in zip(sums, offsets, strict=True)]


def check_rule(on: On, dtype: torch.dtype, state_dtype: torch.dtype, rule: Any, names: list[str], step: Any) -> None:
    """Three steps, each against torch's optimizer in float64 from where the kernel stood: an independent truth.

    rule(params) makes the optimizer; step(params, sums, states, offsets, k, keep) is the kernel's call.
    """
    params, offsets = problem(dtype, on.device, SMALL if on.small else SIZES)
    states = [[unwritten(*p.shape, dtype=state_dtype, device=on.device) for p in params] for _ in names]
    if len(names) == 2:
        states = [[torch.zeros_like(held) for held in state] for state in states]
    for k in range(2 if on.small else 3):
        exact = [p.double().cpu().clone() for p in params]
        optimizer = rule(exact)
        for i, param in enumerate(exact):
            held = {name: state[i].double().cpu().clone() for name, state in zip(names, states, strict=True)}
            optimizer.state[param] = {"step": torch.tensor(float(k)), **held} if k else {}
        sums, keep = sums_like(params, k), k != 1
        before, gradients = [s.clone() for s in sums], noised(sums, offsets, 40 + k)
        step(params, sums, states, offsets, k, keep)
        for param, gradient in zip(exact, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        expected = gradients if keep else [s.double().cpu() for s in before]
        assert all(rounded(on, s, n, dtype, 0.2) for s, n in zip(sums, expected, strict=True))
        assert all(rounded(on, p, truth, dtype, 0.2) for p, truth in zip(params, exact, strict=True))
        for name, state in zip(names, states, strict=True):
            truths = [optimizer.state[p][name] for p in exact]
            assert all(rounded(on, held, truth, dtype, 0.2) for held, truth in zip(state, truths, strict=True))


def check_sgd(on: On, dtype: torch.dtype, state_dtype: torch.dtype, **options: Any) -> None:
    names = ["momentum_buffer"] if options.get("momentum") else []

    def step(params: Any, sums: Any, states: Any, offsets: Any, k: int, keep: bool) -> None:
        buffers = states[0] if states else []
        given = {**COMMON, **options, "step": 40 + k, "first": k == 0, "keep_grads": keep}
        noisy_sgd_step_(params, sums, buffers, offsets, **given)

    check_rule(on, dtype, state_dtype, lambda ps: torch.optim.SGD(ps, lr=0.05, **options), names, step)


def check_adamw(on: On, dtype: torch.dtype, state_dtype: torch.dtype, **options: Any) -> None:
    decoupled = options.pop("decoupled", True)
    rule = torch.optim.AdamW if decoupled else torch.optim.Adam
    eps = 1e-2  # so that the ratio of averages does not enlarge rounding; check_without_noise has a small one

    def step(params: Any, sums: Any, states: Any, offsets: Any, k: int, keep: bool) -> None:
        given = {**COMMON, **options, "step": 40 + k, "t": k + 1, "keep_grads": keep}
        rates = {"beta1": 0.8, "beta2": 0.95, "eps": eps, "decoupled": decoupled}
        noisy_adamw_step_(params, sums, *states, offsets, **given, **rates)

    make = lambda ps: rule(ps, lr=0.05, betas=(0.8, 0.95), eps=eps, **options)
    check_rule(on, dtype, state_dtype, make, ["exp_avg", "exp_avg_sq"], step)


def adamw_state(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]


ADAMW = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def check_many_tensors(on: On) -> None:
    """More than one launch fills the table; all together give the bits that each alone gives."""
    params, offsets = problem(torch.float32, on.device, [(k % 5,) for k in range(1000)])
    alone = [p.clone() for p in params]
    sums = sums_like(params, 0)
    noisy_adamw_step_(params, [s.clone() for s in sums], *adamw_state(params), offsets, step=1, t=1, **COMMON, **ADAMW)
    for k in (0, 1, 447, 448, 449, 896, 999):
        one = slice(k, k + 1)
        state = adamw_state(alone[one])
        noisy_adamw_step_(alone[one], sums[one], *state, offsets[one], step=1, t=1, **COMMON, **ADAMW)
        assert torch.equal(alone[k], params[k])
    before = problem(torch.float32, on.device, [(k % 5,) for k in range(1000)])[0]
    assert sum(not torch.equal(p, q) for p, q in zip(params, before, strict=True)) == 800


def check_mixed_types(on: On) -> None:
    """Parameters of all types in one call are what each alone is, in their order; autograd sees that they changed."""
    one_each = [problem(dtype, on.device, [(600,)])[0][0] for dtype in FLOATS]
    offsets = [0, 600, 1200, 1800]
    alone = [p.clone() for p in one_each]
    sums = sums_like(one_each, 5)
    buffers = [torch.ones_like(p) for p in one_each]
    options = {"step": 3, "momentum": 0.9, **COMMON}
    versions = [p._version for p in one_each]
    noisy_sgd_step_(one_each, [s.clone() for s in sums], buffers, offsets, **options)
    assert all(p._version > before for p, before in zip(one_each, versions, strict=True))
    for k, param in enumerate(alone):
        noisy_sgd_step_([param], [sums[k]], [torch.ones_like(param)], [offsets[k]], **options)
        assert torch.equal(param, one_each[k])


def check_counter(on: On) -> None:
    """step and t plus the counter's value, which advance_ counts."""
    counter = torch.tensor([4], device=on.device)
    results = []
    for given in ({"step": 11, "t": 2, "counter": cuda.advance_(counter)}, {"step": 16, "t": 7}):
        params, offsets = problem(torch.float32, on.device)
        noisy_adamw_step_(params, sums_like(params, 0), *adamw_state(params), offsets, **given, **COMMON, **ADAMW)
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert int(counter) == 5


def check_without_noise(on: On) -> None:
    """std = 0 is torch's optimizer and rounds to no grid; the sums' extreme numbers stay in their places."""
    given = torch.tensor([-0.0821, 1e-5, 0.3, 1e20], device=on.device)
    held, param = given.clone(), torch.zeros_like(given)
    add_noise_(held, 0.0, 0.25, 0)
    assert torch.equal(held, given * 0.25)
    noisy_sgd_step_([param], [given.clone()], [], [5], **{**COMMON, "std": 0.0, "lr": 1.0}, step=0)
    assert torch.equal(param, given * -0.25)
    params, offsets = problem(torch.float32, on.device, [(300,), (40,)])
    sums = sums_like(params, 2)
    sums[0][7], sums[0][8], sums[1][0] = math.nan, math.inf, 1e-30
    plain = [p.cpu().clone() for p in params]
    state = adamw_state(params)
    noisy_adamw_step_(
        params, [s.clone() for s in sums], *state, offsets, step=0, t=1, **{**COMMON, "std": 0.0}, **ADAMW
    )
    rule = torch.optim.AdamW(plain, lr=0.05, weight_decay=0.01)
    for param, total in zip(plain, sums, strict=True):
        param.grad = total.cpu() * 0.25
    rule.step()
    for found, other in zip(params, plain, strict=True):
        assert torch.allclose(found.cpu(), other, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert int(params[0].isnan().sum()) == 2


PAIRS = [(dtype, dtype) for dtype in FLOATS] + [(dtype, torch.float32) for dtype in HALF]
RULES: list[tuple[Any, dict[str, Any]]] = [
    (check_sgd, {}),
    (check_sgd, {"weight_decay": 0.1, "maximize": True}),
    (check_sgd, {"momentum": 0.9}),
    (check_sgd, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (check_sgd, {"momentum": 0.8, "nesterov": True, "maximize": True}),
    (check_adamw, {"weight_decay": 0.1}),
    (check_adamw, {"weight_decay": 0.0, "maximize": True}),
    (check_adamw, {"weight_decay": 0.1, "decoupled": False}),
    (check_adamw, {"weight_decay": 0.1, "decoupled": False, "maximize": True}),
]
CHECKS = [
    check_shards, check_edges, check_what_the_first_bits_leave_open, check_many_tensors, check_mixed_types,
    check_counter, check_without_noise,
]  # fmt: skip
OF_CUDA = [check_block_function, check_transform]  # of functions that only the CUDA module has
