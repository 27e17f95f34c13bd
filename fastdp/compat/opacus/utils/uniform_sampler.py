"""Poisson samplers: Opacus's classes, at exactly the stated rate and with exactly the stated number of batches."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from opacus.utils import uniform_sampler as theirs
from torch import Tensor

from ..accountants import whole

__all__ = ["DistributedUniformWithReplacementSampler", "UniformWithReplacementSampler"]


class SecureGenerator(torch.Generator):
    """A torch.Generator with a state of the operating system's: 19937 bits that nobody knows.

    The samplers here that are given one draw from the operating system itself.
    """

    def __new__(cls) -> SecureGenerator:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        state = made.get_state().numpy().copy()
        state[24 : 24 + 8 * 624].view(np.uint64)[:] = np.frombuffer(os.urandom(4 * 624), np.uint32)  # the twister's
        made.set_state(torch.from_numpy(state))
        return made


_CELLS = 2**24  # torch.rand gives multiples of 1 / _CELLS


def _drawn(size: int, rate: float, generator: torch.Generator | None) -> Tensor:
    """Indices of the records drawn: by the numbers that Opacus's sampler compares with the rate, but for a tie. At rate
    1e-6 it takes 1.3 % more than the accountant is told."""
    if isinstance(generator, SecureGenerator):
        numbers = np.frombuffer(os.urandom(8 * size), np.uint64) >> 11
        return torch.from_numpy(np.flatnonzero(numbers < rate * 2**53))
    cells = torch.rand(size, generator=generator, dtype=torch.float32).double() * _CELLS
    edge = math.floor(rate * _CELLS)
    chosen, tied = cells < edge, cells == edge
    if tied.any():  # the rate lies within this cell: its share of it
        chosen[tied] = torch.rand(int(tied.sum()), generator=generator, dtype=torch.float64) < rate * _CELLS - edge
    return chosen.nonzero().reshape(-1)


def _steps(sample_rate: Any, steps: int | None) -> int:
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], not {sample_rate!r}")
    return whole(1 / sample_rate) if steps is None else steps


def noted(sizes: deque[int], chosen: Any) -> Any:
    """A list of indices, whose number is noted for the loader that hands out their records."""
    sizes.append(len(chosen))
    return chosen


class UniformWithReplacementSampler(theirs.UniformWithReplacementSampler):  # type: ignore[misc]
    """Lists of indices, each record in each list with probability sample_rate, independently.

    Args: num_samples; sample_rate in (0, 1]; generator (default: torch's global one); steps: number of lists (default:
    1 / sample_rate, rounded down, but for rounding: Opacus makes 92 batches at rate 1/93). Raises ValueError.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: torch.Generator | None = None,
        steps: int | None = None,
    ) -> None:
        steps = _steps(sample_rate, steps)
        super().__init__(num_samples=num_samples, sample_rate=sample_rate, generator=generator, steps=steps)

    def __iter__(self) -> Iterator[list[int]]:
        sizes = self.sizes = deque[int]()  # of this pass
        for _ in range(self.steps):
            yield noted(sizes, _drawn(self.num_samples, self.sample_rate, self.generator).tolist())


class DistributedUniformWithReplacementSampler(theirs.DistributedUniformWithReplacementSampler):  # type: ignore[misc]
    """The share of this process of every Poisson batch, empty ones too: Opacus leaves these out, and processes part.

    Every process draws the whole batch, so under one seed all shares are parts of one batch. (In Opacus, the records of
    different processes are then drawn by the same numbers, and so together.)
    """

    def __init__(self, *, sample_rate: float, steps: int | None = None, **options: Any) -> None:
        super().__init__(sample_rate=sample_rate, steps=_steps(sample_rate, steps), **options)

    def __iter__(self) -> Iterator[Tensor]:
        sizes = self.sizes = deque[int]()  # of this pass
        order = torch.arange(self.total_size)
        if self.shuffle:
            order = torch.randperm(
                self.total_size, generator=torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            )
        mine = torch.zeros(self.total_size, dtype=torch.bool)
        mine[order[self.rank :: self.num_replicas]] = True
        for _ in range(self.num_batches):
            drawn = _drawn(self.total_size, self.sample_rate, self.generator)
            yield noted(sizes, drawn[mine[drawn]])
