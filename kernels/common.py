"""What the kernels share: the order of tiles, sums of tiles and of partial results, choices by device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# Numbers of samples, rows and tiles, for which Triton makes no code of its own: batches of other sizes compile nothing.
kernel = functools.partial(
    triton.jit,
    do_not_specialize="B T n m n_o n_i n_n n_t n_k n_c n_p n_x n_g parts share".split(),
)

SMALLEST = tl.constexpr(1e-37)

CHUNK = 1024  # so many products are summed by a matrix unit before the sum goes to an accumulator of its own
# Matrix units cut their sums off towards zero after each 16 products: half a unit in the last place on average,
# of a sum that is half grown on average. Norms are enlarged by that share a factor and step.
TRUNCATION = 2.0**-25
# Before that they cut each product off two bits behind the sum's last place. Products of bfloat16 have 16 bits and end
# before that, mostly; those of float16 have 22 and do not: 16 of them lose four times as much as the sum. (MEASURED on
# an H100: where norms are enlarged for the sum's part alone, they are up to 4e-6 too small.)
PRODUCTS_CUT = 16 * 2.0**-2
VECTOR = 16  # elements
PAD_BYTES = 256 * 2**20


class Tile(NamedTuple):
    """Extents of a tile of the result (m, n), products a step (k), and how it is run."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@triton.jit
def grouped(tile, n_m, n_n, GROUP: tl.constexpr):
    """Number of a tile -> its row and column; GROUP rows go together, so that what they read stays in the L2 cache."""
    first = tile // (GROUP * n_n) * GROUP
    size = tl.minimum(n_m - first, GROUP)
    inside = tile - first * n_n
    return first + inside % size, inside // size


@triton.jit
def triangle(tile, n, GROUP: tl.constexpr):
    """Number of a tile -> row >= column of a triangle of n rows.

    The triangle is folded to a rectangle of (n + 1) // 2 rows: a long row and the short one that fills it up.
    """
    r, c = grouped(tile, (n + 1) // 2, n | 1, GROUP)
    length = n - r
    row = tl.where(c < length, n - 1 - r, r - (n & 1))
    return row, tl.where(c < length, c, c - length)


@triton.jit
def tile_sums(m):
    """Sum and sum of squares of a tile, float64; the tile is scaled, so that no square under- or overflows.

    Reduced over both axes at once: Triton 3.6 does not compile one after the other for sm_100.
    """
    top = tl.maximum(tl.max(tl.abs(m)), SMALLEST)
    m = m * (1.0 / top)
    top = top.to(tl.float64)
    total = tl.sum(m).to(tl.float64)
    squares = tl.sum(m * m).to(tl.float64)
    return total * top, squares * top * top


@triton.jit
def start_of(p, i_layer, TYPE: tl.constexpr):
    """Where the numbers of a layer begin: at p, or, given their type, at its address in a table at p.

    Addresses are multiples of 16 bytes (`grouped` launchers see to it).
    """
    if TYPE is None:
        return p
    else:
        return tl.multiple_of(tl.load(p + i_layer).to(tl.pointer_type(TYPE)), 16)


def is_half(tensor: Tensor) -> bool:
    """Whether products of such numbers are exact in float32, so that a matrix unit may form them."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def has_kernel(tensor: Tensor) -> bool:
    """Whether kernels take such numbers; float64 and complex ones are left to plain PyTorch."""
    return tensor.dtype == torch.float32 or is_half(tensor)


def chunk_of(tensor: Tensor) -> int:
    """How many products of such numbers a matrix unit sums up on its own."""
    return CHUNK // 2 if tensor.dtype == torch.float16 else CHUNK


def truncation(products: int, factor: Tensor) -> float:
    """The share by which sums of so many products of two such numbers come out too small on a matrix unit."""
    if not is_half(factor):
        return 0.0
    steps = triton.cdiv(min(products, chunk_of(factor)), 16)
    return TRUNCATION * steps * (1 + PRODUCTS_CUT if factor.dtype == torch.float16 else 1)


def same_type(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one type, which holds either's numbers exactly."""
    if x.dtype == y.dtype:
        return x, y
    common = torch.promote_types(x.dtype, y.dtype)
    return x.to(common), y.to(common)


def extent(size: int, largest: int) -> int:
    """The extent of a tile along a dimension: a power of two from 16, which a matrix unit needs, to `largest`."""
    return min(largest, max(16, triton.next_power_of_2(size)))


@triton.jit
def dot(x, y, acc, PRECISION: tl.constexpr):
    """acc + x y. "wide" is for the interpreter, which has no products of bfloat16."""
    if PRECISION == "wide":
        return tl.dot(x.to(tl.float32), y.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION)


def precision(x: Tensor) -> str:
    """How products are formed: float32 never as tf32; 16-bit numbers exactly in any case."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        return "wide"
    return "tf32" if is_half(x) else "ieee"


class Device(NamedTuple):
    """Multiprocessors, bytes of shared memory a program may use, compute capability (90 for 9.0)."""

    units: int
    shared: int
    arch: int


ASSUMED = [Device(132, 227 * 1024, 90)]  # where no GPU is asked: a Hopper GPU


@functools.cache
def _properties(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    arch = 10 * found.major + found.minor
    usual = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(arch, 99) * 1024
    return Device(found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", usual), arch)


def device_limits(device: torch.device) -> Device:
    """What tiles are chosen by."""
    if device.type != "cuda":
        return ASSUMED[0]
    return _properties(torch.cuda.current_device() if device.index is None else device.index)


def aligned(*tensors: Tensor) -> bool:
    """Whether Triton can load 16 bytes at once: strides and sizes of whole vectors, as it specialises on them."""
    return all(
        x.storage_offset() * x.itemsize % 16 == 0
        and all(stride == 1 or stride % VECTOR == 0 for stride in x.stride())
        and all(size % VECTOR == 0 for size, stride in zip(x.shape, x.stride(), strict=True) if stride == 1)
        for x in tensors
    )


def filled(x: Tensor) -> Tensor:
    """x [B,T,*] as it is, or copied with zeros to whole vectors of columns."""
    return x if aligned(x) else F.pad(x, (0, -x.size(2) % VECTOR)).contiguous()


def wide(a: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """a and g [B,T,*] as they are if their rows allow wide loads, else filled, so many samples at a time as fit
    PAD_BYTES; with the samples they are of.
    """
    if not is_half(a) or aligned(a, g):
        yield a, g, slice(0, a.size(0))
        return
    bytes_per_sample = sum(x.size(1) * (x.size(2) + VECTOR) * x.itemsize for x in (a, g) if not aligned(x))
    count = max(1, PAD_BYTES // bytes_per_sample)
    for low in range(0, a.size(0), count):
        rows = slice(low, min(a.size(0), low + count))
        yield *(x[rows] if aligned(x) else filled(x[rows]) for x in (a, g)), rows


def stages(bytes_per_stage: int, shared: int, most: int = 4) -> int:
    """How many steps are in flight, in a share of the shared memory that leaves room for the rest."""
    return max(1, min(most, (shared - 8 * 1024) // max(bytes_per_stage, 1)))


def float32_is_exact() -> bool:
    """Whether PyTorch's float32 matrix products are of float32, not of tf32 or bfloat16 numbers."""
    ours, general = torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision
    return ours == "ieee" or (ours == "none" and general in ("none", "ieee"))


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """Within it cuDNN's convolutions are of float32 numbers, by PyTorch's default of tf32 ones, and always the same."""
    cudnn = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.deterministic
    cudnn.conv.fp32_precision, cudnn.deterministic = "ieee", True
    try:
        yield
    finally:
        cudnn.conv.fp32_precision, cudnn.deterministic = before
