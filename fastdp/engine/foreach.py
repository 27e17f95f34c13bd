"""Takes small gradients of many parameters together, in a few operations instead of hundreds.

What is kept of biases and norm layers becomes one matrix; products and convolutions of equal shape become one.
"""

from __future__ import annotations

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
        """Of these parameters, each with its one use."""
        rows = [use.grads.reshape(use.batch, -1) for _, use in members if isinstance(use, Stored)]
        grads = torch.cat([r.to(rows[0].device) for r in rows], 1)
        return cls([parameter for parameter, _ in members], grads, _shared_clock(members))

    def norm_sq(self) -> Tensor:
        """[B] float64, all members together."""
        return square_sum(self.grads)

    def clipped_sum(self, factors: Tensor, last: bool = False) -> dict[int, Tensor]:
        """{id(parameter): sum_b factors_b gradient_b}, each in memory of its own: they become `.grad`, which users may
        save (with all of its storage) or resize."""
        total = weighted_sum(self.grads, factors.to(self.grads.device))
        sizes = [p.numel() for p in self.members.values()]
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
        """Of these parameters, each with its one use."""
        first, *others = [use for _, use in members]
        return cls([parameter for parameter, _ in members], first.abreast(others), _shared_clock(members))

    def norm_sq(self) -> Tensor:
        """[B] float64, all members together."""
        found = self.one.norm_sq()
        return found.double().view(len(self.members), -1).sum(0)

    @property
    def lets_go(self) -> bool:
        """Whether the data of each member goes with its sum, if that is the last that is asked for."""
        return isinstance(self.one, GroupedKernels)

    def clipped_sum(self, factors: Tensor, last: bool = False) -> dict[int, Tensor]:
        """As of `Bundle`."""
        one, factors = self.one, factors.to(self.one.operand.device)
        if isinstance(one, GroupedKernels):
            return dict(zip(self.members, one.sums_abreast(len(self.members), factors, last), strict=True))
        total = one.sums_abreast(len(self.members), factors)
        parts: tuple[Tensor, ...] = torch.unbind_copy(total)  # type: ignore[assignment, func-returns-value]
        return dict(zip(self.members, parts, strict=True))


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
