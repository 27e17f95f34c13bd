"""What is taken of a sample, or written to it, must not depend on where in the batch it stands."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import fastdp
from fastdp.errors import BatchReadWarning, SampleMixingError

from ..programs_by_hand import C, Program, run, squares, truth

B = 4  # as many as a sample has numbers
ROWS = torch.arange  # made in the forward: these are numbers of places


def writing(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """The forward that writes in place to a copy: write(copy, activations)."""

    def forward(m: Any, h: Tensor) -> Tensor:
        z = h.clone()
        write(z, h)
        return z * 1.0

    return forward


def diagonal(h: Tensor) -> Tensor:
    return ROWS(len(h)) * C + ROWS(len(h))  # of the flat memory


def rolled(h: Tensor) -> Tensor:
    return (ROWS(C) + ROWS(len(h))[:, None]) % C


OTHERS = {
    "diagonal": lambda m, h: h.diagonal()[:, None],
    "diagonal of named dimensions": lambda m, h: torch.diagonal(h, 0, -1, -2)[:, None],
    "diagonal_scatter": lambda m, h: h.diagonal_scatter(h.new_zeros(len(h))),
    "diagonal, zeroed": writing(lambda z, h: z.diagonal().zero_()),
    "diagonal, scaled": writing(lambda z, h: z.diagonal().mul_(3)),
    "diagonal, copied to": writing(lambda z, h: z.diagonal().copy_(h[:, 0])),
    "diagonal, assigned": writing(lambda z, h: z.diagonal().__setitem__(slice(None), 0.0)),
    "strides": lambda m, h: h.as_strided((len(h), 2), (C + 1, 0)),
    "strides, zeroed": writing(lambda z, h: z.as_strided((len(h),), (C + 1,)).zero_()),
    "a view of strides, filled later": lambda m, h: filled_through(h),
    "steps": lambda m, h: h.reshape(-1)[:: C + 1][:, None],
    "steps, zeroed": writing(lambda z, h: z.view(-1)[:: C + 1].zero_()),
    "steps, assigned": writing(lambda z, h: z.view(-1).__setitem__(slice(None, None, C + 1), 0.0)),
    "flat places": lambda m, h: h.reshape(-1)[diagonal(h)][:, None],
    "flat places of half the batch": lambda m, h: torch.cat(
        [h.reshape(-1)[:: 2 * C], h.reshape(-1)[C + 1 :: 2 * C]]
    )[:, None],
    "flat places, selected": lambda m, h: h.reshape(-1).index_select(0, diagonal(h))[:, None],
    "flat places, gathered": lambda m, h: h.reshape(-1).gather(0, diagonal(h))[:, None],
    "flat places, scattered to": writing(lambda z, h: z.view(-1).scatter_(0, diagonal(h), 0.0)),
    "flat places, filled": writing(lambda z, h: z.view(-1).index_fill_(0, diagonal(h), 0.0)),
    "flat places, copied to": writing(lambda z, h: z.view(-1).index_copy_(0, diagonal(h), h[:, 0])),
    "an index": lambda m, h: h[ROWS(len(h)), ROWS(len(h))][:, None],
    "an index of several columns": lambda m, h: h[ROWS(len(h))[:, None], rolled(h)],
    "a list": lambda m, h: h[list(range(len(h))), list(range(len(h)))][:, None],
    "an array": lambda m, h: h[numpy.arange(len(h)), numpy.arange(len(h))][:, None],
    "a tensor of a list": lambda m, h: h * torch.tensor(list(range(len(h))))[:, None],
    "a mask": lambda m, h: h[torch.eye(len(h), C).bool()][:, None],
    "an index, assigned": writing(lambda z, h: z.__setitem__((ROWS(len(h)), ROWS(len(h))), 0.0)),
    "an index, put": lambda m, h: h.index_put((ROWS(len(h)), ROWS(len(h))), torch.tensor(0.0)),
    "an index, own numbers put": writing(lambda z, h: z.__setitem__((ROWS(len(h)), ROWS(len(h))), h[:, 0] * 3)),
    "an index, of zeros": lambda m, h: torch.zeros_like(h).index_put((ROWS(len(h)), ROWS(len(h))), h[:, 0]) * h,
    "gathered": lambda m, h: h.gather(1, rolled(h)),
    "taken along": lambda m, h: h.take_along_dim(rolled(h), 1),
    "scattered to": lambda m, h: h.scatter(1, ROWS(len(h))[:, None], 0.0),
    "scattered by place": lambda m, h: h.scatter(1, torch.zeros(len(h), 1).long(), ROWS(len(h))[:, None] * 1.0),
    "gathered from some": lambda m, h: h.gather(1, torch.zeros(2, 1, dtype=torch.long)),
    "scattered to some": lambda m, h: h.scatter(1, torch.zeros(2, 1, dtype=torch.long), 0.0),
    "constants by place, assigned": writing(lambda z, h: z.__setitem__((slice(None), 0), torch.linspace(0, 1, len(h)))),
    "constants by place, copied to columns": lambda m, h: h.index_copy(
        1, torch.tensor([0]), torch.linspace(0, 1, len(h))[:, None]
    ),
    "constants by place, to a diagonal": lambda m, h: h.diagonal_scatter(torch.linspace(0, 1, len(h))),
    "constants by place, scattered along": lambda m, h: h.T.scatter(
        1, ROWS(len(h)).expand(2, -1), torch.linspace(0, 1, 2 * len(h)).view(2, -1)
    ).T,
    "columns of their own, gathered": lambda m, h: h.repeat(2, 1).gather(0, ROWS(len(h)).expand(2, -1)).T,
    "columns of their own, scattered to": lambda m, h: h.repeat(2, 1).scatter(0, ROWS(len(h)).expand(2, -1), 0.0),
    "other numbers of rows": lambda m, h: h.repeat_interleave(torch.arange(1, len(h) + 1), 0),
    "rows of a table of nobody's": lambda m, h: h + TABLE[ROWS(len(h))],
    "angles over the batch": lambda m, h: h[:, :3] * torch.outer(ROWS(len(h)).float(), ANGLES).cos(),
    "the numbers of two samples between": lambda m, h: between(h, lambda n: slice(n[0], n[0] + n[1])),
    "another's number": lambda m, h: between(h, lambda n: slice(n[1])),
    "another's numbers, written": writing(lambda z, h: [z.__setitem__((1 - i, slice(n)), 0.0) for i, n in own(h[:2])]),
    "another's numbers to its own places": lambda m, h: h + mask_of(
        h, lambda mask, i, n: mask.__setitem__((i, slice(n)), h[1 - i, :n] if i < 2 else 0.0)
    ),
    "a part, detached and zeroed": writing(lambda z, h: z[:2].detach().zero_()),
    "a part's numbers zeroed": writing(lambda z, h: z[:2].data.zero_()),
    "a part written by out=": lambda m, h: h + parts_written(torch.zeros_like(h), h.detach()),
    "chunks of rows by time, by themselves": lambda m, h: by_time(h, lambda first, second: (first, 3 * second.tanh())),
    "a mask over positions of samples": lambda m, h: (
        torch.stack([h, h.tanh()]).masked_select(torch.eye(len(h), C).bool()).view(2, -1).T
    ),
}  # fmt: skip


ANGLES = torch.linspace(1, 2, 3)
TABLE = torch.randn(15, C, generator=torch.Generator().manual_seed(3))  # neither the model's nor a batch's


def by_time(h: Tensor, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Rows [3 * B, C] of three times, in two chunks: of some samples more rows are in the first."""
    return torch.cat(change(*torch.stack([h, h.tanh(), h.sin()]).flatten(0, 1).chunk(2)))


def between(h: Tensor, bounds: Callable[[Tensor], slice]) -> Tensor:
    """The first sample's numbers from one place to another, added to all that it has."""
    return torch.stack([h[0] + h[0, bounds(h.argmax(1))].sum(), *h[1:]])


def parts_written(memory: Tensor, h: Tensor) -> Tensor:
    torch.tanh(h[:2], out=memory[:2])
    torch.mul(h[2:], -9, out=memory[2:])
    return memory


def filled_through(h: Tensor) -> Tensor:
    memory = torch.zeros_like(h)
    view = memory.as_strided((len(h),), (C + 1,))
    memory.copy_(h)
    return view[:, None] * 1.0


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_of_each_sample_are_refused(name: str) -> None:
    with pytest.raises(SampleMixingError):
        run(OTHERS[name], sizes=(B,))


def cut(h: Tensor) -> Tensor:
    return h.view(len(h), 2, C // 2)


def in_place(write: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """The forward that returns a view of its activations, which it writes to: torch makes the view's node anew then."""

    def forward(m: Any, h: Tensor) -> Tensor:
        z = cut(h * 1.0)
        write(z)
        return z

    return forward


def own(h: Tensor) -> Any:
    return enumerate(h.argmax(1))


def mask_of(h: Tensor, write: Callable[[Tensor, int, Tensor], Any]) -> Tensor:
    mask = torch.zeros(h.shape)
    for i, n in own(h):
        write(mask, i, n)
    return mask


SAME = {
    "a diagonal within samples": lambda m, h: cut(h).diagonal(dim1=1, dim2=2),
    "a diagonal within samples, zeroed": in_place(lambda z: z.diagonal(dim1=-1, dim2=1).zero_()),
    "a view, written to through another": in_place(lambda z: z[:, 0].mul_(2)),
    "strides within samples": lambda m, h: h.as_strided((len(h), 2), (C, C - 1)),
    "steps within samples": lambda m, h: h.reshape(-1)[:: C // 2].view(len(h), -1),
    "flat places alike": lambda m, h: h.reshape(-1)[ROWS(len(h)) * C + 1][:, None],
    "flat places alike, zeroed": writing(lambda z, h: z.view(-1).scatter_(0, ROWS(len(h)) * C + 1, 0.0)),
    "an index alike": lambda m, h: h[ROWS(len(h))[:, None], torch.tensor([2, 0])],
    "an index in another order": lambda m, h: h[ROWS(len(h)).flip(0), 1][:, None],
    "an index by data": lambda m, h: h[ROWS(len(h)), h.argmax(1)][:, None],
    "an index by data, assigned": writing(lambda z, h: z.__setitem__((ROWS(len(h)), h.argmax(1)), 0.0)),
    "chunks of rows by time, alike": lambda m, h: (
        by_time(h, lambda first, second: (first.exp(), second.exp())).view(3, len(h), -1).sum(0)
    ),
    "own lengths": lambda m, h: torch.stack([h[i, : n + 1].sum(0, True) for i, n in enumerate(h.argmax(1))]),
    "own lengths, written": writing(lambda z, h: [z.__setitem__((i, slice(n, None)), 0.0) for i, n in own(h)]),
    "a mask of own lengths": lambda m, h: h * mask_of(h, lambda mask, i, n: mask.__setitem__((i, slice(n)), 1.0)),
    "a mask of numbers read": lambda m, h: h * mask_of(h, lambda mask, i, n: mask.__setitem__((i, slice(int(n))), 1.0)),
    "a mask of numbers listed": lambda m, h: h * torch.stack(
        [torch.cat([torch.ones(n), torch.zeros(C - n)]) for n in h.argmax(1).tolist()]
    ),
    "choices by hand": lambda m, h: h + torch.zeros(len(h), 2 * C).index_put(
        (ROWS(len(h)), h.argmax(1) + C), torch.tensor(1.0)
    )[:, C:],
    "columns alike gathered": lambda m, h: h.gather(1, torch.tensor([[2, 0]]).expand(len(h), -1)),
    "columns alike scattered to": lambda m, h: h.scatter(1, torch.ones(len(h), 1).long(), 0.0),
}  # fmt: skip


def flat_squares(out: Tensor, labels: Tensor) -> Tensor:
    return out.flatten(1).square().sum(1).mean()


@pytest.mark.parametrize("name", SAME)
def test_the_same_numbers_of_each_sample_are_exact(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = run(SAME[name], flat_squares, sizes=(B,))
    torch.testing.assert_close(found.double(), truth(SAME[name], flat_squares, size=B), rtol=1e-5, atol=1e-6)


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
        choices[torch.arange(len(h)), torch.cat([h, -h], 1).argmax(1)] = 1.0
        return h * choices[:, :C] - h * choices[:, C:]

    run(chosen, sizes=(2,) * 8)


PARTS = {
    "a chunk of rows by time": lambda out: torch.stack([out, out.tanh(), out.sin()]).flatten(0, 1).chunk(2)[0].sum(),
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


def test_a_loaders_lists_may_hold_as_many_rows_as_there_are_samples() -> None:
    def collate(records: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        return torch.stack([x for x, _ in records]), [targets for _, targets in records]

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


def test_rows_of_the_labels_are_no_list() -> None:
    """A loop over the batch's labels tells nothing of what each sample's data chose."""

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        wanted = torch.from_numpy(numpy.ones((B, C), dtype=numpy.float32))
        return sum((out[i] - wanted[i]).square().sum() for i in range(len(out) - 1)) + 0 * (out - wanted).sum()

    with pytest.warns(BatchReadWarning, match="by their place"):
        run(lambda m, h: h, loss, sizes=(B,), reduction="sum")
