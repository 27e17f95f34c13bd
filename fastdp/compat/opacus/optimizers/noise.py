"""Where the noise of a step comes from."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....distributed.shards import Part
from ....errors import StepError
from ....ops.noise import Noise
from ....optim.fused_update import Release, add_noise_


class StepNoise:
    """Gaussian noise of ChaCha20, one key for the elements of one step.

    secure: the key is the operating system's, and no draw can be repeated. Attacks on the gaps between floating-point
    numbers, against which Opacus takes four draws, find none in either mode: what is released is rounded to a grid.
    Otherwise each step's key is drawn from the generator, or from torch's own: torch.manual_seed repeats a run, and
    whoever knows the seed can take the noise off. Raises StepError where it would repeat a step of the same run.
    same_key: of the keys of several processes, makes one.
    """

    def __init__(self, secure: bool, same_key: Callable[[bytes], bytes] = lambda key: key) -> None:
        self.secure, self._same_key = secure, same_key
        self.source = Noise(None if secure else 0)
        self.offset = 0
        self._used: set[bytes] = set()  # keys of the steps so far
        if secure:
            self.source.restore(same_key(self.source.key), 0)

    def begin(self, generator: Any) -> None:
        """A step begins."""
        self.offset = 0
        if self.secure:
            self.source.step += 1
            return
        device = getattr(generator, "device", "cpu")
        words = torch.randint(0, 1 << 32, (8,), dtype=torch.int64, generator=generator, device=device)
        key = self._same_key(struct.pack("<8I", *words.tolist()))
        if key in self._used:
            raise StepError(
                "the noise of this step would be that of a step before: the random generator was seeded again since "
                "(torch.manual_seed within the training loop), and the difference of the two steps would be without "
                "noise. Seed once, before training; or give noise_generator= a generator of its own; or "
                "secure_mode=True"
            )
        self._used.add(key)
        self.source.restore(key, 0)

    def add_(self, total: Tensor, std: float, place: Part | None = None) -> Tensor:
        """total += std * N(0, 1), rounded to a grid, in place; total contiguous, float32 or float64.

        place: what of a whole parameter the total is. The noise is that of these elements of the whole, on every
        process that asks for it.
        """
        if std:
            add_noise_(Release({}, {}, self.source, std, 1.0), total, self.offset, place)
        self.offset += total.numel() if place is None else place.shape.numel()
        return total
