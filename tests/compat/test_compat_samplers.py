"""The samplers of fastdp.compat.opacus: rate, number of batches, empty ones."""

from __future__ import annotations

import math

import opacus.utils.uniform_sampler as theirs
import pytest
import torch

from fastdp.compat.opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_records_join_independently_at_the_rate():
    n, rate, steps = 200, 0.1, 3000
    sampler = UniformWithReplacementSampler(num_samples=n, sample_rate=rate, generator=seeded(), steps=steps)
    joined = torch.zeros(steps, n, dtype=torch.float64)
    for step, indices in enumerate(sampler):
        assert indices == sorted(set(indices))
        joined[step, indices] = 1
    error = math.sqrt(rate * (1 - rate) / steps)
    assert abs(joined.mean().item() - rate) < 4 * error / math.sqrt(n)
    assert (joined.mean(0) - rate).abs().max() < 5 * error  # every record
    sizes = joined.sum(1)
    assert abs(sizes.var().item() / (n * rate * (1 - rate)) - 1) < 5 * math.sqrt(2 / steps)  # not of one fixed size
    pairs = torch.corrcoef(joined.T) - torch.eye(n)
    assert pairs.abs().max() < 6 / math.sqrt(steps)  # no two records together or apart


def test_the_share_of_a_tie(monkeypatch):
    """All numbers in the cell that the rate lies in: 0.7 of the records join; under Opacus's sampler all do."""
    rate = 16.7 / 2**24
    real = torch.rand

    def rand(*args, **options):
        found = real(*args, **options)
        return found.fill_(16 / 2**24) if found.dtype == torch.float32 else found

    monkeypatch.setattr(torch, "rand", rand)
    options = {"num_samples": 100_000, "sample_rate": rate, "steps": 1}
    mine = len(next(iter(UniformWithReplacementSampler(**options, generator=seeded()))))
    assert abs(mine / 1e5 - 0.7) < 0.01
    assert len(next(iter(theirs.UniformWithReplacementSampler(**options)))) == 100_000


def test_the_batches_of_opacus_under_the_same_seed():
    options = {"num_samples": 50, "sample_rate": 0.2, "steps": 30}
    mine = list(UniformWithReplacementSampler(**options, generator=seeded(4)))
    assert mine == list(theirs.UniformWithReplacementSampler(**options, generator=seeded(4)))


def test_batches_of_an_epoch():
    """Opacus makes one batch too few wherever 1 / (1 / n) rounds down: n = 93, 99, 105, ..."""
    for n in (1, 3, 49, 93, 99, 105, 1000):
        sampler = UniformWithReplacementSampler(num_samples=n, sample_rate=1 / n)
        assert len(sampler) == n == len(list(sampler))
    assert len(theirs.UniformWithReplacementSampler(num_samples=93, sample_rate=1 / 93)) == 92
    assert len(UniformWithReplacementSampler(num_samples=10, sample_rate=0.3)) == 3
    assert len(UniformWithReplacementSampler(num_samples=10, sample_rate=0.3, steps=7)) == 7


def test_every_process_takes_part_in_every_step(monkeypatch):
    """Opacus's distributed sampler leaves empty shares out, so that processes make different numbers of steps."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        options = {"total_size": 9, "sample_rate": 0.1, "steps": 100, "generator": seeded(rank)}
        sampler = DistributedUniformWithReplacementSampler(**options)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler) == 100 and any(len(part) == 0 for part in shares[-1])
        other = theirs.DistributedUniformWithReplacementSampler(**{**options, "generator": seeded(rank)})
        assert len(list(other)) < 100
    seen = [set(torch.cat(share).tolist()) for share in shares]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(9))


def test_under_one_seed_shares_are_parts_of_one_batch(monkeypatch):
    """Opacus draws each process's share by the same numbers, so that records of two processes come together."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        options = {"total_size": 9, "sample_rate": 0.4, "steps": 50, "generator": seeded(7)}
        shares.append(list(DistributedUniformWithReplacementSampler(**options)))
    whole = UniformWithReplacementSampler(num_samples=9, sample_rate=0.4, steps=50, generator=seeded(7))
    assert [sorted(torch.cat(parts).tolist()) for parts in zip(*shares, strict=True)] == list(whole)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_rates_are_checked(rate):
    with pytest.raises(ValueError, match="sample_rate"):
        UniformWithReplacementSampler(num_samples=3, sample_rate=rate)
