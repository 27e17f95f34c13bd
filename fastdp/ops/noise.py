"""Gaussian noise from a cryptographic generator, a function of (key, step, global index) alone.

Generator: ChaCha20 (RFC 8439, section 2.3) with a 256-bit key; nonce = step, with a tag of what the stream is
for; block counter from the element's global index. So noise does not depend on threads, chunks, sharding or
device, and without the key no draw tells anything about another.

Normals by Box & Muller (1958), two from 85 bits. The radius is sqrt(-2 ln(1 - x)), x one of 2^53 numbers in [0, 1),
and ends at 8.57: what lies beyond has a probability of 2^-53 a pair (32 bits would end at 6.66). The point on the
circle is one of 2^32 at equal distances, none of them on an axis: neighbours are 1.5e-9 apart, and a coordinate is
nowhere nearer to 0 than 7.3e-10 of the radius. Near 0 that is coarser than float32 could be, elsewhere finer.

On the CPU the compiled kernel csrc/cpu/noise.cpp draws and adds in one pass: for float64 tensors in double with an
error below 1e-13, for all others in float, each normal within 7e-7 of its pair's radius (root mean square of the
error 6e-8; over 1e8 normals the mean was off by 3e-12, the variance by 2e-9). A std that is no float is rounded up
there, by 1.2e-7 of it at most. The same bits on every instruction set. Where the kernel is absent plain PyTorch does
the same in int64 and float64.

Element i is one of the 12 normals of one block: with tile = i // 768, slot = i % 768 // 64, lane = i % 64 the
block's counter is 64 * tile + lane. Slots 2p and 2p + 1 are radius * (cos, sin) angle of pair p in 0 .. 5, from words
w of the block (no bit serves two pairs):
    x = (2^21 w[p] + low) / 2^53; low: the lower 21 bits of w[12 + p] for p < 4; the upper 11 bits of w[12] and above
        them the upper 10 of w[13] for p = 4; the same of w[14] and w[15] for p = 5
    angle = pi (c + 1) / 2^32, c = w[6 + p] shifted left by one, as a signed number of 32 bits; its upper bit, shifted
        out, turns the point by half a circle
"""

from __future__ import annotations

import hashlib
import importlib
import math
import operator
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import MASK, MAX_STEP, check_out, refuse_graph, words_of
from .common import DTYPES
from .registry import Kernel, cpp, cuda_cpp, define, native, triton

LANES, SLOTS = 64, 12  # blocks of a tile, normals of a block
TILE = LANES * SLOTS
DOMAIN = 0x6E6F  # upper 16 bits of the nonce: this use of the key; other uses must take other numbers
SIGMA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
CHUNK = 1 << 11  # tiles the reference draws at once: some 64 MiB of temporaries


class Noise:
    """A source of independent normal noise for one training run.

    seed: an int for reproducible experiments (then the guarantee is void: who knows the seed can subtract
    the noise), or None for a secret key from the operating system. `step` must grow with every noised step:
    noise is a function of (key, step, global index).
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.step = 0
        self._new_key()

    def _new_key(self) -> None:
        self._key = secrets.token_bytes(32) if self.seed is None else key_of(self.seed)
        self._process = os.getpid()

    def restore(self, key: bytes, step: int) -> None:
        """Take up the stream of another source at a step. Raises ValueError on what is no key or step."""
        words_of(key)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MAX_STEP:
            raise ValueError(f"step must be a whole number in [0, 2^48), not {step!r}")
        self._key, self.step, self._process = bytes(key), step, os.getpid()

    @property
    def secure(self) -> bool:
        """Whether the key is secret."""
        return self.seed is None

    def add_scaled_(self, tensor: Tensor, std: float, scale: float, offset: int) -> Tensor:
        """tensor = (tensor + std * N(0, 1)) * scale, in place, in the tensor's type or better.

        Args: tensor contiguous, float32 or float64, of any shape; offset the global index of its first
        element: ranges of one step must not overlap. Raises TypeError or ValueError on anything else.
        """
        if std == 0:
            return tensor.mul_(scale)
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"noise is added in float32 or float64, not {tensor.dtype}")
        refuse_graph(tensor)
        _add_noise_op(tensor, std, scale, words_of(self.key), self.step, offset)
        return tensor

    @property
    def key(self) -> bytes:
        """The 32 bytes of the generator's key; a new one after a fork, where it is secret."""
        if self._process != os.getpid():
            self._new_key()  # after a fork: the same noise on two sums would cancel in their difference
        return self._key

    def __getstate__(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}  # a copy or pickle must not repeat the secret noise

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seed, self.step = state["seed"], state["step"]
        self._new_key()


def noise_(out: Tensor, std: float, key: bytes | Sequence[int], step: int, offset: int = 0) -> Tensor:
    """out = std * N(0, 1), in place; returns out.

    Args: out contiguous, float32, float64, bfloat16 or float16, any shape and device: drawn in float32 or better,
    then rounded once; std >= 0, 0 draws nothing; key 32 bytes, or their 8 little-endian words; step in [0, 2^48);
    offset >= 0 the global index of out's first element. Raises TypeError or ValueError on anything else.
    Source: RFC 8439; Box & Muller 1958, A note on the generation of random normal deviates.

    >>> key = bytes(32)
    >>> whole = noise_(torch.empty(1000), 1.0, key, step=0)
    >>> part = noise_(torch.empty(10), 1.0, key, step=0, offset=500)
    >>> torch.equal(whole[500:510], part)
    True
    """
    refuse_graph(out)
    _noise_op(out, std, words_of(key), step, offset)
    return out


def key_of(seed: int) -> bytes:
    """The 32-byte key of a seed, any int."""
    return hashlib.sha256(b"fastdp noise key, version 1: %d" % operator.index(seed)).digest()


def native_status() -> str:
    """ "built" where the compiled kernel is used on the CPU, else why it is absent."""
    module = native()
    return module if isinstance(module, str) else "built"


# ---------------------------------------------------------------------- operators


def _native_draw(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int,
                 read: bool) -> None:  # fmt: skip
    check_out(tensor, key, step, std, offset)
    module: Any = native()
    module.noise_into(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel(), offset, list(key), step, std, scale,
                      read, torch.get_num_threads())  # fmt: skip
    torch.autograd.graph.increment_version(tensor)


def _native_noise(out: Tensor, std: float, key: Sequence[int], step: int, offset: int = 0) -> None:
    _native_draw(out, std, 1.0, key, step, offset, False)


def _native_add(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int) -> None:
    _native_draw(tensor, std, scale, key, step, offset, True)


def _noise(out: Tensor, std: float, key: Sequence[int], step: int, offset: int = 0) -> None:
    check_out(out, key, step, std, offset)
    if std == 0:
        out.zero_()
        return
    flat = out.view(-1)
    for low, high, normal in reference_chunks(flat.numel(), key, step, offset, out.device):
        flat[low:high] = rounded(normal.mul_(std), out.dtype)


def _add_noise(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int) -> None:
    check_out(tensor, key, step, std, offset)
    if std == 0:
        tensor.mul_(scale)
        return
    flat = tensor.view(-1)
    for low, high, normal in reference_chunks(flat.numel(), key, step, offset, tensor.device):
        part = flat[low:high]
        part.copy_(rounded(normal.mul_(std).add_(part).mul_(scale), tensor.dtype))


def on_cuda(function: str, returns: bool = True, instead: Kernel | None = None) -> Kernel:
    """A function of fastdp.ops.cuda, which calls the compiled CUDA kernels; returns: as the operator's schema says.

    instead: what serves where they are not built.
    """

    def call(*args: Any, **options: Any) -> Any:
        result = getattr(importlib.import_module("fastdp.ops.cuda"), function)(*args, **options)
        return result if returns else None

    return cuda_cpp(call, instead)


_nothing: Callable[..., None] = lambda *args, **options: None

_noise_op = define("noise_(Tensor(a!) out, float std, int[] key, int step, int offset=0) -> ()", _noise, _nothing,
                   CPU=cpp(_native_noise), CUDA=on_cuda("noise_", False, triton("noise", "noise_")))  # fmt: skip
# tensor = (tensor + std * N(0, 1)) * scale
_add_noise_op = define(
    "add_noise_(Tensor(a!) tensor, float std, float scale, int[] key, int step, int offset) -> ()",
    _add_noise, _nothing, CPU=cpp(_native_add), CUDA=on_cuda("add_scaled_", False, triton("noise", "add_noise_")),
)  # fmt: skip


# ---------------------------------------------------------------------- reference


def reference_noise(
    count: int,
    key: bytes,
    step: int,
    offset: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """N(0, 1) of the global indices offset .. offset + count - 1 in plain PyTorch on any device: [count]."""
    out = torch.empty(count, dtype=dtype, device=device)
    _noise(out, 1.0, words_of(key), step, offset)
    return out


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 x in a type, rounded once (PyTorch goes by way of float32 to the 16-bit types).

    Float32 is rounded to odd first: inexact values get their last bit set, so that no tie arises that was none.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    single = x.float()
    bits = single.view(torch.int32)
    moved = torch.where(single.double().abs() < x.abs(), bits + 1, bits - 1)
    odd = torch.where((single.double() != x) & (bits & 1 == 0), moved, bits)
    return torch.where(x.isnan(), single, odd.view(torch.float32)).to(dtype)


def reference_chunks(
    count: int, words: Sequence[int], step: int, offset: int, device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """(low, high, normals [high - low] float64) of successive ranges of [0, count)."""
    end = offset + count
    nonce = (step & MASK, step >> 32 | DOMAIN << 16)
    for first in range(offset // TILE, -(-end // TILE) if count else 0, CHUNK):
        last = min(first + CHUNK, -(-end // TILE))
        counter = torch.arange(first * LANES, last * LANES, device=device)
        state = torch.empty(16, len(counter), dtype=torch.int64, device=device)
        for row, word in enumerate((*SIGMA, *words)):
            state[row] = word
        state[12], state[13] = counter & MASK, counter >> 32
        state[14], state[15] = nonce
        normal = reference_box_muller(reference_chacha20(state))  # [12, tiles * 64]
        normal = normal.view(SLOTS, -1, LANES).transpose(0, 1).reshape(-1)
        begin = first * TILE
        low, high = max(offset, begin), min(end, last * TILE)
        yield low - offset, high - offset, normal[low - begin : high - begin]


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


def reference_box_muller(words: Tensor) -> Tensor:
    """Key stream to normals: int64 words [16, n] -> float64 [12, n], of six pairs as the head of this file says."""
    upper, circle, rest = words.split([6, 6, 4])
    low = torch.cat([rest & (1 << 21) - 1, rest[0::2] >> 21 | rest[1::2] >> 22 << 11])  # [6, n]
    radius = (upper << 21 | low).double().mul_(-(2.0**-53)).log1p_().mul_(-2).sqrt_()
    twice = circle << 1 & MASK
    angle = (twice - (twice >> 31 << 32) + 1).double() * (math.pi * 2.0**-32)
    radius = torch.where(circle >> 31 == 1, -radius, radius)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1).flatten(0, 1)
