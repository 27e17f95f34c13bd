"""Norms and clipped sums taken within backward, for parameter groups that are clipped separately.

If each layer has a clipping norm of its own, its factors need no other layer's norms. As soon as the last use of a
layer's parameters has arrived, its norms and sums are taken, and its inputs and output gradients are dropped. What
never becomes complete waits for the end of backward, as under flat clipping.

Source: group-wise clipping within backward, He et al. 2023 (arXiv 2212.01539), where a layer is used once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import StepError
from ..grad_sample.parameter_links import leaves_of
from ..grad_sample.parameter_use import ParameterUse
from ..grad_sample.planner import Planner
from ..ops.common import exactly
from .explain import Plan
from .forward_record import ForwardRecord
from .gradients import Gradients, check_unwritten

UsesOf = Mapping[int, Sequence[object]]  # what captured calls used of each parameter, by its id


class ByGroup(Protocol):
    """How groups of parameters are clipped apart."""

    def groups(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of each group; none if the factors of one group need the norms of others."""

    def factors(self, number: int, norm_sq: Tensor) -> Tensor:
        """The factors [B] of a group by its squared norms [B]."""


class Taken(NamedTuple):
    """What is left of a group."""

    parameters: Sequence[Tensor]
    norm_sq: Tensor  # [B]
    sums: dict[int, Tensor]
    plan: Plan

    def holds(self) -> tuple[Tensor, ...]:
        return (self.norm_sq, *self.sums.values())


class LayerwiseSums:
    """The groups of one backward.

    uses_of: of the forwards that it goes through, complete. before: the plans of the backward before.
    """

    def __init__(
        self, by_group: ByGroup, groups: Sequence[Sequence[Tensor]], uses_of: UsesOf, planner: Planner, mean: bool,
        before: Mapping[int, Plan],
    ) -> None:  # fmt: skip
        self._by_group, self._groups, self._mean = by_group, groups, mean
        self._planner, self._before = planner, before
        self._group_of = {id(p): number for number, group in enumerate(self._groups) for p in group}
        self._expected = [sum(len(uses_of.get(id(p), ())) for p in group) for group in self._groups]
        self._waiting: dict[int, list[int]] = {}  # places of the uses that arrived
        self._split: set[int] = set()  # groups that share an operand with others
        self.taken: dict[int, Taken] = {}

    def recorded(self, tape: ForwardRecord, use: ParameterUse) -> None:
        """The last use on the tape arrived: take its group if that is complete."""
        try:
            number = self._complete(use, len(tape.uses) - 1)
            if number is None or tape.people is not None or not tape.streams.one():
                return
            places = self._waiting[number]
            uses = [found for place in places if (found := tape.uses[place]) is not None]
            check_unwritten(uses, [tape.versions[place] for place in places])
            assert tape.batch is not None
            tape.streams.replace(uses, self._take(number, uses, tape.batch))
        except Exception:
            tape.failed = True
            raise
        for place in places:
            tape.uses[place], tape.versions[place] = None, 0

    def _complete(self, use: ParameterUse, place: int) -> int | None:
        """The number of a use's group if no other use of it is to come."""
        numbers = [self._group_of.get(id(leaf)) for leaf in leaves_of(use.operand)]
        for number in numbers:
            if number in self.taken:
                raise StepError(
                    f"{use.name}() uses a parameter whose norms were taken already, since its last use seemed to have "
                    "arrived: this backward is dropped. Give style= as a list of groups, whose norms are taken at the "
                    "end of backward"
                )
        number = numbers[0]
        if number is None:
            return None
        if any(other != number for other in numbers):
            self._split |= {other for other in numbers if other is not None}
        waiting = self._waiting.setdefault(number, [])
        waiting.append(place)
        self._expected[number] -= len(numbers)
        return number if self._expected[number] == 0 and number not in self._split else None

    def _take(self, number: int, uses: Sequence[ParameterUse], batch: int) -> Taken:
        """Norms and sums of a group, from all its uses in the order of their arrival."""
        parameters = self._groups[number]
        with torch.no_grad(), exactly():
            gradients = Gradients(
                uses, batch, float(batch) if self._mean else 1.0, uses[0].operand.device, self._planner
            )
            norm_sq = gradients.norm_sq(parameters)
            factors = self._by_group.factors(number, norm_sq)
            plan = Plan(gradients, self._before.get(number))
            sums = gradients.clipped_sum(factors, parameters)
        self.taken[number] = Taken(parameters, norm_sq, sums, plan)
        return self.taken[number]
