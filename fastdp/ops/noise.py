"""Gaussian noise: normal to the far tail, reproducible by (key, step, parameter), independent of threads.

On the CPU it is drawn by numpy's ziggurat (beyond 8 sigma; torch.randn in float32 has no values beyond 5.8
sigma, its uniforms have 24 bits) and added in cache. On other devices by torch in float64. The key comes
from the operating system unless a seed is given. The generators (SFC64, Philox) pass statistical tests but
are not cryptographic; see the README's limits.
"""

from __future__ import annotations

import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 18  # elements of one stream: noise depends on the block, never on the thread that fills it


class Noise:
    """A source of independent normal noise.

    seed: an int for reproducible experiments (then the guarantee is void: who knows the seed can subtract
    the noise), or None for a secret key from the operating system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.step = 0
        self._key = secrets.randbits(128) if seed is None else _key_of(seed)

    @property
    def secure(self) -> bool:
        """Whether the key is secret."""
        return self.seed is None

    def add_scaled_(self, tensor: Tensor, std: float, scale: float, stream: int) -> Tensor:
        """tensor = (tensor + std * N(0, 1)) * scale, in place; `stream` is the number of the parameter.

        tensor: contiguous float32 or float64 of any shape.
        """
        if std == 0:
            return tensor.mul_(scale)
        if tensor.device.type == "cpu":
            self._add_on_cpu(tensor.view(-1).numpy(), std, scale, stream)
            return tensor
        words = self._sequence(stream, 0).generate_state(1, np.uint64)
        generator = torch.Generator(tensor.device).manual_seed(int(words[0]) & (2**63 - 1))
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float64)
        return tensor.add_(noise.to(tensor.dtype), alpha=std).mul_(scale)

    def _sequence(self, stream: int, block: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self._key, spawn_key=(self.step, stream, block))

    def _add_on_cpu(self, values: np.ndarray[Any, Any], std: float, scale: float, stream: int) -> None:
        def fill(block: int) -> None:
            part = values[block * BLOCK : (block + 1) * BLOCK]
            noise = _buffer(values.dtype)[: len(part)]
            generator = np.random.Generator(np.random.SFC64(self._sequence(stream, block)))
            generator.standard_normal(out=noise, dtype=noise.dtype)
            noise *= std
            part += noise
            part *= scale

        blocks = range((len(values) + BLOCK - 1) // BLOCK)
        if len(blocks) <= 1:
            for block in blocks:
                fill(block)
        else:
            list(_pool().map(fill, blocks))


_LOCAL = threading.local()


def _buffer(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A thread's own block of memory, so that noise stays in cache."""
    buffers: dict[Any, np.ndarray[Any, Any]] = _LOCAL.__dict__.setdefault("buffers", {})
    if dtype not in buffers:
        buffers[dtype] = np.empty(BLOCK, dtype)
    return buffers[dtype]


def _key_of(seed: int) -> int:
    words = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    return int(words[0]) | int(words[1]) << 64


_POOL: tuple[int, ThreadPoolExecutor] | None = None


def _pool() -> ThreadPoolExecutor:
    """Threads as torch has them; a new pool after a fork."""
    global _POOL
    if _POOL is None or _POOL[0] != os.getpid():
        _POOL = (os.getpid(), ThreadPoolExecutor(max(1, torch.get_num_threads())))
    return _POOL[1]
