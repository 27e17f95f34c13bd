"""Which sample stands where must not matter, and how many there are must not be computed with."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.nn.functional as F

from fastdp.errors import BatchReadWarning, SampleMixingError, StepError

from ..programs_by_hand import C, run, truth


def written(h: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    h[:, :stop] = 0.5
    return h


def first_three_times(z: torch.Tensor) -> torch.Tensor:
    return torch.cat([z[:, :1] * 3, z[:, 1:]], 1).T


def sine(part: torch.Tensor, grad: bool) -> torch.Tensor:
    with torch.set_grad_enabled(grad):
        return part.sin()


def half_written(h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(h.shape)
    out[:3] = h[:3].sin()
    return out


BY_PLACE = {
    "a range": lambda m, h: h * torch.linspace(-3, 3, 6)[: len(h), None],
    "a window": lambda m, h: h * torch.hann_window(len(h))[:, None],
    "numbers of rows": lambda m, h: h + torch.arange(len(h))[:, None],
    "the identity": lambda m, h: h + torch.eye(len(h), C),
    "a part of a parameter": lambda m, h: h * m.w[: len(h)],
    "rows of a table by number": lambda m, h: h + F.embedding(torch.arange(len(h)), m.w),
    "a part of a buffer": lambda m, h: h * m.table[: len(h)],
    "halves": lambda m, h: torch.cat([h[: len(h) // 2] * 3, -h[len(h) // 2 :]]),
    "halves through two functions": lambda m, h: torch.cat([h[:3].relu(), h[3:].tanh()]),
    "halves of which one has no gradient": lambda m, h: torch.cat([sine(h[:3], True), sine(h[3:], False)]),
    "a half of a constant that was not written to": lambda m, h: torch.cat([h[:3].sin(), half_written(h)[3:]]),
    "halves beside what was made of them otherwise": lambda m, h: torch.cat(
        [torch.cat([h[:3], h[:3].relu()], 1), torch.cat([h[3:], h[3:].tanh()], 1)]
    ),
    "halves stacked with what was made of them otherwise": lambda m, h: torch.cat(
        [torch.stack([h[:3], h[:3].relu()], 1), torch.stack([h[3:], h[3:].tanh()], 1)]
    ).flatten(1),
    "halves beside what was made of them, the other way round": lambda m, h: torch.cat(
        [torch.cat([h[:3], h[:3].relu()], 1), torch.cat([h[3:].relu(), h[3:]], 1)]
    ),
    "halves subtracted the other way round": lambda m, h: torch.cat([h[:3] - h[:3].relu(), h[3:].relu() - h[3:]]),
    "the first gathered": lambda m, h: h.gather(0, torch.zeros(1, C, dtype=torch.long)),
    "the first for each": lambda m, h: h.sum(1).gather(0, torch.zeros(len(h), dtype=torch.long))[:, None],
    "some taken along": lambda m, h: h.sum(1).take_along_dim(torch.arange(3), 0)[:, None],
    "constants scattered to the first": lambda m, h: h.scatter(0, torch.zeros(1, C, dtype=torch.long), 3.0),
    "constants scattered and added": lambda m, h: h.sum(1).scatter_add(0, torch.arange(2), torch.ones(2))[:, None],
    "halves by two parameters": lambda m, h: torch.cat([h[:3] * m.w[0], h[3:] * m.w[1]]),
    "parts by number": lambda m, h: torch.cat([p * (1 + i) for i, p in enumerate(h.chunk(3))]),
    "parts of vsplit by number": lambda m, h: torch.cat([p * (1 + i) for i, p in enumerate(h.vsplit([2, 3]))]),
    "parts of hsplit by number": lambda m, h: torch.cat([p * (1 + i) for i, p in enumerate(h.T.hsplit([2]))], 1).T,
    "a part of a buffer by vsplit": lambda m, h: h * m.table.vsplit([len(h)])[0],
    "a part of a buffer by unsafe_split": lambda m, h: h * torch.unsafe_split(m.table, len(h))[0],
    "a part of a buffer by its strides": lambda m, h: h * m.table.as_strided(h.shape, (C, 1)),
    "a part of a buffer by its size": lambda m, h: h * m.table.clone().resize_(h.shape),
    "a part of a buffer by padding less": lambda m, h: h * F.pad(m.table, (0, 0, 0, len(h) - len(m.table))),
    "the largest of a buffer": lambda m, h: h * m.table.topk(len(h), 0)[0],
    "the first of an order across": lambda m, h: first_three_times(
        h[h[:, 0].argsort()[None], torch.arange(2)[:, None]]
    ),
    "columns from a sample's number on": lambda m, h: h * 2 + F.pad(h[:, (h[0] > 0).sum() :].sum(1, True), (0, C - 1)),
    "columns written up to a sample's number": lambda m, h: written(h * 1.0, (h[0] > 0).sum()),
    "every second": lambda m, h: h[::2],
    "every second by an array": lambda m, h: h[numpy.arange(0, len(h), 2)],
    "a comparison": lambda m, h: torch.where(torch.arange(len(h))[:, None] < 3, h, -h),
}


def then(write):
    """The forward that writes into its layer's output, and returns that."""

    def forward(m, h):
        h = h * 1.5
        write(m, h)
        return h * 1.0

    return forward


BY_PLACE |= {
    "the first written": then(lambda m, h: h.__setitem__(0, 3.0)),
    "the last zeroed": then(lambda m, h: h.__setitem__(-1, 0.0)),
    "every second written": then(lambda m, h: h.__setitem__(slice(None, None, 2), h[::2] * 2)),
    "half in place": then(lambda m, h: h[:3].mul_(3)),
    "a mask by row": lambda m, h: h.masked_fill(torch.arange(len(h))[:, None] == 0, 0.5),
    "a mask written by row": lambda m, h: h.masked_fill(mask_of(len(h)), 0.5),
    "parity": lambda m, h: h * ((-1.0) ** torch.arange(len(h))).to(h)[:, None],
    "counted": lambda m, h: h * torch.ones(len(h)).to(h).cumsum(0)[:, None],
    "a longer range": lambda m, h: h * torch.linspace(-3, 3, 20).to(h)[: len(h), None],
    "a seeded table": lambda m, h: h + torch.randn(20, 1, generator=torch.Generator().manual_seed(1))[: len(h)],
}


UNKEPT = torch.randn(20, C, generator=torch.Generator().manual_seed(3))  # of the user's, not the model's
BY_PLACE |= {
    f"a table {how}": made
    for how, made in {
        "copied": lambda m, h: h + m.table.clone()[: len(h)],
        "scaled": lambda m, h: h + (2 * m.table)[: len(h)],
        "normalised": lambda m, h: h + F.normalize(m.table, dim=-1)[: len(h)] * 9,
        "by numbers": lambda m, h: h + (m.table * 4)[torch.arange(len(h))],
        "by numpy's": lambda m, h: h + m.table[numpy.arange(len(h))],
        "by a range": lambda m, h: h + m.table[range(len(h))],
        "looked up": lambda m, h: h + F.embedding(torch.arange(len(h)), m.table * 4),
        "by numbers and data": lambda m, h: h + m.table[: len(h)][torch.arange(len(h))[:, None], h.argsort(1)],
        "in bags": lambda m, h: h + F.embedding_bag(torch.arange(2 * len(h)).view(-1, 2), m.table * 4),
        "narrowed": lambda m, h: h + (m.table + 0).narrow(0, 0, len(h)),
        "rolled": lambda m, h: h + m.table.roll(1, 0)[: len(h)],
        "by a product": lambda m, h: h + F.one_hot(torch.arange(len(h)), 20).to(h) @ m.table,
        "of parameters": lambda m, h: h + (m.w * 4)[: len(h)],
        "of nobody": lambda m, h: h + UNKEPT[: len(h)],
        "written into": lambda m, h: h * m.table[: len(h)].clone().add_(h.detach()),
        "multiplied into": lambda m, h: h + torch.arange(len(h))[:, None].expand(-1, C).float().mul_(h.detach()),
    }.items()
}


def drawn(take, *width):
    """A write where a random mask of samples, or of their numbers, says."""

    def write(m, h):
        mask = torch.rand(len(h), *width) < 0.8
        h[mask] = take(h)[mask]

    return then(write)


def all_chosen_by_chance(m, h):
    """Each row passes the mask in this batch: in another, the rows beside the chosen ones would be others'."""
    positive = h.exp()
    rows = positive[positive[:, 0] > 0] * 1.0
    rows[:, 0] = h[:, 1]
    return rows


def chosen(change):
    """Rows that the data chose, changed in place: numbers and whole samples, put back where they were."""

    def write(m, h):
        positive = h > 0
        found = h.clone()
        numbers, rows = h[positive] * 1.0, h[positive[:, 0]] * 1.0
        change(numbers, rows)
        found[positive] = numbers
        found[positive[:, 0]] = rows
        return found

    return write


BY_PLACE |= {
    "the batch's numbers beside chosen rows": all_chosen_by_chance,
    "the first of chosen numbers": chosen(lambda numbers, rows: numbers.__setitem__(0, 3.0)),
    "the first of chosen numbers, behind an ellipsis": chosen(lambda n, rows: n.__setitem__((..., 0), 3.0)),
    "the first of chosen rows": chosen(lambda numbers, rows: rows.__setitem__((0, ...), rows[0] * 2)),
    "chosen rows from others": chosen(lambda numbers, rows: rows.__setitem__((slice(None), 0), rows.flip(0)[:, 0])),
    "others' numbers where a mask was drawn": drawn(lambda h: h.flip(0)),
    "others' numbers where masks were drawn": drawn(lambda h: h.roll(1, 0), C),
}


def mask_of(size):
    mask = torch.zeros(size, 1, dtype=torch.bool)
    mask[0] = True
    return mask


# -inf in every sample's row is the same number, though their difference is none (Longformer's windows)
EYE = torch.eye(C)
NOT_BY_PLACE = {
    "infinities": lambda m, h: (
        (h + (h.new_ones(len(h), C) @ EYE.to(h)).masked_fill(EYE[1] == 1, -torch.inf)).softmax(-1) * 3
    ),
    "an empty list written to": then(lambda m, h: h.__setitem__((slice(None), []), 3.0)),
    "a column written": then(lambda m, h: h.__setitem__((slice(None), 0), 3.0)),
    "all rows written": then(lambda m, h: h.__setitem__((torch.arange(len(h)), 1), 0.0)),
    "ones": lambda m, h: h * torch.ones(len(h), 1),
    "along the width": lambda m, h: h * torch.linspace(1, 3, C),
    "a token for each": lambda m, h: h + m.token.expand(len(h), -1),
    "a token repeated": lambda m, h: h + m.token.repeat(len(h), 1),
    "one row of a table": lambda m, h: h + F.embedding(torch.zeros(len(h), dtype=torch.long), m.w),
    "places of the width": lambda m, h: h + m.w[:C].sum(1),
    "equal parts": lambda m, h: torch.cat([p.relu() * 3 for p in h.split(4)]),
    "parts put together again": lambda m, h: torch.cat([h[:2], h[2:]]),
    "rows cut within samples, beside what was made of them": lambda m, h: torch.cat(
        [torch.cat([p, p.tanh()], 1) for p in h.reshape(-1, 1).split(C * 5)]
    ).view(len(h), -1),
    "halves added the other way round": lambda m, h: torch.cat([h[:3] + h[:3].relu(), h[3:].relu() + h[3:]]),
    "each gathered": lambda m, h: h.gather(0, torch.arange(len(h))[:, None].expand(-1, C)) * 2,
    "constants scattered to all": lambda m, h: h.scatter(0, torch.arange(len(h))[:, None], 3.0),
    "parts of vsplit": lambda m, h: torch.cat([p.tanh() * m.w[0] for p in torch.vsplit(h, [1, 3])]),
    "parts of hsplit": lambda m, h: torch.cat([p.tanh() for p in torch.hsplit(h.T, [2])], 1).T,
    "parts of hsplit's only dimension": lambda m, h: torch.cat([p.tanh() for p in h.sum(1).hsplit([2])])[:, None],
    "parts of dsplit": lambda m, h: torch.cat([p.tanh() for p in h.T[None].dsplit([1, 4])], 2)[0].T,
    "columns by hsplit": lambda m, h: h.hsplit([1])[1] * h.hsplit([1])[0],
    "one at a time": lambda m, h: torch.stack([h[i].tanh() for i in range(len(h))]),
    "a range": lambda m, h: h[range(len(h)), h.argmax(1)][:, None],
    "an array": lambda m, h: h[numpy.arange(len(h)), h.argmax(1)][:, None],
    "an index": lambda m, h: h[torch.arange(len(h)), h.argmax(1)][:, None],
    "a table alike by number": lambda m, h: (
        h * torch.linspace(1, 3, C).expand(len(h), -1)[torch.arange(len(h))[:, None], h.argsort(1)]
    ),
    "memory of the data's type": lambda m, h: h + h.new(len(h), C).fill_(0.5) + h.new([[1.0]]),
    "a matrix for each row": lambda m, h: (
        torch.einsum("rf,rfi->ri", h.repeat_interleave(2, 0).tanh(), EYE[:, 1:].to(h).expand(2 * len(h), -1, -1))
    ).view(len(h), -1),
    "a matrix as wide as the batch": lambda m, h: torch.einsum(
        "rf,rfi->ri", h[:, :3].tanh().repeat(1, 2), h.new_ones(1, 6, 2).expand(len(h), -1, -1)
    ),
    "columns of chosen rows": chosen(
        lambda numbers, rows: rows.__setitem__((slice(None), -1), rows[:, -1] + rows[:, 0])
    ),
    "columns of chosen rows, behind an ellipsis": chosen(
        lambda numbers, rows: rows.__setitem__((..., slice(1, None)), rows[:, 1:] * 2)
    ),
    "chosen numbers": chosen(lambda numbers, rows: numbers.__setitem__((...,), numbers * 2 + 1)),
    "own numbers where a mask was drawn": drawn(lambda h: h),
    "own numbers where masks were drawn": drawn(lambda h: h, C),
    "put where masks were drawn": lambda m, h: h + 0 * h.index_put((torch.rand(len(h)) < 0.8,), m.token),
    "there and back": lambda m, h: h.flip(0).tanh().flip(0),
}


@pytest.mark.parametrize("name", BY_PLACE)
def test_numbers_by_place_are_refused(name: str) -> None:
    with pytest.raises(SampleMixingError):
        run(BY_PLACE[name])


@pytest.mark.parametrize("name", NOT_BY_PLACE)
def test_what_is_the_same_for_every_sample_is_exact(name: str) -> None:
    (found,) = run(NOT_BY_PLACE[name])
    torch.testing.assert_close(found.double(), truth(NOT_BY_PLACE[name]), rtol=1e-5, atol=1e-6)


def writing(write):
    def forward(m, h):
        z = h.clone()
        write(z, h)
        return z * 1.0

    return forward


def in_a_loop(change):
    def write(z, h):
        for i in range(len(h)):
            z[i] = change(i, h[i])

    return write


ONE_ROW = {
    "by number": lambda z, h: z.__setitem__(0, h[0] * 3),
    "by a slice": lambda z, h: z.__setitem__(slice(1), h[:1] * 3),
    "in place": lambda z, h: z[0].mul_(2),
    "copied": lambda z, h: z[-1].copy_(h[-1] * 3),
    "selected": lambda z, h: z.select(0, 0).copy_(h.select(0, 0) * 3),
    "all but one": lambda z, h: [z[i].mul_(2) for i in range(1, len(h))],
    "each by its number": in_a_loop(lambda i, row: row * (0.5 + i)),
}


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", ONE_ROW)
def test_rows_of_single_samples_written_by_place_are_warned_of(name: str, size: int) -> None:
    with pytest.warns(BatchReadWarning, match="by their place"):
        run(writing(ONE_ROW[name]), sizes=(size,))


def constants(write):
    """The forward in which `write(z, i)` writes constants to each sample's row, or to one."""

    def forward(m, h):
        z = h.clone()
        ((h[:, 0] > 0).long() + 7).tolist()  # after Python has read each sample's own, too
        for i in range(len(h)):
            write(z, i)
        return z * 1.0

    return forward


CONSTANTS = {
    "to the first": lambda z, i: z.__setitem__(0, 3.0),
    "by slices of the place": lambda z, i: z.__setitem__((i, slice(i % C, None)), 0.0),
    "rows of a table": lambda z, i: z.__setitem__(i, torch.linspace(0, 1, C * 8).view(8, C)[i]),
    "by indices of the place": lambda z, i: z.__setitem__((i, torch.tensor([i % C])), 0.0),
}


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_written_to_single_rows_are_refused(name: str, size: int) -> None:
    with pytest.raises(SampleMixingError, match="by their place"):
        run(constants(CONSTANTS[name]), sizes=(size,))


WARNED = {
    "the first by itself": lambda m, h: torch.cat([h[:1] * 3, h[1:]]),
    "a loop by number": lambda m, h: torch.stack([row * (i + 1) for i, row in enumerate(h)]),
    "no gradient for every second one": lambda m, h: torch.stack([sine(r, i % 2 == 0) for i, r in enumerate(h)]),
    "two parameters in turn": lambda m, h: torch.stack([row * m.w[i % 2] for i, row in enumerate(h)]),
}


@pytest.mark.parametrize("name", WARNED)
def test_single_samples_that_go_different_ways_are_warned_of(name: str) -> None:
    """What is done to one sample may depend on its own data: a loop is not refused."""
    with pytest.warns(BatchReadWarning, match="by their place"):
        run(WARNED[name])


@pytest.mark.parametrize("factor", [0, 0.0, 3])
def test_one_of_two_samples_scaled_by_place_is_warned_of(factor: float) -> None:
    """By the integer 0 too, with which a sum in Python begins."""
    with pytest.warns(BatchReadWarning, match="by their place"):
        run(lambda m, h: torch.cat([h[:1] * factor, h[1:]]), sizes=(2,))


BY_NUMBER = {
    "roll": lambda i, row: row.roll(i),
    "clamped in place": lambda i, row: row.clone().clamp_(max=i / 3),
    "scaled in place twice": lambda i, row: row.clone().mul_(2).mul_(i + 1),
    "a remainder": lambda i, row: row % (i + 1),
    "a slope": lambda i, row: F.leaky_relu(row, i),
    "filled": lambda i, row: row.masked_fill(row > 0, i),
    "rows of a large table": lambda i, row: (row.repeat(9) * torch.linspace(0, 1, 9 * 9 * C).view(9, -1)[i])[:C],
}


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", BY_NUMBER)
def test_loops_that_take_their_number_are_warned_of(name: str, size: int) -> None:
    with pytest.warns(BatchReadWarning, match="by their place"):
        run(lambda m, h: torch.stack([BY_NUMBER[name](i, row) for i, row in enumerate(h)]), sizes=(size,))


IN_ORDER = torch.arange(6 * C)


@pytest.mark.parametrize(
    ("function", "first", "then"),
    [
        (
            lambda h, at: torch.stack([part.sum(0) for part in h.tensor_split(at)]),
            torch.arange(1, 6),
            torch.tensor([2, 2, 3, 4, 5]),
        ),
        (lambda h, at: torch.zeros_like(h).index_put((at[::C] // C,), h) * h, IN_ORDER, IN_ORDER.flip(0)),
        (lambda h, at: torch.zeros_like(h).put(at, h) * h, IN_ORDER, IN_ORDER.flip(0)),
    ],
    ids=["tensor_split", "index_put", "put"],
)
def test_constants_that_say_which_rows_are_read_at_each_step(function, first, then) -> None:
    """They have the shapes that they had, and other numbers."""
    places = iter([first, then])
    with pytest.raises(SampleMixingError):
        run(lambda m, h: function(h, next(places)), sizes=(6, 6))


def test_rows_that_are_dropped_by_strides_or_lie_in_an_order_across_are_seen_in_a_sum() -> None:
    def total(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return out.square().sum()

    for dropped in (lambda m, h: h[1:], lambda m, h: h.as_strided((len(h) - 1, C), (C, 1), C)):
        with pytest.raises((SampleMixingError, StepError)):
            run(dropped, total, reduction="sum")
    with pytest.raises(SampleMixingError, match="across several dimensions"):  # as many columns as samples
        run(lambda m, h: first_three_times(h[h[:, 0].argsort()[None], torch.arange(C)[:, None]]), sizes=(C,))
