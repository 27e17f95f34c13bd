"""What the tests of the noise share: the RFC's vectors, a scalar truth in Python, both implementations, statistics."""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fastdp.ops import noise, noise_reference
from fastdp.ops.checks import MASK
from fastdp.ops.noise import noise_
from fastdp.ops.noise_reference import LANES, SLOTS, Grid, reference_noise
from fastdp.ops.registry import OPERATORS, native

NATIVE = noise.native_status() == "built"
KEY = bytes(range(32))
PAIRS = SLOTS // 2
# The compiled kernel computes normals of float32 and 16-bit data in float: within 7e-7 of their pair's radius.
SINGLE_ERROR = 7e-7
LONGEST = math.sqrt(2 * math.log(2) * 36)  # radius


def draw(count: int, key: bytes = KEY, step: int = 0, offset: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return noise_(torch.full((count,), math.nan, dtype=dtype), 1.0, key, step, offset)


def released(total: Tensor, std: float, scale: float = 1.0, step: int = 0, offset: int = 0) -> Tensor:
    """unit * round((total + std N) / unit) * scale, by what serves the CPU."""
    found = total.clone()
    OPERATORS["add_noise_"](found, std, scale, noise.words_of(KEY), step, offset)
    return found


def nearly_halves(
    std: float,
    count: int,
    step: int,
    offset: int,
    dtype: torch.dtype,
    past: tuple[Sequence[int], Sequence[float]] = ((), ()),
) -> tuple[Tensor, Tensor]:
    """[count] sums that make half-integers of sum / unit + size * N, up to the bits that a first draw does not have:
    the key stream's further ones decide to what they are rounded. And the half-integers. past: earlier steps and their
    weights."""
    size, unit = Grid.of(std, dtype)
    v = size * reference_noise(count, KEY, step, offset)
    for earlier, weight in zip(*past, strict=True):
        v += size * weight * reference_noise(count, KEY, earlier, offset)
    large = torch.randint(-999, 999, (count,), generator=torch.Generator().manual_seed(2))
    halves = v.round() + 0.5 + (large if dtype == torch.float64 else 0)
    return (unit * (halves - v)).to(dtype), halves


def blocks(backend: str, state: list[int]) -> Tensor:
    """64 consecutive blocks, [16, 64] int64."""
    if backend == "C++":
        words = torch.full((16, LANES), 7, dtype=torch.int32)
        given = torch.tensor(state).to(torch.int32)
        native().chacha20_blocks(given.data_ptr(), words.data_ptr())
        return words.long() & MASK
    states = torch.tensor(state)[:, None].repeat(1, LANES)
    counter = [state[12] + (state[13] << 32) + lane for lane in range(LANES)]
    states[12] = torch.tensor([c & MASK for c in counter])
    states[13] = torch.tensor([c >> 32 & MASK for c in counter])
    return noise_reference.reference_chacha20(states)


def box_muller(backend: str, words: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """[16, 64] int64 -> [16, 64] float64, computed in dtype by the compiled kernel."""
    if backend == "reference":
        return noise_reference.reference_box_muller(words)
    out = torch.full((SLOTS, LANES), math.nan, dtype=dtype)
    given = words.to(torch.int32).contiguous()
    native().box_muller(given.data_ptr(), out.data_ptr(), noise.DTYPES[dtype])
    return out.double()


# ---------------------------------------------------------------------- a word at a time

# RFC 8439: 2.3.2, and appendix A.1 vectors 1 to 3: (key, counter, nonce, key stream)
VECTORS = [
    (
        KEY.hex(), 1, "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32, 0, "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32, 1, "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01", 1, "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
]  # fmt: skip


def words_of(nonce: str) -> tuple[int, ...]:
    return struct.unpack("<3I", bytes.fromhex(nonce))


def scalar_block(state: list[int]) -> list[int]:
    """The block function of RFC 8439 2.3.1, a word at a time."""
    x = list(state)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for to, by, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = (x[to] + x[by]) % 2**32
            value = x[turned] ^ x[to]
            x[turned] = (value << bits | value >> (32 - bits)) % 2**32

    for _ in range(10):
        for k in range(4):
            quarter(k, 4 + k, 8 + k, 12 + k)
        for k in range(4):
            quarter(k, 4 + (k + 1) % 4, 8 + (k + 2) % 4, 12 + (k + 3) % 4)
    return [(a + b) % 2**32 for a, b in zip(x, state, strict=True)]


def scalar_normal(i: int, key: bytes, step: int) -> float:
    """Element i as the documentation defines it."""
    tile, slot, lane = i // 1024, i % 1024 // 64, i % 64
    nonce = step + (0x6E6F << 48)
    counter = 64 * tile + lane
    head = struct.unpack("<4I", b"expand 32-byte k")
    state = [*head, *struct.unpack("<8I", key), counter % 2**32, counter >> 32, nonce % 2**32, nonce >> 32]
    return scalar_pair(scalar_block(state), slot // 2)[slot % 2]


def bits_of(w: list[int], pair: int) -> tuple[int, int]:
    """x in units of 2^-36 and the upper 28 bits of the circle's word, of a block's words."""
    circle, low = divmod(w[8 + pair], 16)
    return w[pair] * 16 + low, circle


def scalar_pair(w: list[int], pair: int) -> tuple[float, float]:
    """Two normals of a block's words, by libm."""
    x, circle = bits_of(w, pair)
    radius = math.sqrt(-2 * math.log1p(-x / 2**36))
    turned, steps = divmod(circle, 2**27)
    signed = steps - 2**27 if steps >= 2**26 else steps
    angle = math.pi * (2 * signed + 1) / 2**28
    return (-1) ** turned * radius * math.cos(angle), (-1) ** turned * radius * math.sin(angle)


def block_of(high: Tensor, low: Tensor, circle: Tensor) -> Tensor:
    """The words of blocks whose pairs have 32 and 4 bits of x and 28 of the circle: each [8, n] int64 -> [16, n]."""
    return torch.cat([high, circle << 4 | low])


# ---------------------------------------------------------------------- statistics


def kolmogorov(x: Tensor, unit: float = 0.0) -> float:
    """sqrt(n) sup |F_n - F|, at the ends of units where x is rounded to them: above 1.95 with probability 0.001."""
    values, counts = x.unique(return_counts=True)
    cdf, share = torch.special.ndtr(values + unit / 2), counts.cumsum(0) / len(x)
    below = torch.zeros_like(cdf) if unit else cdf - (share - counts / len(x))
    return math.sqrt(len(x)) * float(torch.maximum((share - cdf).abs(), below).max())


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])
