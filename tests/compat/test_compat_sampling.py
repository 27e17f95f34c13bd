"""Poisson loaders and samplers of fastdp.compat.opacus: rate, number of batches, shares of processes, empty batches."""

from __future__ import annotations

import contextlib
import math

import opacus.utils.uniform_sampler as theirs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fastdp.compat.opacus import data_loader as ours
from fastdp.compat.opacus.utils import uniform_sampler as mine
from fastdp.compat.opacus.utils.batch_memory_manager import wrap_data_loader
from fastdp.compat.opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from fastdp.errors import SampleMixingError, StepError

from .compat_runs import private


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("secure", [False, True])
def test_records_join_independently_at_the_rate(secure):
    n, rate, steps = 200, 0.1, 3000
    generator = ours.SecureGenerator() if secure else seeded()
    sampler = UniformWithReplacementSampler(num_samples=n, sample_rate=rate, generator=generator, steps=steps)
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


def test_the_batches_of_opacus_but_for_the_share_of_a_tie(monkeypatch):
    """If all numbers lie in the cell of the rate, 0.7 of the records join; by Opacus's sampler all do."""
    options = {"num_samples": 50, "sample_rate": 0.2, "steps": 30}
    same = [list(lib.UniformWithReplacementSampler(**options, generator=seeded(4))) for lib in (theirs, mine)]
    assert same[0] == same[1]
    real = torch.rand

    def rand(*args, **options):
        found = real(*args, **options)
        return found.fill_(16 / 2**24) if found.dtype == torch.float32 else found

    monkeypatch.setattr(torch, "rand", rand)
    options = {"num_samples": 100_000, "sample_rate": 16.7 / 2**24, "steps": 1}
    joined = len(next(iter(UniformWithReplacementSampler(**options, generator=seeded()))))
    assert abs(joined / 1e5 - 0.7) < 0.01


def test_batches_of_an_epoch():
    """Opacus makes one batch too few wherever 1 / (1 / n) rounds down: n = 93, 99, 105, ..."""
    for n in (1, 3, 49, 93, 99, 105, 1000):
        sampler = UniformWithReplacementSampler(num_samples=n, sample_rate=1 / n)
        assert len(sampler) == n == len(list(sampler))
    assert len(theirs.UniformWithReplacementSampler(num_samples=93, sample_rate=1 / 93)) == 92
    assert len(UniformWithReplacementSampler(num_samples=10, sample_rate=0.3)) == 3
    for rate in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="sample_rate"):
            UniformWithReplacementSampler(num_samples=3, sample_rate=rate)


def test_shares_of_processes_are_parts_of_one_batch_also_empty_ones(monkeypatch):
    """Opacus leaves empty shares out, and draws the records of two processes by the same numbers."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        options = {"total_size": 9, "sample_rate": 0.1, "steps": 100, "generator": seeded(7)}
        shares.append(list(DistributedUniformWithReplacementSampler(**options)))
    whole = UniformWithReplacementSampler(num_samples=9, sample_rate=0.1, steps=100, generator=seeded(7))
    assert [sorted(torch.cat(parts).tolist()) for parts in zip(*shares, strict=True)] == list(whole)
    seen = [set(torch.cat(share).tolist()) for share in shares]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(9))


def test_the_loader_keeps_what_the_other_had():
    data, generator = TensorDataset(torch.arange(40.0)), torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_size=4, collate_fn=lambda rows: torch.stack([r[0] for r in rows]) + 1,
                        generator=generator, drop_last=True)  # fmt: skip
    made = ours.DPDataLoader.from_data_loader(loader)
    assert isinstance(made, DataLoader) and made.dataset is data and made.generator is generator
    assert (made.sample_rate, len(made), made.batch_sampler.generator) == (0.1, 10, generator)
    seen = torch.cat([batch for _ in range(30) for batch in made])
    assert abs(len(seen) / 30 - 40) < 4 and set(seen.tolist()) == set(range(1, 41))


def test_an_empty_first_batch_has_the_structure_of_the_records():
    """Opacus hands out a list, whatever the records are."""
    loader = ours.DPDataLoader([{"x": torch.ones(3), "y": n} for n in range(20)], sample_rate=0.2)
    empty = loader.collate_fn([])
    assert {name: tuple(rows.shape) for name, rows in empty.items()} == {"x": (0, 3), "y": (0,)}
    texts = ours.CollateFnWithEmpty(lambda batch: {"text": "a"})
    texts([1])
    with pytest.raises(TypeError, match="Unsupported batch type: str"):
        texts([])
    assert ours.wrap_collate_with_empty(collate_fn=default_collate)([torch.ones(2)]).shape == (1, 2)


def test_the_data_module_of_lightning_samples_by_its_generator():
    module = pytest.importorskip("pytorch_lightning")
    from fastdp.compat.opacus.lightning import DPLightningDataModule

    class Data(module.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)

    made = DPLightningDataModule(Data(), generator := torch.Generator()).train_dataloader()
    assert isinstance(made, ours.DPDataLoader) and made.batch_sampler.generator is generator


def doubled(records):
    rows = default_collate(records)
    return torch.cat([rows, rows + 0.1])


def test_a_row_in_place_of_an_empty_batch_is_of_no_record():
    data = DataLoader(list(torch.randn(40, 3)), batch_size=1)
    options = {"poisson_sampling": True, "rand_on_empty": True}
    _, module, optimizer, criterion, loader = private("hooks", module=nn.Linear(3, 2), data_loader=data, **options)
    for x in loader:  # a third of the batches would be empty
        assert len(x)
        optimizer.zero_grad()
        criterion(module(x), torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("collate", "made", "error"),
    [
        (None, lambda x: x - x.mean(0), SampleMixingError),
        (None, lambda x: 0.5 * x + 0.5 * x.flip(0), SampleMixingError),
        (None, lambda x: torch.cat([x, x + 0.1]), StepError),
        (doubled, lambda x: x, StepError),
        (None, lambda x: x / x.norm(dim=1, keepdim=True), None),
    ],
)
@pytest.mark.parametrize(("mode", "workers"), [("hooks", 0), ("hooks", 2), ("ghost", 0)])
@pytest.mark.parametrize("parts", [False, True])
def test_what_a_loop_makes_of_a_batch_is_followed(collate, made, error, mode, workers, parts):
    """Opacus sees the model alone: records that the loop mixes before, or has in several rows, pass there."""
    data = DataLoader(list(torch.randn(40, 3)), batch_size=10, collate_fn=collate, num_workers=workers)
    _, module, optimizer, criterion, loader = private(mode, module=nn.Linear(3, 2), data_loader=data,
                                                      poisson_sampling=True)  # fmt: skip
    if parts:
        loader = wrap_data_loader(data_loader=loader, max_batch_size=6, optimizer=optimizer)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        for x in (batch for _ in range(3) for batch in loader if len(batch) > 1):
            rows = made(x)
            optimizer.zero_grad()
            criterion(module(rows), torch.zeros(len(rows), dtype=torch.long)).backward()
            optimizer.step()
