"""What collate_fn is handed: lists of records, and batches that a data set makes of many at once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fastdp.data.batched_datasets import RecordBatch, fetches_batches, nothing

X = torch.arange(10.0).view(5, 2)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Columns:
    x: Tensor
    y: Tensor


BATCHES = [
    (X, lambda made: [made]),
    (X.numpy(), lambda made: [made]),
    ((X, X[:, 0]), lambda made: list(made)),
    (Pair(X, X[:, 0]), lambda made: [made.x, made.y]),
    (Columns(X, X[:, 0]), lambda made: [made.x, made.y]),
    ({"x": X, "nested": {"y": X[:, :1].numpy()}}, lambda made: [made["x"], made["nested"]["y"]]),
]


@pytest.mark.parametrize("batch, leaves", BATCHES, ids=["tensor", "array", "tuple", "named", "dataclass", "dict"])
def test_rows_of_a_batch_are_copied_in_the_order_asked_for(batch: Any, leaves: Any) -> None:
    given = RecordBatch(batch)
    made = given.copied([3, 0, 0, 1])
    assert len(given) == 5 and type(made) is type(batch)
    for rows, whole in zip(leaves(made), leaves(batch), strict=True):
        assert np.array_equal(np.asarray(rows), np.asarray(whole)[[3, 0, 0, 1]])
        rows[:] = -1
    assert all(float(np.asarray(whole).min()) >= 0 for whole in leaves(batch))  # the batch that is trained on


def test_what_is_not_a_tensor() -> None:
    given = RecordBatch({"x": X, "names": list("abcde"), "size": 5, "scale": torch.tensor(2.0)})
    made = given.copied([4, 1])
    assert made["names"] == ["e", "b"] and made["size"] == 5 and float(made["scale"]) == 2 and len(made["x"]) == 2
    for unknown in ({"x": X, "y": X[:3]}, {}, 3):  # nothing can be said of these
        assert len(RecordBatch(unknown)) == 0


def test_a_list_of_records_is_one() -> None:
    records = [(X[i], i) for i in range(5)]
    given = RecordBatch(records, TensorDataset(X))
    made = given.copied([2, 2, 0])
    assert [number for _, number in made] == [2, 2, 0] and given.shapes([0, 1])[0] == given.shapes([0, 1])[1]
    made[0][0].fill_(-1)
    assert float(X.min()) == 0
    assert nothing([]) and not nothing([X]) and not nothing(X[:0]) and not nothing({})


class Fetches(Dataset[Any]):
    """Draws random numbers of four kinds."""

    def __init__(self, listed: bool) -> None:
        self.listed, self.own = listed, np.random.default_rng(0)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: int) -> Tensor:
        return X[place] + torch.rand(2) * random.random() * np.random.rand() * self.own.random()

    def __getitems__(self, places: list[int]) -> Any:
        rows = [self[place] for place in places]
        return rows if self.listed else [torch.stack(rows), torch.tensor(places)]


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_who_makes_batches_is_found_without_moving_random_numbers(listed: bool, part: bool) -> None:
    data = Fetches(listed)

    def states() -> list[Any]:
        legacy: Any = np.random.get_state()
        return [torch.get_rng_state().tolist(), random.getstate(), legacy[2], data.own.bit_generator.state]

    before = states()
    given: Any = Subset(data, [1, 2, 3]) if part else data
    assert fetches_batches(given) == (not listed) and states() == before
    assert not fetches_batches(TensorDataset(X)) and not fetches_batches(ConcatDataset([TensorDataset(X)]))
    made = given.__getitems__([0, 1, 2])
    assert len(RecordBatch(made, given)) == 3  # of three records, or of a list of two columns
