"""Gaussian noise: normal to the far tail, reproducible by (key, step, parameter), independent of threads.

Drawn on the CPU by numpy's ziggurat in float64 from counter-based Philox streams: torch.randn in float32
has no values beyond 5.8 sigma (24-bit uniforms) and one global state. On other devices by torch in
float64. The key comes from the operating system unless a seed is given. Philox is not a cryptographic
generator; see the README's limits.
"""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 16  # elements of one stream: noise depends on the block, never on the thread that fills it


class Noise:
    """A source of independent standard normal noise.

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

    def add_(self, tensor: Tensor, std: float, stream: int) -> Tensor:
        """tensor += std * N(0, 1), in float32 or float64. `stream` is the number of the parameter."""
        if std == 0:
            return tensor
        if tensor.device.type == "cpu":
            return tensor.add_(self._draw(tensor.numel(), stream).view(tensor.shape), alpha=std)
        generator = torch.Generator(tensor.device).manual_seed(self._philox(stream, 0).random_raw() & (2**63 - 1))
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float64)
        return tensor.add_(noise.to(tensor.dtype), alpha=std)

    def _philox(self, stream: int, block: int) -> np.random.Philox:
        # counter words: position within the block, block, stream, step
        counter = np.array([0, block, stream, self.step], dtype=np.uint64)
        return np.random.Philox(key=self._key, counter=counter)

    def _draw(self, count: int, stream: int) -> Tensor:
        out = np.empty(count, dtype=np.float32)

        def fill(block: int) -> None:
            part = out[block * BLOCK : (block + 1) * BLOCK]
            np.copyto(part, np.random.Generator(self._philox(stream, block)).standard_normal(len(part)))

        blocks = range((count + BLOCK - 1) // BLOCK)
        if len(blocks) <= 1:
            for block in blocks:
                fill(block)
        else:
            list(_pool().map(fill, blocks, chunksize=8))
        return torch.from_numpy(out)


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
