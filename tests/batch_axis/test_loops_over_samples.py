"""Loops over the samples, and lists with an item for each: what each sample's own data may say, and its place not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import fastdp
from fastdp.errors import BatchReadWarning, SampleMixingError

from ..programs_by_hand import C, Program, run, squares, truth

B = 4


LOOPS = {
    "numbers": lambda h: [h[i, i : i + 1] for i in range(len(h))],
    "rows, then numbers": lambda h: [row[i : i + 1] for i, row in enumerate(h)],
    "the first of each": lambda h: [h[i, : i + 1].sum(0, keepdim=True) for i in range(len(h))],
    "narrowed": lambda h: [h[i].narrow(0, i, 1) for i in range(len(h))],
    "parts": lambda h: [part[0, i : i + 1] for i, part in enumerate(h.split(1))],
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_indexes_by_its_number_is_warned_of(name: str) -> None:
    with pytest.warns(BatchReadWarning, match="by their place"):
        run(lambda m, h: torch.stack(LOOPS[name](torch.cat([h, h], 1))), sizes=(6,))


def test_a_loop_that_indexes_by_other_numbers_is_not() -> None:
    lengths = [3, 1, 2, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(lambda m, h: torch.stack([h[i, :n].sum(0, keepdim=True) for i, n in enumerate(lengths)]), sizes=(B,))


def test_a_loop_that_takes_one_of_a_list_for_each_is_not() -> None:
    weights = list(numpy.random.default_rng(0).normal(size=(6, C)).astype("float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(lambda m, h: torch.stack([row * torch.from_numpy(w) for row, w in zip(h, weights, strict=True)]))


def test_choices_written_by_hand_may_fall_where_they_will() -> None:
    """As many columns as several samples': which dimension is the samples' is not told by where the ones are."""

    def chosen(m: Any, h: Tensor) -> Tensor:
        choices = torch.zeros(len(h), 2 * C)
        choices[torch.arange(len(h)), 1 + 6 * (h[:, 0] > 0).long()] = 1.0
        return torch.cat([h, h.tanh()], 1) * choices

    run(chosen, sizes=(2,) * 12)


PARTS = {
    "a chunk of rows by time": lambda out: torch.stack([out, out.tanh(), out.sin()]).flatten(0, 1).chunk(2)[0].sum(),
    "two of three chunks": lambda out: torch.cat(
        torch.stack([out, out.tanh(), out.sin()]).flatten(0, 1).split(5)[:2]
    ).sum(),
    "some, and all": lambda out: out[:2].square().sum() + out.square().sum(),
    "the first, gathered": lambda out: out.gather(1, torch.zeros(2, 1, dtype=torch.long)).square().sum(),
    "in another order, beside constants": lambda out: torch.stack(
        [torch.zeros(()) if i == 1 else out[B - 1 - i].square().sum() for i in range(B)]
    ).sum(),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_loss_of_a_part_is_refused(name: str) -> None:
    with pytest.raises(SampleMixingError):
        run(lambda m, h: h, lambda out, labels: PARTS[name](out), sizes=(B,), reduction="sum")


def test_a_product_of_tensors_of_which_one_has_a_single_row() -> None:
    with pytest.raises(SampleMixingError):
        run(lambda m, h: torch.tensordot(torch.randn(2, 1, 2), h.view(2, 2, 2), 2), sizes=(2,))


SUMS = {
    "a sum": lambda each: sum(each),
    "rows": lambda each: torch.stack(each).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_of_some_samples_is_warned_of_unless_their_data_chose(name: str) -> None:
    def first(out: Tensor, labels: Tensor) -> Tensor:
        return SUMS[name]([out[i].square().sum() for i in range(len(out) - 1)])

    def chosen(out: Tensor, labels: Tensor) -> Tensor:
        return SUMS[name]([row.square().sum() for row in out if row[0] > limit])

    with pytest.warns(BatchReadWarning, match="by their place"):
        run(lambda m, h: h, first, sizes=(B,), reduction="sum")
    model = Program(lambda m, h: h)
    torch.manual_seed(1)
    limit = float(model(torch.randn(B, 5))[:, 0].sort().values[-2])  # one passes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = run(lambda m, h: h, chosen, sizes=(B,), reduction="sum")
    wanted = truth(lambda m, h: h, lambda out, labels: out.square().sum(), size=B)
    passed = found > 0
    assert int(passed.sum()) == 1
    torch.testing.assert_close(found.double()[passed], wanted[passed], rtol=1e-5, atol=1e-6)


def test_one_sample_is_by_place_also_where_a_function_returns_what_it_was_given() -> None:
    with pytest.raises(SampleMixingError, match="by their place"):
        run(lambda m, h: h[:1].contiguous().flatten(1).float(), squares, sizes=(B,))


def of_lists(lengths: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean of losses to targets that come as a list, of as many numbers as each sample has; none of empty ones."""

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        targets = [torch.linspace(0, 1, n + 1)[1:].clone().numpy() for n in lengths]
        pairs = [(o, torch.from_numpy(t)) for o, t in zip(out, targets, strict=True) if len(t)]
        return sum((o[:, None] - t).square().mean() for o, t in pairs) / len(out)

    return loss


@pytest.mark.parametrize("lengths", [[2, 3, 1, 2], [B, 1, B, 2], [0, B, 2, 2]])
def test_targets_in_a_list_may_have_as_many_rows_as_the_batch(lengths: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = run(lambda m, h: h, of_lists(lengths), sizes=(B,))
    model = Program(lambda m, h: h).double()
    torch.manual_seed(1)
    x = torch.randn(B, 5).double()
    for i, n in enumerate(lengths):
        model.zero_grad()
        if n:
            of_lists([n])(model(x[i : i + 1]), x).backward()
        norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
        assert abs(float(found[i]) - norm) < 1e-5 * norm + 1e-7


@pytest.mark.parametrize("join", [torch.stack, lambda each: torch.cat([one[None] for one in each])])
def test_a_constant_may_stand_for_a_sample_without_a_loss(join: Callable[[list[Tensor]], Tensor]) -> None:
    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return join([torch.tensor(0.0) if o[0] > 0 else o.square().sum() for o in out]).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = run(lambda m, h: h, loss, sizes=(B,))
    wanted = truth(lambda m, h: h, lambda out, labels: (out.square().sum(1) * (out[:, 0] <= 0)).mean(), size=B)
    assert 0 < int((wanted == 0).sum()) < B
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_one_of_a_list_must_not_meet_other_samples() -> None:
    shared = torch.from_numpy(numpy.ones(B, dtype=numpy.float32))
    with pytest.raises(SampleMixingError):
        run(
            lambda m, h: h,
            lambda out, labels: sum((o.sum() - shared).square().sum() for o in out) / len(out),
            sizes=(B,),
        )


class Boxes(Dataset[tuple[Tensor, Tensor]]):
    """Records with one to three targets each."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.randn(5), torch.randn(1 + number % 3, C)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_loaders_lists_may_hold_as_many_rows_as_there_are_samples(kind: type) -> None:
    def collate(records: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Sequence[Tensor]]:
        return torch.stack([x for x, _ in records]), kind([targets for _, targets in records])

    model = Program(lambda m, h: h)
    loader = fastdp.poisson_loader(Boxes(), expected_batch_size=3, steps=30, seed=3, collate_fn=collate)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    sizes = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BatchReadWarning)
        for x, targets in loader:
            sizes.add(len(x))
            if len(x):
                losses = (torch.cdist(o[None], t).min() for o, t in zip(model(x), targets, strict=True))
                (sum(losses) / len(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.detach()
    assert {2, 3} <= sizes


@pytest.mark.parametrize("read", [lambda o: o[0, 0].item(), lambda o: o[0].tolist()])
@pytest.mark.parametrize("name", ["some", "one"])
def test_a_number_of_one_sample_that_is_read_tells_nothing_of_others(read: Callable[[Tensor], Any], name: str) -> None:
    def loss(out: Tensor, labels: Tensor) -> Tensor:
        read(out)
        return out[:2].square().sum() if name == "some" else out[:1].square().sum()

    with pytest.raises(SampleMixingError, match="by their place"):
        run(lambda m, h: h, loss, sizes=(B,), reduction="sum")


@pytest.mark.parametrize("name", ["steps", "a part", "an index", "the first"])
def test_numbers_that_are_read_of_all_excuse_no_other_writes(name: str) -> None:
    def weighted(m: Any, h: Tensor) -> Tensor:
        h.argmax(1).tolist()
        mask = torch.ones(len(h), C)
        if name == "steps":
            mask[::2] = 0
        elif name == "a part":
            mask = torch.cat([mask[:1] * 0, mask[1:]])
        elif name == "an index":
            mask[torch.arange(len(h)), torch.arange(len(h))] = 0
        else:
            mask[0] = 0
        return h * mask

    with pytest.raises(SampleMixingError):
        run(weighted, sizes=(B,))


@pytest.mark.parametrize("change", [lambda t: t.float(), lambda t: t.clone() * 2, lambda t: t.to("cpu") / 10 + 1])
def test_items_of_a_list_may_be_changed_one_by_one(change: Callable[[Tensor], Tensor]) -> None:
    arrays = [numpy.ones((B, C), dtype=numpy.float32) * k for k in range(B)]

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return sum((o - change(torch.from_numpy(t))).square().mean() for o, t in zip(out, arrays, strict=True)) / B

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(lambda m, h: h, loss, sizes=(B,))


def test_what_all_samples_meet_is_no_list() -> None:
    middle = torch.from_numpy(numpy.ones(C, dtype=numpy.float32))

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return sum((out[i] - middle).square().sum() for i in range(len(out) - 1))

    with pytest.warns(BatchReadWarning, match="by their place"):
        run(lambda m, h: h, loss, sizes=(6,), reduction="sum")


def test_rows_of_the_labels_are_no_list() -> None:
    """A loop over the batch's labels tells nothing of what each sample's data chose."""

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        wanted = torch.from_numpy(numpy.ones((B, C), dtype=numpy.float32))
        return sum((out[i] - wanted[i]).square().sum() for i in range(len(out) - 1)) + 0 * (out - wanted).sum()

    with pytest.warns(BatchReadWarning, match="by their place"):
        run(lambda m, h: h, loss, sizes=(B,), reduction="sum")
