"""Noise and an optimizer's update of all parameters in one launch a type, on a GPU without nvcc.

The work is the list of all parameters' tiles (`kernels.noise`). A program takes two tiles of one parameter, which it
finds in a table of addresses. The rules are torch.optim's SGD, Adam and AdamW, as in csrc/cuda/sgd.cu and adamw.cu.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fastdp.ops.checks import check_single_std
from fastdp.ops.noise_reference import Grid
from fastdp.ops.updates import SGD, Adam, Step, implementation

from .keystream import LANES, PAIRS, TILE, chacha20, stream_of
from .many import TYPES
from .noise import SIZE, TILES, drawn, release, settled, table_of
from .past import gathered, is_correlated, past_of

WORDS = tl.constexpr(10)  # of the key and the nonce, at the table's begin

FIELDS = tl.constexpr(7)  # of a row: addresses of parameter, sum and two states; elements; offset; programs so far
_TYPES = {**TYPES, torch.float64: tl.float64}


@triton.jit
def word(p_table, place: tl.constexpr):
    return tl.load(p_table + place).to(tl.int32)


@triton.jit
def option(p_table, place: tl.constexpr, like):
    return tl.load(p_table + WORDS + place).to(tl.float64, bitcast=True).to(like.dtype)


@triton.jit
def numbers_at(p_row, field: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(p_row + field).to(tl.pointer_type(TYPE))


@triton.jit
def inside_of(p_row, at):
    return (at >= 0) & (at < tl.load(p_row + 4))


@triton.jit
def spend(p_table, p_row, at, turned, coordinate, limit, ADAM: tl.constexpr, KEEP: tl.constexpr, BUFFER: tl.constexpr,
          READS: tl.constexpr, NESTEROV: tl.constexpr, PARAM: tl.constexpr, STATE: tl.constexpr,
          SUM: tl.constexpr):  # fmt: skip
    """One normal of each lane, released and spent; where that is open, nothing is stored."""
    inside = inside_of(p_row, at)
    size, unit, scale = option(p_table, 0, turned), option(p_table, 1, turned), option(p_table, 2, turned)
    total = tl.load(numbers_at(p_row, 1, SUM) + at, mask=inside, other=0.0)
    n, unsure = release(turned, coordinate, limit, total, size, unit, scale)
    unsure = inside & unsure
    update(p_table, p_row, at, n, inside & (unsure == 0), ADAM, KEEP, BUFFER, READS, NESTEROV, PARAM, STATE, SUM)
    return unsure.to(tl.int32)


@triton.jit
def update(p_table, p_row, at, n, inside, ADAM: tl.constexpr, KEEP: tl.constexpr, BUFFER: tl.constexpr,
           READS: tl.constexpr, NESTEROV: tl.constexpr, PARAM: tl.constexpr, STATE: tl.constexpr,
           SUM: tl.constexpr):  # fmt: skip
    """The rule with what is released, n."""
    param, total = numbers_at(p_row, 0, PARAM), numbers_at(p_row, 1, SUM)
    sign, decay, lr = option(p_table, 3, n), option(p_table, 4, n), option(p_table, 5, n)
    if KEEP:
        tl.store(total + at, n, mask=inside)
    p = tl.load(param + at, mask=inside, other=0.0).to(n.dtype)
    gradient = tl.fma(tl.zeros_like(p) + decay, p, sign * n)
    first = numbers_at(p_row, 2, STATE)
    if ADAM:
        second = numbers_at(p_row, 3, STATE)
        m, v = (tl.load(first + at, mask=inside, other=0.0).to(p.dtype),
                tl.load(second + at, mask=inside, other=0.0).to(p.dtype))  # fmt: skip
        m = tl.fma(gradient - m, tl.zeros_like(p) + option(p_table, 6, p), m)  # m + (1 - beta1) (g - m)
        v = tl.fma(option(p_table, 8, p) * gradient, gradient, option(p_table, 7, p) * v)
        tl.store(first + at, m.to(STATE), mask=inside)
        tl.store(second + at, v.to(STATE), mask=inside)
        root, eps, kept = option(p_table, 9, p), option(p_table, 10, p), option(p_table, 11, p)
        p = tl.fma(
            m / tl.fma(tl.sqrt(v), tl.zeros_like(p) + root, tl.zeros_like(p) + eps), -lr + tl.zeros_like(p), kept * p
        )
    else:
        if BUFFER:
            moved = gradient
            if READS:
                held = tl.load(first + at, mask=inside, other=0.0).to(p.dtype)
                moved = tl.fma(held, tl.zeros_like(p) + option(p_table, 6, p), option(p_table, 7, p) * gradient)
            tl.store(first + at, moved.to(STATE), mask=inside)
            gradient = tl.fma(moved, tl.zeros_like(p) + option(p_table, 6, p), gradient) if NESTEROV else moved
        p = tl.fma(gradient, tl.zeros_like(p) - lr, p)
    tl.store(param + at, p.to(PARAM), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def step_kernel(p_table, rows, ADAM: tl.constexpr, KEEP: tl.constexpr, BUFFER: tl.constexpr, READS: tl.constexpr,
                NESTEROV: tl.constexpr, PARAM: tl.constexpr, STATE: tl.constexpr, SUM: tl.constexpr,
                CORRELATED: tl.constexpr, HEAD: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The row whose programs this one is among: the first whose end lies behind it."""
    program = tl.program_id(0)
    low, high = tl.cast(0, tl.int32), tl.cast(rows, tl.int32) - 1
    while low < high:
        middle = (low + high) // 2
        behind = tl.load(p_table + HEAD + middle * FIELDS + 6) > program
        low = tl.where(behind, low, middle + 1)
        high = tl.where(behind, middle, high)
    p_row = p_table + HEAD + low * FIELDS
    before = tl.load(p_row - 1, mask=low > 0, other=0)  # the end of the row before
    offset = tl.load(p_row + 5)
    i = (program - before) * (TILES * LANES) + tl.arange(0, TILES * LANES)
    tile, lane = offset // TILE + i // LANES, i % LANES
    counter = tile * LANES + lane
    w0, w1, w2, w3 = word(p_table, 0), word(p_table, 1), word(p_table, 2), word(p_table, 3)
    w4, w5, w6, w7 = word(p_table, 4), word(p_table, 5), word(p_table, 6), word(p_table, 7)
    n0, n1 = word(p_table, 8), word(p_table, 9)
    p_past = p_table + HEAD + tl.cast(rows, tl.int64) * FIELDS  # behind the rows
    if CORRELATED:
        words = gathered(p_past, counter, w0, w1, w2, w3, w4, w5, w6, w7, SUM == tl.float64)
    else:
        words = chacha20(counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1)
    at = tile * TILE + lane - offset
    unsure = tl.zeros_like(at).to(tl.int32)  # a bit for each slot
    for pair in tl.static_range(PAIRS):
        size = tl.load(p_table + WORDS).to(tl.float64, bitcast=True).to(SUM)
        even, odd, cosine, sine, limit = drawn(words, pair, size, SUM == tl.float64, CORRELATED)
        place = at + 2 * pair * LANES
        unsure |= spend(p_table, p_row, place, even, cosine, limit, ADAM, KEEP, BUFFER, READS, NESTEROV, PARAM, STATE,
                        SUM) << (2 * pair)  # fmt: skip
        unsure |= spend(p_table, p_row, place + LANES, odd, sine, limit, ADAM, KEEP, BUFFER, READS, NESTEROV, PARAM,
                        STATE, SUM) << (2 * pair + 1)  # fmt: skip
    if tl.max(unsure, 0) > 0:
        for slot in range(2 * PAIRS):
            here = ((unsure >> slot) & 1) != 0
            if tl.max(here.to(tl.int32), 0) > 0:
                place = at + slot * LANES
                total = tl.load(numbers_at(p_row, 1, SUM) + place, mask=here, other=0.0)
                size, unit, scale = option(p_table, 0, total), option(p_table, 1, total), option(p_table, 2, total)
                n = settled(words, slot, total, size, unit, scale, here, counter, w0, w1, w2, w3, w4, w5, w6, w7, n0,
                            n1, p_past, CORRELATED)  # fmt: skip
                update(p_table, p_row, place, n, here, ADAM, KEEP, BUFFER, READS, NESTEROV, PARAM, STATE, SUM)


# ---------------------------------------------------------------------- launchers

_HEAD = 10 + 12  # words and options


def _bits(numbers: Sequence[float]) -> list[int]:
    """float64 numbers as int64 of the same bits."""
    return list(struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers)))


def _options(step: Step, dtype: torch.dtype) -> list[float]:
    """The rule's numbers, as `update` reads them."""
    u, sign = step.update, -1.0 if step.update.maximize else 1.0
    shared = [*Grid.of(step.draw.std, dtype), step.draw.scale, sign]
    if isinstance(u, Adam):
        root, size = 1 / math.sqrt(1 - u.beta2**u.t), u.lr / (1 - u.beta1**u.t)
        decays = (0.0, 1 - u.lr * u.weight_decay) if u.decoupled else (u.weight_decay, 1.0)
        return [*shared, decays[0], size, 1 - u.beta1, u.beta2, 1 - u.beta2, root, u.eps, decays[1]]
    return [*shared, u.weight_decay, u.lr, u.momentum, 1 - u.dampening, 0.0, 0.0, 0.0, 0.0]


def _step(step: Step) -> None:
    """All parameters of a type, and with states of a type, in one launch."""
    groups: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[Any]] = {}
    for i, ((param, total, *states), offset) in enumerate(step.rows()):
        check_single_std(step.draw.std, total.dtype)
        kinds = param.dtype, states[0].dtype if states else param.dtype, total.dtype
        if any(state.dtype != kinds[1] for state in states):
            raise ValueError(f"states of parameter {i} must all be of one type")
        if param.numel():
            groups.setdefault(kinds, []).append(((param, total, *states), offset))
    adam, correlated = isinstance(step.update, Adam), is_correlated(step.draw)
    for (param_type, state_type, total_type), members in groups.items():
        rows, programs = list[int](), 0
        for tensors, offset in members:
            tiles = (offset + tensors[0].numel() - 1) // SIZE + 1 - offset // SIZE
            programs += triton.cdiv(tiles, TILES)
            places = [t.data_ptr() for t in tensors] + [0] * (4 - len(tensors))
            rows += [*places, tensors[0].numel(), offset, programs]
        stream = stream_of(step.draw.key, step.draw.step)
        numbers = [*stream, *_bits(_options(step, total_type)), *rows]
        if correlated:
            numbers += past_of(step.draw, Grid.of(step.draw.std, total_type).size)
        with torch.cuda.device_of(members[0][0][0]):
            step_kernel[(programs,)](
                table_of(members[0][0][0].device, numbers), len(members), ADAM=adam, KEEP=step.draw.keep_grads,
                BUFFER=not adam and step.update.momentum != 0, READS=not adam and not step.update.first,
                NESTEROV=not adam and step.update.nesterov, PARAM=_TYPES[param_type], STATE=_TYPES[state_type],
                SUM=_TYPES[total_type], CORRELATED=correlated, HEAD=_HEAD, TILES=TILES, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    step.changed()


noisy_sgd_step_ = implementation(SGD, _step)
noisy_adamw_step_ = implementation(Adam, _step)
