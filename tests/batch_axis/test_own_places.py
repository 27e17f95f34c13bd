"""What is taken of a sample, or written to it, must not depend on where in the batch it stands."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fastdp.errors import SampleMixingError

from ..programs_by_hand import C, run, truth

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


def assigned(h: Tensor, *parts: Any, to: Any = slice(None)) -> Tensor:
    """Parts of the batch written to a constant, the second by another function than the first."""
    z = torch.ones(len(h), C)
    for function, part in zip((torch.sin, torch.cos), parts, strict=False):
        z[part, to] = function(h[part, to])
    return z


OTHERS = {
    "half assigned to a constant": lambda m, h: assigned(h, slice(2)),
    "all but the first assigned": lambda m, h: assigned(h, slice(1, None)) * h,
    "steps assigned": lambda m, h: assigned(h, slice(None, None, 2)),
    "an index assigned": lambda m, h: assigned(h, ROWS(len(h) - 1)),
    "halves assigned otherwise": lambda m, h: assigned(h, slice(2), slice(2, None)),
    "parts that overlap": lambda m, h: chunks_assigned(h, [0, 1], 3),
    "a chunk through the transpose": lambda m, h: written_through(h, lambda z: z.T[:, :3].copy_(h[:3].T)),
    "a chunk through a view of columns": lambda m, h: written_through(
        h, lambda z: z[:, :2].__setitem__(slice(3), h[:3, :2])
    ),
    "chunks through a view, beside one": lambda m, h: written_through(
        h, lambda z: [z.__setitem__((slice(3), slice(2, None)), h[:3, 2:]), in_halves(z[:, :2], h[:, :2])]
    ),
    "a chunk through a view of rows": lambda m, h: written_through(h, lambda z: z[:3].__setitem__(slice(None), h[:3])),
    "flat places through a view": lambda m, h: written_through(
        h, lambda z: z.view(-1).__setitem__(slice(2 * C), h.reshape(-1)[: 2 * C])
    ),
    "a mean in the shape of one": lambda m, h: h * torch.full_like(h[0], h.sum().detach()),
    "a mean in the shape of all": lambda m, h: h * h.new_full(h.shape, h.mean().detach()),
    "a chunk assigned to zeros_like": lambda m, h: chunks_assigned(h, [0], 3, make=torch.zeros_like),
    "halves of other columns": lambda m, h: (
        assigned(h, slice(2), to=slice(2)) + assigned(h, slice(2, 4), to=slice(2, 4))
    ),
    "halves to other columns": lambda m, h: columns_assigned(h, slice(2), slice(2, None), h[:, :2]),
    "halves of a half's columns": lambda m, h: (
        torch.cat([torch.cat([h[:2, :2], h[2:, 2:]])] * 2, 1)
    ),
    "half of them without gradients": lambda m, h: torch.cat([without_gradients(m, h[:2]), h[2:] @ m.w[:C]]),
    "half assigned, added to rows": lambda m, h: torch.stack(
        [row + other for row, other in zip(h, assigned(h, slice(2)), strict=True)]
    ),
    "half assigned, row by row": lambda m, h: torch.stack([row.tanh() for row in assigned(h, slice(2))]),
    "half put": lambda m, h: torch.zeros(len(h), C).index_put((ROWS(2),), h[:2]),
    "half copied": lambda m, h: torch.zeros(len(h), C).index_copy(0, ROWS(2), h[:2]),
    "half added": lambda m, h: torch.zeros(len(h), C).index_add(0, ROWS(2), h[:2]),
    "half scattered": lambda m, h: torch.zeros(len(h), C).scatter(0, ROWS(2)[:, None].expand(2, C), h[:2]),
    "half scattered to others": lambda m, h: h.scatter(0, ROWS(2)[:, None].expand(2, C), h[:2].sin()),
    "half assigned to all": writing(lambda z, h: z.__setitem__(slice(2), h[:2].sin())),
    "half assigned, masked between": lambda m, h: chunks_assigned(h, [0, 2], 2, lambda z: z.masked_fill_(z > 0, 1.0)),
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
    "the numbers of two samples between": lambda m, h: between(h, lambda n: slice(n[0], n[1])),
    "another's number": lambda m, h: between(h, lambda n: slice(n[0])),
    "another's numbers, written": writing(lambda z, h: [z.__setitem__((1 - i, slice(n)), 0.0) for i, n in own(h[:2])]),
    "another's number, where its own say": lambda m, h: h + mask_of(
        h, lambda mask, i, n: mask.__setitem__((i, slice(n)), h[1 - i, 0] if i < 2 else 0.0)
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
    """The second sample's numbers from one place to another, added to all that it has."""
    return torch.stack([h[0], h[1] + h[1, bounds(h.argmax(1))].sum(), *h[2:]])


def parts_written(memory: Tensor, h: Tensor) -> Tensor:
    torch.tanh(h[:2], out=memory[:2])
    torch.mul(h[2:], -9, out=memory[2:])
    return memory


def in_halves(z: Tensor, h: Tensor) -> None:
    z[:3], z[3:] = h[:3], h[3:]


def written_through(h: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    z = h.new_zeros(h.shape)
    write(z)
    return z


def columns_assigned(h: Tensor, first: slice, second: slice, values: Tensor) -> Tensor:
    z = torch.ones(len(h), C)
    z[:2, first], z[2:, second] = values[:2], values[2:]
    return z


def without_gradients(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        return h @ m.w[:C]


def chunks_assigned(
    h: Tensor, starts: Any, size: int, between: Any = lambda z: None, make: Any = lambda h: h.new_zeros(h.shape)
) -> Tensor:
    z = make(h)
    for start in starts:
        z[start : start + size] = h[start : start + size].sin()
        between(z)
    return z


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


def in_chunks(numbers: Tensor) -> Tensor:
    return torch.cat([numbers[i : i + 3].tanh() for i in range(0, len(numbers), 3)])


def own(h: Tensor) -> Any:
    return enumerate(h.argmax(1))


def mask_of(h: Tensor, write: Callable[[Tensor, int, Tensor], Any]) -> Tensor:
    mask = torch.zeros(h.shape)
    for i, n in own(h):
        write(mask, i, n)
    return mask


SAME = {
    "chunks assigned": lambda m, h: chunks_assigned(h, range(0, len(h), 3), 3).cos(),
    "chunks assigned to zeros_like": lambda m, h: chunks_assigned(h, range(0, len(h), 2), 2, make=torch.zeros_like),
    "chunks assigned, one by one": writing(
        lambda z, h: [z.__setitem__(slice(a, a + 1), h[a : a + 1].sin()) for a in range(len(h))]
    ),
    "chunks of labels": lambda m, h: h * chunks_assigned(h.detach().round(), range(0, len(h), 2), 2),
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
    "chunks within samples": lambda m, h: in_chunks(h.reshape(-1)).view(len(h), -1),
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
