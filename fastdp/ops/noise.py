"""Gaussian noise from a cryptographic generator, a function of (key, step, global index) alone, and its release.

    n = unit * round((sum + std * N(0, 1)) / unit) * scale

N is an ideal normal number, and unit the power of two next below std / 64: n is post-processing of the Gaussian
mechanism of real numbers, and no bit of it tells more of the sum (docs/privacy.md has the proof). It is computed as if
by real numbers: float arithmetic decides where its error and the bits that it has not drawn leave no doubt; else more
bits are drawn, in float64 and in pairs of it (csrc/exact.h). So n has the same bits on every device, instruction set,
and number of threads and ranks. The unit adds at most 2.1e-5 to the noise's variance.

`noise_` draws noise alone, in floating point and not rounded to a unit: a sum that it is added to keeps its low bits.

Generator: ChaCha20 (RFC 8439, section 2.3) with a 256-bit key; nonce = step, with a tag of what the stream is
for; block counter from the element's global index. So noise does not depend on threads, chunks, sharding or
device, and without the key no draw tells anything about another.

Normals by Box & Muller (1958), two from two real numbers, of which the key stream gives the first 36 and 27 bits, and
32 more of each with every level, a block under the next tag. The radius is sqrt(-2 ln(1 - x)): x below 1 has no end.

On the CPU the compiled kernel csrc/cpu/noise.cpp draws and adds in one pass: for float64 sums in double with an error
below 1e-13, for all others in float, each normal within 7e-7 of its pair's radius. A std of more than float32's 24 bits
is rounded up there, by 1.2e-7 of it at most. Where the kernel is absent plain PyTorch does the same
(`fastdp.ops.noise_reference`).

Element i is one of the 16 normals of one block: with tile = i // 1024, slot = i % 1024 // 64, lane = i % 64 the
block's counter is 64 * tile + lane. Slots 2p and 2p + 1 are radius * (cos, sin) angle of pair p in 0 .. 7, from two
words of the block, w[p] and w[8 + p]:
    x = (16 w[p] + low) / 2^36, low the lower 4 bits of w[8 + p]
    angle = pi (c + 1/2) / 2^27, c its 27 bits above these as a signed number; the upper bit turns the point by half a
        circle. The 1/2 stands for bits not drawn: half of what they can be
    level l: words 2p and 2p + 1 of the block under the tag DOMAIN + l are the next bits of x and of c
"""

from __future__ import annotations

import hashlib
import importlib
import operator
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import MAX_STEP, check_earlier, check_out, refuse_graph, words_of
from .common import DTYPES
from .noise_reference import STREAM, reference_normals, reference_release, rounded
from .registry import Kernel, cpp, cuda_cpp, define, native, triton
from .updates import Draw


class Noise:
    """A source of independent normal noise for one training run.

    seed: an int for reproducible experiments (then the guarantee is void: who knows the seed can subtract
    the noise), or None for a secret key from the operating system. `step` must grow with every noised step:
    noise is a function of (key, step, global index).
    """

    saved_at: tuple[int, int] | None = None  # by a run's state: its step, and what it is here
    loaded_at = -1  # the step of a key that was loaded
    handed_out = False  # whether others may draw by this key

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

    def state(self) -> dict[str, Any]:
        """Return {"key", "step", "stream"}, by which others can draw the noise of the coming steps."""
        self.handed_out = True
        return {"key": self.key, "step": self.step, "stream": STREAM}

    @property
    def secure(self) -> bool:
        """Whether the key is secret."""
        return self.seed is None

    def add_scaled_(
        self, tensor: Tensor, std: float, scale: float, offset: int, earlier: Sequence[tuple[int, float]] = ()
    ) -> Tensor:
        """tensor = (tensor + std * N(0, 1)) * scale, rounded to a multiple of a 64th of std, in place.

        earlier: (step, weight) of the normals of earlier steps, of which weight * std times each is added, too.

        Args: tensor contiguous, float32 or float64, of any shape; offset the global index of its first
        element: ranges of one step must not overlap. Raises TypeError or ValueError on anything else.
        """
        if std == 0:
            return tensor.mul_(scale)
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"noise is added in float32 or float64, not {tensor.dtype}")
        refuse_graph(tensor)
        _add_noise_op(tensor, std, scale, words_of(self.key), self.step, offset, *map(list, zip(*earlier, strict=True)))
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
    """out = std * N(0, 1), in place; returns out. Noise alone, which no grid hides the low bits of a sum with.

    Args: out contiguous, float32, float64, bfloat16 or float16, any shape and device: drawn in float32 or better, then
    rounded once; std >= 0, 0 draws nothing; key 32 bytes, or their 8 little-endian words; step in [0, 2^48);
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


def _native_draw(tensor: Tensor, draw: Draw, offset: int, read: bool) -> None:
    check_out(tensor, draw.key, draw.step, draw.std, offset)
    module: Any = native()
    module.noise_into(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel(), offset, draw, read,
                      torch.get_num_threads())  # fmt: skip
    torch.autograd.graph.increment_version(tensor)


def _native_noise(out: Tensor, std: float, key: Sequence[int], step: int, offset: int = 0) -> None:
    _native_draw(out, Draw(key, step, std, 1.0), offset, False)


def _native_add(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int,
                earlier_steps: Sequence[int] = (), earlier_weights: Sequence[float] = ()) -> None:  # fmt: skip
    check_earlier(earlier_steps, earlier_weights)
    _native_draw(tensor, Draw(key, step, std, scale, True, earlier_steps, earlier_weights), offset, True)


def _noise(out: Tensor, std: float, key: Sequence[int], step: int, offset: int = 0) -> None:
    check_out(out, key, step, std, offset)
    if std == 0:
        out.zero_()
        return
    flat = out.view(-1)
    for low, high, normal in reference_normals(flat.numel(), key, step, offset, out.device):
        flat[low:high] = rounded(normal.mul_(std), out.dtype)


def reference_add_noise(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int,
               earlier_steps: Sequence[int] = (), earlier_weights: Sequence[float] = ()) -> None:  # fmt: skip
    check_out(tensor, key, step, std, offset)
    check_earlier(earlier_steps, earlier_weights)
    if std == 0:
        tensor.mul_(scale)
        return
    flat = tensor.view(-1)
    total = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    draws = (step, earlier_steps, earlier_weights)
    for low, high, n in reference_release(total, std, scale, key, draws, offset, tensor.dtype):
        flat[low:high] = n


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
    "add_noise_(Tensor(a!) tensor, float std, float scale, int[] key, int step, int offset, int[] earlier_steps=[], "
    "float[] earlier_weights=[]) -> ()",
    reference_add_noise, _nothing,
    CPU=cpp(_native_add), CUDA=on_cuda("add_scaled_", False, triton("noise", "add_noise_")),
)  # fmt: skip
