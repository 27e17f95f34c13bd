"""Uses by records as uses by persons: a person's gradient is the sum over his records.

A product with the rows of a person's records one after the other is a product with more rows, so the norm comes with
all its cross terms from the same operators, as for a parameter that is used again. What has no such form is computed
by record and added up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import ops
from ..layouts.groups import People
from ..ops.bounds import added, roundings, unit
from ..ops.common import accumulate, chunks
from .alone import Alone
from .conv import Conv
from .costs import Shape
from .embedding import Lookup
from .linear import Matmul
from .routed import Routed
from .use import Stored, Use

CPU = torch.device("cpu")


class Folded(Use):
    """Any use by records: gradients by record, added up a few persons at a time; the clipped sum is the use's own."""

    def __init__(self, inner: Use, people: People) -> None:
        super().__init__(inner.operand, people.count, inner.name)
        self.inner, self.people = inner, people
        if inner.shape is not None:
            self.shape = by_person(inner.shape, people)

    def data(self) -> tuple[Tensor, ...]:
        return self.inner.data()

    def holds(self) -> tuple[Tensor, ...]:
        return self.inner.holds()

    def held_bytes(self) -> int:
        return self.inner.held_bytes()

    def per_sample(self, low: int, high: int) -> Tensor:
        total = None
        for start, stop in self._runs(low, high):
            part = accumulate(self.inner.per_sample(start, stop))
            if total is None:
                total = part.new_zeros((high - low, *part.shape[1:]))
            for row, person in enumerate(self.people.owner(CPU)[start:stop].tolist()):
                total[person - low] += part[row]
        assert total is not None
        return total

    def rounding(self) -> Tensor | None:
        most = int(self.people.counts.max())  # counted on the CPU
        sizes = self.inner.norm_sq().double().sqrt() * roundings(most, blocks=False) * unit(self.operand)
        records = added(sizes, self.inner.rounding())
        assert records is not None
        return summed(records, self.people)

    def _runs(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Ranges of records of these persons: consecutive ones, as many as fit."""
        starts = self.people.starts
        records = self.people.order[int(starts[low]) : int(starts[high])]
        breaks = (torch.nonzero(records.diff() != 1).flatten() + 1).tolist()
        for first, last in zip([0, *breaks], [*breaks, len(records)], strict=True):
            begin = int(records[first])
            for a, b in chunks(last - first, 4 * self.operand.numel()):
                yield begin + a, begin + b

    def clipped_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        return self.inner.clipped_sum(c[self.people.owner(c.device)], into)


def folded(use: Use, people: People) -> Use:
    """The use by persons; itself where it is that already."""
    if use.batch == people.count:  # every record is of a person of its own, or this was done
        return use
    assert use.batch == people.records, (use.name, use.batch, people.records)
    if isinstance(use, Stored):
        shape = None if use.shape is None else by_person(use.shape, people)
        return Stored(use.operand, summed(use.grads, people), use.name, shape)
    if isinstance(use, Matmul):
        return _product(use, people)
    if isinstance(use, Lookup):
        return Lookup(use.operand, _joined(use.ids, people), _joined(use.g, people), use.name)
    if isinstance(use, Routed):
        owner = people.owner(use.owner.device)[use.owner]
        return Routed(use.operand, use.a, use.g, use.ids, owner, people.count, use.name)
    if isinstance(use, Alone):
        return Alone(use.inner, int(people.owner(CPU)[use.sample]), people.count)
    if isinstance(use, Conv) and people.each:
        return Conv(use.operand, _joined(use.x, people), _joined(use.g, people), use.geometry, use.name)
    return Folded(use, people)


def by_person(shape: Shape, people: People) -> Shape:
    """The shape of a product by persons: positions of a person of average size."""
    return shape._replace(batch=people.count, t=-(-shape.t * people.records // max(people.count, 1)))


def summed(rows: Tensor, people: People) -> Tensor:
    """Rows by record, [records, ...] -> their sums by person, [persons, ...]."""
    if people.each:
        return people.by_person(rows).unflatten(0, (people.count, people.each)).sum(1)
    if rows.device.type == "cpu":
        return rows.new_zeros((people.count, *rows.shape[1:])).index_add_(0, people.owner(rows.device), rows)
    # there index_add adds in any order: not the same bits each time
    return ops.routed.padded(people.by_person(rows), people.counts.to(rows.device)).sum(1)


def _joined(rows: Tensor, people: People) -> Tensor:
    """[records, T, ...] -> [persons, rows of a person's records, ...], zeros behind."""
    rows = people.by_person(rows)
    if people.each:
        return rows.reshape(people.count, people.each * rows.size(1), *rows.shape[2:])
    return ops.routed.padded(rows, people.counts.to(rows.device)).flatten(1, 2)


def _product(use: Matmul, people: People) -> Use:
    """Rows of a person one after the other; where persons have unequally many, none is padded."""
    if people.each:
        return Matmul(use.operand, _joined(use.a, people), _joined(use.g, people), use.name)
    a, g = people.by_person(use.a), people.by_person(use.g)
    owner = torch.repeat_interleave(people.counts * use.a.size(1)).to(a.device)
    rows = (a.flatten(0, 1), g.flatten(0, 1), torch.zeros_like(owner), owner)
    return Routed(use.operand, *rows, people.count, use.name)
