"""Planted bugs of sampling, of empty batches and of accounting (see tests/audit/audit_zoo.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .audit_hand import Hand, altered

Drawn = list[np.ndarray]


def sampled(name: str, draw: Callable[[np.random.Generator, int, int, float], Drawn]) -> None:
    """The batches, of a generator, the number of records, the number of steps and the rate."""

    def sample(self: Hand, records: int, steps: int, seed: int) -> Drawn:
        return draw(np.random.default_rng(seed), records, steps, self.sample_rate)

    altered(name, "poisson_sampling", sample=sample)


def each(draw: Callable[[np.random.Generator, int, float], np.ndarray]) -> Any:
    """Every batch by itself."""
    return lambda rng, n, steps, rate: [draw(rng, n, rate) for _ in range(steps)]


def poisson(rng: np.random.Generator, n: int, rate: float) -> np.ndarray:
    return np.flatnonzero(rng.random(n) < rate)


def shuffled(rng: np.random.Generator, n: int, steps: int, rate: float) -> Drawn:
    size = round(n * rate)
    order = np.concatenate([rng.permutation(n) for _ in range(steps * size // n + 1)])
    return [order[k * size : (k + 1) * size] for k in range(steps)]


def not_empty(rng: np.random.Generator, n: int, rate: float) -> np.ndarray:
    while not len(found := poisson(rng, n, rate)):
        pass
    return found


def never_twice(rng: np.random.Generator, n: int, steps: int, rate: float) -> Drawn:
    """A record is never in two batches running, and comes at the rate."""
    there = [rng.random(n) < rate]
    for _ in range(steps - 1):
        there.append(~there[-1] & (rng.random(n) < rate / (1 - rate)))
    return [np.flatnonzero(each) for each in there]


def twice(rng: np.random.Generator, n: int, steps: int, rate: float) -> Drawn:
    found = [poisson(rng, n, rate) for _ in range(steps)]
    return [found[k // 2] for k in range(steps)]


sampled("shuffled batches of one size", shuffled)
sampled("batches of one size, drawn anew", each(lambda rng, n, rate: rng.choice(n, round(n * rate), replace=False)))
sampled("drawn with replacement", each(lambda rng, n, rate: rng.choice(n, rng.binomial(n, rate))))
sampled("drawn more often than accounted", each(lambda rng, n, rate: poisson(rng, n, 1.15 * rate)))
sampled(
    "the same batches in every run", lambda rng, n, steps, rate: each(poisson)(np.random.default_rng(0), n, steps, rate)
)
sampled("the last record is never drawn", each(lambda rng, n, rate: poisson(rng, n - 1, rate)))
sampled("empty batches are drawn again", each(not_empty))
sampled(
    "pairs of records drawn together",
    each(lambda rng, n, rate: np.flatnonzero(np.repeat(rng.random(n // 2) < rate, 2))),
)
sampled("batches cut at 1.2 times their size", each(lambda rng, n, rate: poisson(rng, n, rate)[: int(1.2 * n * rate)]))
sampled("every batch twice", twice)
sampled("a record is never in two batches running", never_twice)


def skipped(self: Hand, job: Any, parts: Any, size: int, *given: Any) -> Any:
    return Hand.step(self, job, parts, size, *given) if size else job.flat


def counted(rate: float = 1.0, noise: float = 1.0, when: Callable[[int, int], bool] = lambda step, size: True) -> Any:
    """Entries at a share of the rate and of the noise; only where `when` says so of the step and its size."""

    def count(self: Hand, job: Any, sigma: float, size: int) -> None:
        if when(job.steps, size):
            job.history.append((noise * sigma, rate * self.sample_rate, 1))

    return count


altered("empty batches skipped", "empty_batch", step=skipped)
altered("empty batches not counted", "empty_batch", count=counted(when=lambda step, size: size > 0))
altered("every other step counted", "accountant", count=counted(when=lambda step, size: step % 2 == 0))
altered("accounted with twice the noise", "accountant", count=counted(noise=2.0))
altered("accounted at half the rate", "accountant", count=counted(rate=0.5))
