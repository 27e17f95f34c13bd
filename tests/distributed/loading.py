"""What several processes do with a Poisson loader."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, TensorDataset

import fastdp
from fastdp.errors import StepError
from fastdp.mechanisms import Bisr, balls_in_bins_loader, cyclic_poisson_loader, ftrl_loader

from .models import adamw, batch, build, loss_of, single, whole


def data(count: int = 60) -> TensorDataset:
    return TensorDataset(torch.arange(count), torch.stack([batch(n, 1)[0] for n in range(count)]))


def records(rank: int, world: int, wrap: Any = None, noise: Any = None, **options: Any) -> list[Any]:
    """The records of each step that this rank was given, the number of its batches, the weights, and epsilon."""
    model, steps = build() if wrap is None else wrap(build()), [[]]
    optimizer = adamw(model, expected_batch_size=None, sample_rate=None, seed=1, noise=noise)
    if noise is None:
        loader = fastdp.poisson_loader(data(), expected_batch_size=9, max_physical_batch_size=3, seed=7, **options)
    else:
        loader = ftrl_loader(data(), batch_size=12, max_physical_batch_size=3)
    count = 0
    for _ in range(1 if noise is None else 2):
        for numbers, tokens in loader:
            steps[-1] += numbers.tolist()
            count += 1
            if len(numbers) or wrap is not None:  # parts are gathered with the other ranks
                loss_of(model, tokens).backward()
            optimizer.step()
            if optimizer.stepped:
                steps.append([])
    weights = torch.cat([whole(p).detach().flatten() for p in model.parameters()])
    epsilon = optimizer.epsilon(1e-3)
    optimizer.detach()
    return [steps, count, weights.numpy(), epsilon]


PERSONS = np.arange(60) // 3 % 20


def persons(rank: int, world: int, wrap: Any = None) -> list[Any]:
    return records(rank, world, wrap, group_by=PERSONS.tolist(), max_records_per_group=2)


def correlated(rank: int, world: int, wrap: Any = None) -> list[Any]:
    return records(rank, world, wrap, noise=Bisr(3))


def blocks_of_one_name(rank: int, world: int) -> None:
    """A checkpoint that any rank has written, and the ledger, which the first one writes, tell of the same blocks."""
    box: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    model = build()
    optimizer = adamw(model, expected_batch_size=None, sample_rate=None, noise=Bisr(2), ledger=f"{box[0]}/run.ledger")
    for _, tokens in ftrl_loader(data(), batch_size=30):
        loss_of(model, tokens).backward()
        optimizer.step()
    names: list[Any] = [None] * world
    dist.all_gather_object(names, list(optimizer._privacy.mechanism.all))
    optimizer.detach()
    assert len(names[0]) == 1 and names == [names[0]] * world


def check_records(mine: list[Any], truth: Any) -> str:
    """What each rank found of these is what one process has. Returns the largest error of a weight."""
    steps, _, weights, epsilon = truth
    parts = zip(*(each[0] for each in mine), strict=True)
    assert [sorted(sum(own, [])) for own in parts] == [sorted(step) for step in steps]
    assert len({each[1] for each in mine}) == 1  # as many batches on every rank
    errors = [float(np.abs(each[2] - weights).max()) for each in mine]
    assert all(each[3] == epsilon and np.array_equal(each[2], mine[0][2]) for each in mine) and max(errors) < 1e-6
    return f"weights {max(errors):.0e}"


def loader_refused(rank: int, world: int) -> None:
    with pytest.raises(StepError, match="records of the dataset"):
        numbers = torch.randperm(60, generator=torch.Generator().manual_seed(rank)).tolist()
        fastdp.poisson_loader(torch.utils.data.Subset(data(), numbers), expected_batch_size=9)
    with pytest.raises(StepError, match="seed"):
        fastdp.poisson_loader(data(), expected_batch_size=9, seed=rank)
    with pytest.raises(ValueError if rank == 0 else StepError):
        fastdp.poisson_loader(data(), expected_batch_size=9 if rank else 900)
    model = build()
    optimizer = adamw(model, expected_batch_size=None, sample_rate=None)
    with single():
        loader = fastdp.poisson_loader(data(), expected_batch_size=9, seed=3)
    with pytest.raises(StepError, match="one of 1 parts"):
        for _, tokens in loader:
            loss_of(model, tokens).backward()
            optimizer.step()
    optimizer.detach()
    loader = fastdp.poisson_loader(data(), expected_batch_size=9)
    optimizer = adamw(model, expected_batch_size=None, sample_rate=None)
    if rank:  # a rank that goes on from another place
        loader.load_state_dict({"pass": 0, "step": 2})
    with pytest.raises(StepError, match="step of the pass"):
        for _, tokens in loader:
            if len(tokens):
                loss_of(model, tokens).backward()
            optimizer.step()
    optimizer.detach()


def skipped_by_one(rank: int, world: int) -> None:
    """A rank that skips a batch hears of it from the loader, and the others from it."""
    model = build()
    optimizer = adamw(model, expected_batch_size=None, sample_rate=None)
    loader = fastdp.poisson_loader(data(), expected_batch_size=20, seed=5, steps=4)
    with pytest.raises(StepError, match="no step"):
        for number, (_, tokens) in enumerate(loader):
            if number == 2 and rank == 1:
                continue
            loss_of(model, tokens).backward()
            optimizer.step()
    assert optimizer.history[0][2] == 2
    optimizer.detach()


class Stream(IterableDataset[int]):
    """Numbers from one on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, 60))


def cycles(rank: int, world: int) -> list[Any]:
    """Of each loader for correlated noise: the mark, and the numbers of each physical batch of two passes."""
    made = (
        ftrl_loader(Stream(0), records=60, batch_size=9, max_physical_batch_size=2),
        ftrl_loader(range(60), batch_size=5, shuffle_within=3, max_physical_batch_size=2),
        cyclic_poisson_loader(range(60), batch_size=5, cycle=4),
        balls_in_bins_loader(range(60), batch_size=5, max_physical_batch_size=2),
    )
    for options in ({"batch_size": 5 + rank}, {"batch_size": 5, "max_physical_batch_size": 2 + rank}):
        with pytest.raises(StepError):
            ftrl_loader(range(60), **options)
    with pytest.raises(StepError, match="records of the dataset"):
        ftrl_loader(Stream(rank), records=59, batch_size=9)
    return [(each.participation.mark, [batch.tolist() for _ in range(2) for batch in each]) for each in made]


CASES = {
    case.__name__: case
    for case in (records, persons, correlated, blocks_of_one_name, loader_refused, skipped_by_one, cycles)
}
