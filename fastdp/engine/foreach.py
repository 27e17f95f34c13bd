"""Takes small gradients of many parameters together, in a few operations instead of hundreds.

What is kept of biases and norm layers becomes one matrix; products and convolutions of equal shape become one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..grad_sample.cost_model import Clock
from ..grad_sample.grouped_kernels import GroupedKernels
from ..grad_sample.parameter_links import link_of
from ..grad_sample.parameter_use import ParameterUse, Stored
from ..ops.rows import square_sum, weighted_sum

SMALL = 1 << 14  # elements of a parameter; larger ones are not worth a copy
FEW = 1 << 20  # elements of a bundle, whose groups are taken at once, in float64


def is_small(use: ParameterUse, parameter: Tensor) -> bool:
    """Whether the use keeps a few float32 numbers of each sample, of the parameter itself."""
    return (
        isinstance(use, Stored)
        and use.operand is parameter
        and parameter.numel() <= SMALL
        and use.grads.dtype == torch.float32
        and link_of(parameter) is None
    )


class Bundle:
    """Per-sample gradients [B, n] of several parameters, side by side."""

    def __init__(self, parameters: Sequence[Tensor], grads: Tensor, clock: Clock | None = None) -> None:
        self.members = {id(parameter): parameter for parameter in parameters}
        self.grads, self.clock = grads, clock

    @classmethod
    def of(cls, members: Sequence[tuple[Tensor, ParameterUse]]) -> Bundle:
        """Made of parameters, each with its one use."""
        rows = [use.grads.reshape(use.batch, -1) for _, use in members if isinstance(use, Stored)]
        grads = torch.cat([r.to(rows[0].device) for r in rows], 1)
        return cls([parameter for parameter, _ in members], grads, _shared_clock(members))

    def norms_sq(self, several: bool) -> Tensor:
        """Squared norms in float64: [members, B], or [1, B] of all together."""
        if not several:
            return square_sum(self.grads)[None]
        if self.grads.numel() > FEW:
            return torch.stack([square_sum(part) for part in self.grads.split(self._sizes(), 1)])
        lengths = index(tuple(self._sizes()), self.grads.device)
        return torch.segment_reduce(self.grads.T.double().square(), "sum", lengths=lengths, axis=0, unsafe=True)

    def _sizes(self) -> list[int]:
        return [p.numel() for p in self.members.values()]

    def _weighted_sum(self, factors: Tensor) -> Tensor:
        """[n]; factors: as of `clipped_sum`."""
        if factors.size(0) == 1:
            return weighted_sum(self.grads, factors[0])
        sizes = self._sizes()
        if self.grads.numel() > FEW:
            parts = zip(self.grads.split(sizes, 1), factors, strict=True)
            return torch.cat([weighted_sum(part, own) for part, own in parts])
        lengths = index(tuple(sizes), factors.device)
        each = factors.repeat_interleave(lengths, 0, output_size=sum(sizes)).T  # [B, n]
        return torch.where(each == 0, 0, self.grads * each).sum(0)

    def clipped_sum(self, factors: Tensor, last: bool = False) -> dict[int, Tensor]:
        """{id(parameter): sum_b factors_b gradient_b}, each in memory of its own: they become `.grad`, which users may
        save (with all of its storage) or resize. factors: [members, B], or [1, B] for all."""
        total = self._weighted_sum(factors.to(self.grads.device))
        sizes = self._sizes()
        parts: tuple[Tensor, ...] = torch.split_with_sizes_copy(total, sizes)  # type: ignore[assignment, func-returns-value]
        found = dict(zip(self.members, parts, strict=True))
        for key, p in self.members.items():
            if p.dim() != 1 or p.device != total.device:
                found[key] = found[key].view(p.shape).to(p.device)
        return found


class Abreast:
    """Uses of equal shape, each of a parameter of its own (`ParameterUse.abreast`)."""

    def __init__(
        self, parameters: Sequence[Tensor], one: ParameterUse | GroupedKernels, clock: Clock | None = None
    ) -> None:
        self.members = {id(parameter): parameter for parameter in parameters}
        self.one, self.clock = one, clock

    @classmethod
    def of(cls, members: Sequence[tuple[Tensor, ParameterUse]]) -> Abreast:
        """Made of parameters, each with its one use."""
        first, *others = [use for _, use in members]
        return cls([parameter for parameter, _ in members], first.abreast(others), _shared_clock(members))

    def norms_sq(self, several: bool) -> Tensor:
        """As `Bundle.norms_sq`."""
        found = self.one.norm_sq().double().view(len(self.members), -1)
        return found if several else found.sum(0, keepdim=True)

    @property
    def lets_go(self) -> bool:
        """Whether the data of each member goes with its sum, if that is the last that is asked for."""
        return isinstance(self.one, GroupedKernels)

    def clipped_sum(self, factors: Tensor, last: bool = False) -> dict[int, Tensor]:
        """As `Bundle.clipped_sum`."""
        one, factors = self.one, factors.to(self.one.operand.device)
        if isinstance(one, GroupedKernels):
            same = factors.size(0) == 1
            sums = one.sums_abreast(factors[0] if same else factors, last)
            return dict(zip(self.members, sums, strict=True))
        total = one.sums_abreast(len(self.members), factors.flatten())
        parts: tuple[Tensor, ...] = torch.unbind_copy(total)  # type: ignore[assignment, func-returns-value]
        return dict(zip(self.members, parts, strict=True))


@functools.lru_cache(256)
def index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Whole numbers on a device, which are copied there once."""
    return torch.tensor(numbers, device=device)


def rows_of(factors: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of factors [groups, B]; one of them if all are the same."""
    first = rows[0]
    if len({*rows}) == 1:
        return factors[first : first + 1]
    if list(rows) == list(range(first, first + len(rows))):
        return factors[first : first + len(rows)]
    return factors.index_select(0, index(tuple(rows), factors.device))


def sums_by_group(parts: Sequence[Tensor], rows: Sequence[int], count: int) -> Tensor:
    """The sum of the rows of each group, [count, B]; in the same order each time. rows: the group of each row of the
    parts [n, B]."""
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if count == 1:
        return whole.sum(0, keepdim=True)
    if list(rows) == list(range(count)):
        return whole
    members: list[list[int]] = [[] for _ in range(count)]
    for place, group in enumerate(rows):
        members[group].append(place)
    most = max(map(len, members))
    places = tuple(place for own in members for place in [*own, *[len(rows)] * (most - len(own))])
    whole = torch.cat([whole, whole.new_zeros(1, whole.size(1))])  # what fills up
    return whole.index_select(0, index(places, whole.device)).view(count, most, -1).sum(1)


def _shared_clock(members: Sequence[tuple[Tensor, ParameterUse]]) -> Clock | None:
    """One clock for all members, if they are measured."""
    if members[0][1].clock is None:
        return None
    clock = Clock(members[0][0].device, len(members))
    for _, use in members:
        use.clock = clock
    return clock


Found = tuple[type[Bundle] | type[Abreast], list[int]]


class Arrangement(NamedTuple):
    """How the gradients of some parameters are taken. Uses by their places among all uses.

    together: kinds of bundles, each with its parameters and their uses. apart: the other parameters with a use, and the
    uses of these. doubles: the parameters of float64, which may have been cast to float32 before their use.
    """

    together: list[tuple[type[Bundle] | type[Abreast], list[tuple[Tensor, int]]]]
    apart: list[Tensor]
    uses_apart: list[int]
    doubles: list[Tensor]


def arrangement(members: Sequence[tuple[Tensor, ParameterUse]]) -> list[Found]:
    """The bundles that can be made of parameters with one use each, by their places; the others are on their own."""
    kept = [place for place, (parameter, use) in enumerate(members) if is_small(use, parameter)]
    found: list[Found] = [(Bundle, kept)] if len(kept) > 1 else []
    groups: dict[Any, list[int]] = {}
    bundled = set(kept) if found else set()
    for place, (parameter, use) in enumerate(members):
        if (
            place not in bundled
            and use.operand is parameter
            and link_of(parameter) is None
            and (key := use.alike()) is not None
        ):
            groups.setdefault(key, []).append(place)
    return found + [(Abreast, group) for group in groups.values() if len(group) > 1]
