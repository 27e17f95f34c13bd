"""Loops over the samples by numbers of Python that are each sample's own, or drawn: lengths, tags, places of a mask."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fastdp
from fastdp.errors import BatchReadWarning, SampleMixingError

B, T, D = 6, 7, 4
LENGTHS = [2, 5, 1, 3, 6, 2]
TAGS = [[0], [3, 1], [2], [1, 2, 3], [0, 2], [1]]
LABELS = torch.tensor([0, 1, 2, 1, 0, 2])


class Sequences(nn.Module):
    """A layer, a function of what it made and of the lengths, and a layer."""

    def __init__(self, function: Callable[[Tensor, Any, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(D, D), nn.Linear(D, 3), function

    def forward(self, x: Tensor, lengths: Any, tags: Any) -> Tensor:
        return self.last(self.function(torch.tanh(self.first(x)), lengths, tags).mean(1))


def norms_of(function: Any, lengths: Any = LENGTHS, tags: Any = TAGS, x: Tensor | None = None) -> Tensor:
    model = Sequences(function)
    engine = fastdp.PerSampleGradients(model)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)) if x is None else x
    F.cross_entropy(model(x, lengths, tags), LABELS[: len(x)]).backward()
    found = engine.norms()
    engine.detach()
    return found


def by_one(function: Any) -> Tensor:
    """Norms of one sample at a time, by plain torch."""
    model = Sequences(function)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    found = []
    for i in range(B):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1], LENGTHS[i : i + 1], TAGS[i : i + 1]), LABELS[i : i + 1]).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    return torch.stack(found)


def masked(h: Tensor, lengths: Any, tags: Any) -> Tensor:
    mask = torch.zeros(h.shape[:2])
    for i, n in enumerate(lengths):
        mask[i, :n] = 1
    return h * mask[:, :, None]


def zeroed(h: Tensor, lengths: Any, tags: Any) -> Tensor:
    h = h.clone()
    for i, n in enumerate(lengths):
        h[i, n:] = 0
    return h


def zeroed_if_short(h: Tensor, lengths: Any, tags: Any) -> Tensor:
    h = h.clone()
    for i, n in enumerate(lengths):
        if n < 2:  # one of them
            h[i, n:] = 0
    return h


def zeroed_row_by_row(h: Tensor, lengths: Any, tags: Any) -> Tensor:
    h = h.clone()
    for i, n in enumerate(lengths):
        h[i][n:] = 0
    return h


def tagged(h: Tensor, lengths: Any, tags: Any) -> Tensor:
    chosen = torch.zeros(len(h), D)
    for i, numbers in enumerate(tags):
        chosen[i, numbers] = 1
    return h * chosen[:, None]


def joined(h: Tensor, lengths: Any, tags: Any) -> Tensor:
    return h * torch.cat([torch.full((1, T), float(n)) for n in lengths])[:, :, None]


@pytest.mark.parametrize(
    "function", [masked, zeroed, zeroed_if_short, zeroed_row_by_row, tagged], ids=lambda f: f.__name__
)
def test_lists_of_numbers_are_each_samples_own(function: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(norms_of(function), by_one(function), rtol=1e-4)


@pytest.mark.parametrize("read", [lambda n: n.tolist(), lambda n: [each.item() for each in n]], ids=["tolist", "item"])
@pytest.mark.parametrize("function", [masked, zeroed, joined], ids=lambda f: f.__name__)
def test_so_are_numbers_that_were_read(function: Any, read: Any) -> None:
    def of_tensors(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        return function(h, read(lengths), tags)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(norms_of(of_tensors, torch.tensor(LENGTHS)), by_one(function), rtol=1e-4)


def by_place(number: Callable[[int], int]) -> Any:
    def written(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        h = h.clone()
        for i in range(len(h)):
            h[i, : number(i)] = 0
        return h

    return written


@pytest.mark.parametrize("number", [lambda i: i + 1, lambda i: i % 3 + 1, lambda i: LENGTHS[i - 1]])
@pytest.mark.parametrize("lengths", [LENGTHS, torch.tensor(LENGTHS)], ids=["list", "tensor"])
def test_other_numbers_stay_by_place(number: Any, lengths: Any) -> None:
    with pytest.raises(SampleMixingError, match="by their place"):
        norms_of(by_place(number), lengths, None)


# --------------------------------------------------------------------------- labels in the loop


class Texts(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randint(0, 9, (T,), generator=torch.Generator().manual_seed(i)), i % 5


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, D), nn.Linear(D, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)))


def prompts_masked(ids: Tensor, lengths: Any) -> Tensor:
    labels = ids.clone()
    for i, n in enumerate(lengths):
        labels[i, :n] = -100
    return labels


def train(collate: Any, labels_of: Any) -> None:
    model = Words()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    for ids, lengths in fastdp.poisson_loader(Texts(), expected_batch_size=6, collate_fn=collate, steps=6):
        logits, labels = model(ids), labels_of(ids, lengths)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        counts = (labels != -100).float()
        ((losses * counts).sum(1) / counts.sum(1).clamp(min=1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.detach()


COLLATES = {
    kind.__name__: lambda items, kind=kind: (torch.stack([ids for ids, _ in items]), kind(n for _, n in items))
    for kind in (list, tuple)
}


@pytest.mark.parametrize("name", COLLATES)
def test_prompts_of_own_lengths_are_left_out_of_the_loss(name: str) -> None:
    train(COLLATES[name], prompts_masked)
    train(lambda items: (COLLATES[name](items)[0], torch.tensor([n for _, n in items])),
          lambda ids, lengths: prompts_masked(ids, lengths.tolist()))  # fmt: skip


def test_prompts_by_place_are_refused_beside_lists() -> None:
    with pytest.raises(SampleMixingError, match="by their place"):
        train(COLLATES["list"], lambda ids, lengths: prompts_masked(ids, [i % 3 + 1 for i in range(len(ids))]))


# --------------------------------------------------------------------------- drawn places

DRAWS = {
    "random": lambda: random.randint(0, 4),
    "numpy": lambda: int(numpy.random.randint(0, 5)),
    "torch": lambda: torch.randint(0, 5, (1,)).item(),
}


def cut_out(draw: Callable[[], int], mask: bool = False, skips: bool = False) -> Any:
    def cut(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        target = torch.ones(h.shape) if mask else h.clone()
        for i in range(len(h)):
            if skips and random.random() < 0.3:
                continue
            a = draw()
            target[i, a : a + 2] = 0
        return h * target if mask else target

    return cut


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_drawn_places_are_no_places_in_the_batch(name: str, mask: bool) -> None:
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for skips in (False, True):
            norms_of(cut_out(DRAWS[name], mask, skips), None, None)


@pytest.mark.parametrize("mask", [False, True])
def test_places_that_nothing_drew_are_by_place(mask: bool) -> None:
    with pytest.raises(SampleMixingError, match="by their place"):
        norms_of(cut_out(iter([3, 0, 2, 4, 1, 0]).__next__, mask), None, None)


def test_a_part_of_one_sample_is_by_place_whatever_is_drawn_besides() -> None:
    def first(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        h = F.dropout(h, 0.1).clone()
        h[0, :3] = 0
        return h

    with pytest.warns(BatchReadWarning, match="by their place"):  # may have been drawn
        norms_of(first, None, None)
    with pytest.raises(SampleMixingError, match="by their place"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            norms_of(first, None, None)


PARTS = {"half": range(B // 2), "every second": range(0, B, 2), "but the first": range(1, B)}


@pytest.mark.parametrize("name", PARTS)
def test_the_same_part_of_the_batch_again_and_again_is_no_chance(name: str) -> None:
    def cut(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        h = h.clone()
        for i in PARTS[name]:
            a = random.randint(0, 4)
            h[i, a : a + 2] = 0
        return h

    with pytest.raises(SampleMixingError, match="by their place"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            norms_of(cut, None, None)


COUNTING = {
    "widths": lambda h, i, a: h.__setitem__((i, slice(a, a + 1 + i)), 0.0),
    "values": lambda h, i, a: h.__setitem__((i, slice(a, a + 2)), i),
    "bounds": lambda h, i, a: h.__setitem__((i, slice(i)), 0.0),
}


@pytest.mark.parametrize("name", COUNTING)
def test_drawn_numbers_excuse_none_that_count_up(name: str) -> None:
    def cut(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        h = h.clone()
        for i in range(len(h)):
            COUNTING[name](h, i, random.randint(0, 1))
        return h

    with pytest.raises(SampleMixingError, match="by their place"):
        norms_of(cut, None, None)


def filled(h: Tensor, lengths: Any, number: Callable[[Any], float] = lambda n: 1) -> Tensor:
    mask = torch.zeros(h.shape[:2])
    for i, n in enumerate(lengths):
        mask[i, :n] = number(n)
    return mask[:, :, None]


MIXED = {
    "its sum": lambda h, n: h / filled(h, n).sum(),
    "its mean": lambda h, n: h * filled(h, n).mean(0),
    "of others": lambda h, n: h * filled(h, n).flip(0),
    "a sum of lengths": lambda h, n: h * filled(h, n, lambda own: 1 / sum(LENGTHS)),
    "a share of the longest": lambda h, n: h * filled(h, n, lambda own: own / max(LENGTHS)),
    "the neighbour's": lambda h, n: h * filled(h, [*LENGTHS[1:], LENGTHS[0]]),
}


@pytest.mark.parametrize("name", MIXED)
def test_masks_of_own_numbers_are_data(name: str) -> None:
    with pytest.raises(SampleMixingError):
        norms_of(lambda h, lengths, tags: MIXED[name](h, lengths), LENGTHS, None)


OWN = {
    "a mean": lambda h, n: h * filled(h, n) / filled(h, n).sum(1, keepdim=True),
    "one over": lambda h, n: h * filled(h, n, lambda own: 1 / own),
    "the rest": lambda h, n: h * (1 - filled(h, [T - own for own in n])),
}


@pytest.mark.parametrize("name", OWN)
def test_masks_of_own_numbers_are_each_samples(name: str) -> None:
    def forward(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        return OWN[name](h, lengths)

    assert torch.allclose(norms_of(forward, LENGTHS, None), by_one(forward), rtol=1e-4)


def test_a_causal_mask_filled_in_a_loop_is_no_batchs() -> None:
    def attended(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        mask = torch.zeros(T, T)
        for t in range(T):
            mask[t, : t + 1] = 1 / (t + 1)
        mask[0, 1:] = 0
        return mask @ h

    assert torch.allclose(norms_of(attended, None, None), by_one(attended), rtol=1e-4)


ROWS = {
    "all": (lambda h, i: h[i].mul_(2.0), B),
    "all zeroed": (lambda h, i: h[i][:2].zero_(), B),
    "some": (lambda h, i: h[i].mul_(2.0), B - 1),
    "some zeroed": (lambda h, i: h[i].__setitem__(slice(2), 0), 1),
    "as many as the place": (lambda h, i: h[i].__setitem__(slice(i + 1), 0), B),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_written_one_by_one_are_to_be_written_alike(name: str) -> None:
    write, count = ROWS[name]

    def written(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        h = h.clone()
        for i in range(count):
            write(h, i)
        return h

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norms_of(written)  # beside lists, which nothing reads
    assert [each.category for each in caught] == [BatchReadWarning] * (not name.startswith("all"))


OWN_VIEWS = {
    "an element": lambda h: h[..., 0].mul_(3.0),
    "in another shape": lambda h: h.view(-1, 2, 2).mul_(2.0),
    "transposed": lambda h: h.t().add_(1.0),
}


@pytest.mark.parametrize("name", OWN_VIEWS)
@pytest.mark.parametrize("count", [B, 3])
def test_a_samples_own_tensor_may_be_written_through_views(name: str, count: int) -> None:
    def one_by_one(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        rows = []
        for i, row in enumerate(h):
            own = row.sin()
            if i < count:
                OWN_VIEWS[name](own)
            rows.append(own)
        return torch.stack(rows)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = norms_of(one_by_one, None, None)
    assert bool(caught) == (count < B)  # only some of them: by place
    if count == B:
        assert torch.allclose(found, by_one(one_by_one), rtol=1e-4)


@pytest.mark.parametrize("rows", [B, B + 1])
def test_a_samples_own_table_may_have_as_many_rows_as_there_are_samples(rows: int) -> None:
    def dynamic(h: Tensor, lengths: Any, tags: Any) -> Tensor:
        found = []
        for row in h:
            table = torch.zeros(rows, D)
            table[0] = row[0]
            for t in range(1, rows):
                table[t] = torch.logaddexp(table[t - 1].clone(), row[t % T])
            found.append(table[-1:])
        return torch.stack(found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(norms_of(dynamic, None, None), by_one(dynamic), rtol=1e-4)
