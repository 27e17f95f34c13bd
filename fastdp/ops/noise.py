"""Gaussian noise from a cryptographic generator, a function of (key, step, global index) alone.

Generator: ChaCha20 (RFC 8439, section 2.3) with a 256-bit key; nonce = step, with a tag of what the stream is
for; block counter from the element's global index. So noise does not depend on threads, chunks, sharding or
device, and without the key no draw tells anything about another. Normals by Box & Muller (1958), two from 128
bits: the radius from 64 (up to 9.4 sigma; 32 bits would end at 6.7), the angle from 53.

On the CPU the compiled kernel csrc/cpu/noise.cpp draws and adds in one pass; where it is absent, and on other
devices, plain PyTorch does the same in int64 and float64.

Element i is one of the 8 normals of one block: with tile = i // 512, slot = i % 512 // 64, lane = i % 64 the
block's counter is 64 * tile + lane, and slots 2p and 2p + 1 come from its words 4p .. 4p + 3.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import operator
import os
import secrets
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LANES, SLOTS = 64, 8  # blocks of a tile, normals of a block
TILE = LANES * SLOTS
MAX_STEP = 1 << 48
DOMAIN = 0x6E6F  # upper 16 bits of the nonce: this use of the key; other uses must take other numbers
SIGMA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
MASK = 0xFFFFFFFF
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

    @property
    def secure(self) -> bool:
        """Whether the key is secret."""
        return self.seed is None

    def add_scaled_(self, tensor: Tensor, std: float, scale: float, offset: int) -> Tensor:
        """tensor = (tensor + std * N(0, 1)) * scale, in place, rounded once.

        Args: tensor contiguous, float32 or float64, of any shape; offset the global index of its first
        element: ranges of one step must not overlap. Raises TypeError or ValueError on anything else.
        """
        if std == 0:
            return tensor.mul_(scale)
        if self._process != os.getpid():
            self._new_key()  # after a fork: the same noise on two sums would cancel in their difference
        return _draw_into(tensor, std, scale, self._key, self.step, offset, keep=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}  # a copy or pickle must not repeat the secret noise

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seed, self.step = state["seed"], state["step"]
        self._new_key()


def noise_(out: Tensor, std: float, key: bytes, step: int, offset: int = 0) -> Tensor:
    """out = std * N(0, 1), in place; returns out.

    Args: out contiguous, float32 or float64, any shape and device; std >= 0; key 32 bytes; step in [0, 2^48);
    offset >= 0 the global index of out's first element. Raises TypeError or ValueError on anything else.
    Source: RFC 8439; Box & Muller 1958, A note on the generation of random normal deviates.

    >>> key = bytes(32)
    >>> whole = noise_(torch.empty(1000), 1.0, key, step=0)
    >>> part = noise_(torch.empty(10), 1.0, key, step=0, offset=500)
    >>> torch.equal(whole[500:510], part)
    True
    """
    return _draw_into(out, std, 1.0, key, step, offset, keep=False)


def key_of(seed: int) -> bytes:
    """The 32-byte key of a seed, any int."""
    return hashlib.sha256(b"fastdp noise key, version 1: %d" % operator.index(seed)).digest()


def native_status() -> str:
    """ "built" where the compiled kernel is used on the CPU, else why it is absent."""
    native = _native()
    return native if isinstance(native, str) else "built"


@functools.cache
def _native() -> ModuleType | str:
    """The compiled module, or why it is absent."""
    try:
        return importlib.import_module("fastdp._C")
    except ModuleNotFoundError:
        return "fastdp._C was not compiled: run `python setup.py build_ext --inplace`, or reinstall with a compiler"
    except ImportError as error:
        return f"fastdp._C does not load: {error}"


def _draw_into(tensor: Tensor, std: float, scale: float, key: bytes, step: int, offset: int, keep: bool) -> Tensor:
    _check(key, step, offset, tensor.numel())
    if tensor.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"noise is added in float32 or float64, not {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError("noise is drawn into contiguous memory: call contiguous() first")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("noise is drawn in place, which autograd does not see: detach() the tensor")
    if not 0 <= std < math.inf:
        raise ValueError(f"std must be 0 or larger and finite, not {std!r}")
    native = _native()
    if tensor.device.type != "cpu" or isinstance(native, str):
        flat = tensor.view(-1)
        for low, high, normal in _reference_chunks(flat.numel(), key, step, offset, tensor.device):
            part = flat[low:high]
            total = normal.mul_(std)
            part.copy_((total.add_(part) if keep else total).mul_(scale))
        return tensor
    draw = native.noise_f32 if tensor.dtype == torch.float32 else native.noise_f64
    draw(tensor.data_ptr(), tensor.numel(), offset, key, step, std, scale, keep, torch.get_num_threads())
    torch.autograd.graph.increment_version(tensor)
    return tensor


def _check(key: bytes, step: int, offset: int, count: int) -> None:
    if not isinstance(key, bytes) or len(key) != 32:
        raise ValueError("key must be 32 bytes")
    if not 0 <= step < MAX_STEP:
        raise ValueError(f"step must lie in [0, 2^48), not {step}")
    if offset < 0 or offset + count > 1 << 62:
        raise ValueError(f"global indices must lie in [0, 2^62): offset {offset} with {count} elements")


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
    _check(key, step, offset, count)
    out = torch.empty(count, dtype=dtype, device=device)
    for low, high, normal in _reference_chunks(count, key, step, offset, out.device):
        out[low:high] = normal
    return out


def _reference_chunks(
    count: int, key: bytes, step: int, offset: int, device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """(low, high, normals [high - low] float64) of successive ranges of [0, count)."""
    end = offset + count
    words = [int.from_bytes(key[k : k + 4], "little") for k in range(0, 32, 4)]
    nonce = (step & MASK, step >> 32 | DOMAIN << 16)
    for first in range(offset // TILE, -(-end // TILE) if count else 0, CHUNK):
        last = min(first + CHUNK, -(-end // TILE))
        counter = torch.arange(first * LANES, last * LANES, device=device)
        state = torch.empty(16, len(counter), dtype=torch.int64, device=device)
        for row, word in enumerate((*SIGMA, *words)):
            state[row] = word
        state[12], state[13] = counter & MASK, counter >> 32
        state[14], state[15] = nonce
        normal = reference_box_muller(reference_chacha20(state))  # [8, tiles * 64]
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
    """Key stream to normals: int64 words [16, n] -> float64 [8, n].

    Of a pair's words w0 .. w3: radius = sqrt(-2 ln U) with U = (2^32 w1 + w0 + 1) / 2^64 in (0, 1]; the upper
    52 bits of 2^32 w3 + w2 give an angle in [-pi/2, pi/2), its last bit turns the point by half a circle.
    """
    w0, w1, w2, w3 = words.view(4, 4, -1).unbind(1)  # each [4, n]: a row a pair
    u = (w1.double() * 2.0**32 + (w0 + 1).double()) * 2.0**-64
    radius = u.log_().mul_(-2).sqrt_()
    angle = ((w3 << 20 | w2 >> 12).double() * 2.0**-52 - 0.5) * math.pi
    radius = torch.where(w2 & 1 == 1, -radius, radius)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1).flatten(0, 1)
