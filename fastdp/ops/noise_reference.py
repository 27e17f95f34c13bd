"""Noise in plain PyTorch on any device, whole numbers of grids found by arithmetic of any precision where float64
leaves them open: the definition of what the kernels of `fastdp.ops.noise` release, bit for bit."""

from __future__ import annotations

import dataclasses
import decimal
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import MASK, words_of

STREAM = 2  # of all definitions of what a key draws: 1 made 12 normals of a block
LANES, SLOTS = 64, 16  # blocks of a tile, normals of a block
TILE = LANES * SLOTS
DOMAIN = 0x6E6F  # upper 16 bits of the nonce: this use of the key; a level of more bits is added to it
SIGMA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
CHUNK = 1 << 11  # tiles drawn at once: some 64 MiB of temporaries


class Grid(NamedTuple):
    """Multiples of what noise is released as: std = size * unit, size in [64, 128), unit a power of two."""

    size: float
    unit: float

    @classmethod
    def of(cls, std: float, dtype: torch.dtype) -> Grid:
        """dtype: of the sum. A std of more than float32's 24 bits is rounded up, but for float64."""
        mantissa, exponent = math.frexp(std)
        if dtype != torch.float64:
            mantissa, exponent = math.frexp(math.ldexp(math.ceil(mantissa * 2.0**24), exponent - 24))
        return cls(mantissa * 128, math.ldexp(1.0, exponent - 7))


def reference_noise(
    count: int,
    key: bytes,
    step: int,
    offset: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The normals of the global indices offset .. offset + count - 1, by the first 64 bits of each pair and not rounded
    to a grid: [count]."""
    out = torch.empty(count, dtype=dtype, device=device)
    for low, high, normal in reference_normals(count, words_of(key), step, offset, out.device):
        out[low:high] = normal
    return out


def reference_normals(
    count: int, words: Sequence[int], step: int, offset: int, device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """(low, high, normals [high - low] float64) of successive ranges of [0, count)."""
    for chunk in _chunks(count, words, step, offset, device):
        yield chunk.low, chunk.high, chunk.in_order(reference_box_muller(chunk.words))


def reference_release(
    total: Tensor,
    std: float,
    scale: float,
    words: Sequence[int],
    draws: tuple[int, Sequence[int], Sequence[float]],
    offset: int,
    dtype: torch.dtype,
) -> Iterator[tuple[int, int, Tensor]]:
    """(low, high, n [high - low]) of successive ranges of the sum: n = unit * round(sum / unit + size * N) * scale.

    N is the sum of the normals of steps, each times a weight; draws: the step whose weight is 1, the earlier ones, and
    their weights. total: one-dimensional, float32 or float64; dtype: of what is released. The product is in float32
    where neither that nor std nor scale needs more. A sum that is no number, or is too large for noise to change a bit
    of it, stays.
    """
    size, unit = Grid.of(std, dtype)
    single = dtype != torch.float64 and all(
        number == 0 or 2.0**-60 <= abs(number) <= 2.0**60 for number in (std, scale)
    )
    kind = torch.float32 if single else torch.float64
    own, earlier_steps, weights = draws
    earlier = [(step, size * weight) for step, weight in zip(earlier_steps, weights, strict=True) if weight]
    steps, sizes = zip(*earlier, (own, size), strict=True)
    each = [_chunks(total.numel(), words, step, offset, total.device) for step in steps]
    for chunks in zip(*each, strict=True):
        chunk = chunks[-1]
        given = chunk.of_slots(total.double())
        grids = given / unit
        whole = grids.round()
        part = grids - whole
        v, limit = part.clone(), torch.full_like(part, 0.5)
        for of_step, share in zip(chunks, sizes, strict=True):
            normal = reference_box_muller(of_step.words)  # [16, blocks]
            radius = normal.view(SLOTS // 2, 2, -1).square().sum(1).sqrt().repeat_interleave(2, 0)
            v.add_(normal, alpha=share)
            # what the angle's 28 bits leave, and the 36 of x: 2^-36 of it, by radius dr = dx / (1 - x)
            off = 2e-8 * radius + 1.2 * 2.0**-36 * (radius.square() / 2).exp() / radius
            limit -= abs(share) * off.masked_fill_(radius > 6.5, 1e9)
        near = v.round()
        for slot, block in ((v - near).abs() > limit).nonzero().tolist():
            streams = [(of_step.key_stream(block), share) for of_step, share in zip(chunks, sizes, strict=True)]
            near[slot, block] = nearest_whole(streams, slot, float(part[slot, block]))
        factor = torch.tensor(scale, dtype=kind).double()
        n = (whole + near).to(kind).double() * (unit * factor) + 0.0  # no zero has a sign
        n = torch.where(grids.to(kind).isfinite(), n, given * factor)
        yield chunk.low, chunk.high, rounded(chunk.in_order(n).to(kind), dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a type, rounded once (PyTorch goes from float64 by way of float32 to the 16-bit types).

    Float32 is rounded to odd first: inexact values get their last bit set, so that no tie arises that was none.
    """
    if dtype not in (torch.bfloat16, torch.float16) or x.dtype != torch.float64:
        return x.to(dtype)
    single = x.float()
    bits = single.view(torch.int32)
    moved = torch.where(single.double().abs() < x.abs(), bits + 1, bits - 1)
    odd = torch.where((single.double() != x) & (bits & 1 == 0), moved, bits)
    return torch.where(x.isnan(), single, odd.view(torch.float32)).to(dtype)


# ---------------------------------------------------------------------- the key stream


class _Chunk(NamedTuple):
    """Blocks of whole tiles that a range [low, high) lies in."""

    low: int
    high: int
    before: int  # elements of the first tile before the range
    words: Tensor  # [16, blocks]
    state: Sequence[int]  # of the generator, without a counter
    counter: int  # of the first block

    def in_order(self, slots: Tensor) -> Tensor:
        """[16, blocks] -> [high - low], as the elements lie."""
        return slots.view(SLOTS, -1, LANES).transpose(0, 1).reshape(-1)[self.before :][: self.high - self.low]

    def of_slots(self, values: Tensor) -> Tensor:
        """[count] of the whole range -> [16, blocks], zeros beyond this one."""
        laid = values.new_zeros(self.words.size(1) * SLOTS)
        laid[self.before : self.before + self.high - self.low] = values[self.low : self.high]
        return laid.view(-1, SLOTS, LANES).transpose(0, 1).reshape(SLOTS, -1)

    def key_stream(self, block: int) -> KeyStream:
        return KeyStream(self.state, self.counter + block, self.words[:, block].tolist())


def _chunks(count: int, words: Sequence[int], step: int, offset: int, device: torch.device) -> Iterator[_Chunk]:
    end = offset + count
    key_and_nonce = (*SIGMA, *words, step & MASK, step >> 32 | DOMAIN << 16)
    for first in range(offset // TILE, -(-end // TILE) if count else 0, CHUNK):
        last = min(first + CHUNK, -(-end // TILE))
        counter = torch.arange(first * LANES, last * LANES, device=device)
        low, high = max(offset, first * TILE), min(end, last * TILE)
        stream = reference_chacha20(_states(key_and_nonce, counter))
        yield _Chunk(low - offset, high - offset, low - first * TILE, stream, key_and_nonce, first * LANES)


def _states(key_and_nonce: Sequence[int], counter: Tensor) -> Tensor:
    """Of the generator, at these counters: [16, n] int64."""
    state = torch.empty(16, len(counter), dtype=torch.int64, device=counter.device)
    for row, word in enumerate(key_and_nonce[:12]):
        state[row] = word
    state[12], state[13] = counter & MASK, counter >> 32
    state[14], state[15] = key_and_nonce[12:]
    return state


class KeyStream(NamedTuple):
    """One block, and those of further levels."""

    key_and_nonce: Sequence[int]
    counter: int
    words: list[int]

    def first_bits(self, pair: int) -> _Bits:
        w = self.words
        turned, steps = divmod(w[8 + pair] >> 4, 1 << 27)
        return _Bits(w[pair] << 4 | w[8 + pair] % 16, steps - (1 << 27) if steps >> 26 else steps, turned)

    def level(self, number: int) -> list[int]:
        *before, last = self.key_and_nonce
        state = _states((*before, last + (number << 16)), torch.tensor([self.counter]))
        return reference_chacha20(state)[:, 0].tolist()  # type: ignore[no-any-return]


def reference_chacha20(state: Tensor) -> Tensor:
    """The ChaCha20 block function (RFC 8439, 2.3) of n states, [16, n] -> [16, n]; words are int64 below 2^32."""
    a, b, c, d = state.view(4, 4, -1).unbind()  # rows of the 4 x 4 state; a quarter round of all four columns
    for _ in range(10):
        a, b, c, d = _quarter_round(a, b, c, d)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)  # diagonals become columns
        a, b, c, d = _quarter_round(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d]).add_(state).bitwise_and_(MASK)


def _quarter_round(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for left, right in ((16, 12), (8, 7)):
        a = (a + b) & MASK
        d = _rotate_left(d ^ a, left)
        c = (c + d) & MASK
        b = _rotate_left(b ^ c, right)
    return a, b, c, d


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits | x >> (32 - bits)) & MASK


# ---------------------------------------------------------------------- key stream to normals


def reference_box_muller(words: Tensor) -> Tensor:
    """Key stream to normals: int64 words [16, n] -> float64 [16, n], of eight pairs as `fastdp.ops.noise` says."""
    upper, circle = words.split(8)
    radius = (upper << 4 | circle & 15).double().mul_(-(2.0**-36)).log1p_().mul_(-2).sqrt_()
    steps = circle >> 4 & (1 << 27) - 1
    angle = (2 * (steps - (steps >> 26 << 27)) + 1).double() * (math.pi * 2.0**-28)
    radius = torch.where(circle >> 31 == 1, -radius, radius)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1).flatten(0, 1)


def nearest_whole(streams: Sequence[tuple[KeyStream, float]], slot: int, part: float) -> float:
    """part + the sum of size * N over (key stream, size), N of a slot, rounded to a whole number: 32 more bits of each
    x and each angle at a time, until all numbers that begin with them are rounded alike."""
    bits = [stream.first_bits(slot // 2) for stream, _ in streams]
    for level in range(1, 1 << 15):
        for (stream, _), each in zip(streams, bits, strict=True):
            more = stream.level(level)
            each.x, each.around = each.x << 32 | more[slot // 2 * 2], each.around << 32 | more[slot // 2 * 2 + 1]
        with decimal.localcontext() as context:
            context.prec = 30 + 20 * level
            found = [each.normal(level, slot % 2 == 1) for each in bits]
            sizes = [Decimal(size) for _, size in streams]
            v = Decimal(part) + sum(size * value for size, (value, _) in zip(sizes, found, strict=True))
            off = sum(abs(size) * error for size, (_, error) in zip(sizes, found, strict=True))
            whole = v.to_integral_value(decimal.ROUND_HALF_EVEN)
            if abs(v - whole) < Decimal("0.5") - off - Decimal(10) ** (10 - context.prec):
                return float(whole)
    raise RuntimeError("the key stream does not end, this one seems to be constant")


@dataclasses.dataclass
class _Bits:
    """What is drawn of a pair: x in units of 2^-36, the angle in 2^-27 half circles, each times 2^(32 levels)."""

    x: int
    around: int
    turned: int

    def normal(self, level: int, odd: bool) -> tuple[Decimal, Decimal]:
        """A normal of the pair in the present context, and how far off it may be."""
        error, finest = Decimal(10) ** (10 - decimal.getcontext().prec), Decimal(2) ** (-32 * level)
        left = Decimal((1 << 36 + 32 * level) - self.x) * finest  # 1 - x in units of 2^-36
        radius = (-2 * (left / 2**36).ln()).sqrt()
        y = Decimal(self.around) * finest / 2**27  # half circles
        value = (-radius if self.turned else radius) * (_sine(y) if odd else _sine(y + Decimal("0.5")))
        if left <= finest:
            return value, Decimal("Infinity")
        log_off = 2 * finest / (left - finest) + error
        return value, 2 * log_off / (radius + log_off.sqrt()) + radius * 7 * finest / 2**28 + error


def _sine(half_circles: Decimal) -> Decimal:
    """sin(pi h), |h| <= 1."""
    x = _pi(decimal.getcontext().prec) * half_circles
    term, total, k = x, x, 1
    while term and abs(term) > Decimal(10) ** -decimal.getcontext().prec:
        term *= -x * x / ((k + 1) * (k + 2))
        total, k = total + term, k + 2
    return total


@cache
def _pi(digits: int) -> Decimal:
    """Machin's formula: 16 atan(1/5) - 4 atan(1/239)."""

    def atan_of_inverse(n: int) -> Decimal:
        power, total, k = Decimal(1) / n, Decimal(0), 1
        while power > Decimal(10) ** -(digits + 5):
            total += power / (k if k % 4 == 1 else -k)
            power, k = power / (n * n), k + 2
        return total

    with decimal.localcontext() as context:
        context.prec = digits + 10
        return 16 * atan_of_inverse(5) - 4 * atan_of_inverse(239)
