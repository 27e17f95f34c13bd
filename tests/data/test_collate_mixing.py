"""A collate_fn that makes rows of other samples is refused; one that pads, sorts, masks or counts is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

import fastdp
from fastdp.data.collate_mixing import refuse_mixing
from fastdp.errors import SampleMixingError

Item = tuple[Tensor, Tensor]
K = 4


def records(count: int = 40) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(count, 6), torch.randint(0, K, (count,)))


def one_hot(batch: list[Item]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(batch)
    return x, F.one_hot(y, K).float()


def blend(x: Tensor, t: Tensor, other: Any, share: float) -> tuple[Tensor, Tensor]:
    return share * x + (1 - share) * x[other], share * t + (1 - share) * t[other]


def flipped(batch: list[Item]) -> Any:
    x, t = one_hot(batch)
    return blend(x, t, torch.arange(len(x)).flip(0), 0.7)


def rolled(batch: list[Item]) -> Any:
    x, t = one_hot(batch)
    return blend(x, t, torch.arange(len(x)).roll(1), float(torch.rand(())))


def permuted(batch: list[Item]) -> Any:
    x, t = one_hot(batch)
    return blend(x, t, torch.randperm(len(x)), random.random() / 2)


def by_its_own_generator() -> Callable[[list[Item]], Any]:
    generator = np.random.default_rng(0)

    def mix(batch: list[Item]) -> Any:
        x, t = one_hot(batch)
        return blend(x, t, torch.from_numpy(generator.permutation(len(x))), 0.5)

    return mix


def chained(batch: list[Item]) -> Any:
    """Each with the one before it: the last reaches no other."""
    x, t = one_hot(batch)
    return torch.cat([x[:1], (x[1:] + x[:-1]) / 2]), t


def standardized(batch: list[Item]) -> Any:
    x, y = default_collate(batch)
    return (x - x.mean(0)) / x.std(0), y


def arrays(batch: list[Item]) -> Any:
    x = np.stack([x.numpy() for x, _ in batch])
    return {"x": x * 0.9 + 0.1 * x[::-1], "y": np.array([int(y) for _, y in batch])}


def mosaic(batch: list[Item]) -> Any:
    """A list of images, as detectors take them."""
    images = [x.reshape(1, 2, 3) for x, _ in batch]
    return [torch.cat([a[:, :1], b[:, 1:]], 1) for a, b in zip(images, images[1:] + images[:1], strict=True)]


def in_pairs(batch: list[Item]) -> Any:
    """Of an even number of records, as image libraries mix them."""
    if len(batch) % 2:
        raise ValueError("an even number of records is needed")
    return flipped(batch)


MIXES = [in_pairs, arrays, mosaic, rolled, permuted, by_its_own_generator(), chained, standardized]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
@pytest.mark.parametrize("size", [2, 3, 30])
def test_mixing_is_refused(mix: Callable[..., Any], size: int) -> None:
    items = [records()[i] for i in range(size)]
    seen = 0
    for seed in range(20):  # a permutation of few may leave some where they are
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        try:
            refuse_mixing(mix, items)
        except SampleMixingError as error:
            assert "collate_fn" in str(error) and mix.__name__ in str(error)
            seen += 1
        if mix is not in_pairs:
            mix(items)
    if mix is in_pairs and size < 4:  # of 2 and 3 records nothing can be said: fewer of them fail
        return
    assert seen >= 16 if size == 30 else seen > 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_refuses_it_and_verify_finds_it(workers: int) -> None:
    model = nn.Linear(6, K)
    loader = fastdp.poisson_loader(records(), expected_batch_size=20, collate_fn=rolled, num_workers=workers)
    with pytest.raises(SampleMixingError, match=r"collate_fn \(rolled\) makes the rows"):
        next(iter(loader))
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1])
    for given, options in ((list(records())[:8], {"collate_fn": rolled}), (loader, {}),
                           (DataLoader(records(), batch_size=8, collate_fn=rolled), {})):  # fmt: skip
        with pytest.raises(SampleMixingError, match="other samples"):
            fastdp.verify(model, loss, given, **options)
        report = fastdp.verify(model, loss, given, raise_on_failure=False, **options)
        assert not report.ok and "collate_fn" in report.problem


@pytest.mark.parametrize("K", [2, 3])
def test_views_of_a_sample_may_be_mixed_and_samples_may_not(K: int) -> None:
    items = [records()[i // K] for i in range(6 * K)]
    items = [(x + i, y) for i, (x, y) in enumerate(items)]  # views that differ

    def within(batch: list[Item]) -> Any:
        x, t = one_hot(batch)
        return x.view(-1, K, 6).roll(1, 1).flatten(0, 1) * 0.3 + x * 0.7, t

    refuse_mixing(within, items, views=K)
    with pytest.raises(SampleMixingError):
        refuse_mixing(flipped, items, views=K)


def test_with_persons_nothing_is_tried() -> None:
    """Whose the records are is not known there, and those of one person may be mixed."""
    data, people = records(), [i // 4 for i in range(40)]
    given: dict[str, Any] = {"expected_batch_size": 8, "collate_fn": standardized, "seed": 1}
    assert len([*fastdp.poisson_loader(data, group_by=people, **given)])
    with pytest.raises(SampleMixingError):
        next(iter(fastdp.poisson_loader(data, **given)))
    with pytest.raises(SampleMixingError):
        next(iter(fastdp.poisson_loader(data, augmentations=2, **given)))


class Columns(Dataset[Any]):
    """Gives a batch for many records at once, as data sets of columns do."""

    def __init__(self) -> None:
        self.x, self.y = records().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> Any:
        return [self.x[place], self.y[place]]

    def __getitems__(self, places: list[int]) -> Any:
        return [self.x[places], self.y[places]]


@pytest.mark.parametrize("part", [False, True])
def test_data_sets_that_give_batches_are_sampled_and_not_tried(part: bool) -> None:
    data: Any = Subset(Columns(), range(5, 35)) if part else Columns()
    loader = fastdp.poisson_loader(data, collate_fn=lambda batch: batch, sample_rate=0.3, steps=5, seed=1)
    every = {tuple(row) for row in records().tensors[0].tolist()}
    drawn = [{tuple(row) for row in x.tolist()} for x, _ in loader]
    assert len(drawn) == 5 and all(rows and rows <= every for rows in drawn)


# ---------------------------------------------------------------------- what is not mixing


def texts(count: int = 12) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(1, 50) for _ in range(draw.randrange(2, 9))] for _ in range(count)]


def padded(batch: list[list[int]]) -> Tensor:
    longest = max(map(len, batch))
    return torch.tensor([[0] * (longest - len(text)) + text for text in batch])


def masked(batch: list[list[int]]) -> Any:
    ids = padded(batch)
    return ids.masked_fill(torch.bernoulli(torch.full(ids.shape, 0.3)).bool() & (ids > 0), 49)


def sorted_and_masked(batch: list[list[int]]) -> Any:
    return masked(sorted(batch, key=len, reverse=True))


def words_of_one_masked(batch: list[list[int]]) -> Any:
    """As many draws as a text asks for: those after it have others."""
    return padded([[49 if word % 2 and random.random() < 0.5 else word for word in text] for text in batch])


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, batch: list[list[int]]) -> Any:
        self.count += 1
        return padded(batch) * self.count


def shrinking(batch: list[list[int]]) -> Any:
    """Takes the records apart."""
    return torch.tensor([text.pop() for text in batch])


def time_first(batch: list[list[int]]) -> Any:
    """As many times as there are texts, in some batches."""
    return F.pad(padded(batch), (0, 12))[:, :12].T.contiguous()


APART = [padded, sorted_and_masked, words_of_one_masked, Counting(), shrinking, time_first]


@pytest.mark.parametrize("collate", APART, ids=lambda c: getattr(c, "__name__", "counting"))
def test_what_keeps_samples_apart_goes_on(collate: Callable[..., Any]) -> None:
    for seed in range(20):
        random.seed(seed), torch.manual_seed(seed), np.random.seed(seed)
        chosen = random.sample(texts(30), random.choice((1, 2, 3, 12)))
        before = [list(text) for text in chosen]
        states = random.getstate(), torch.get_rng_state(), np.random.get_state()[2]
        refuse_mixing(collate, chosen)
        assert chosen == before
        assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state())
        assert states[2] == np.random.get_state()[2]
