"""Norms and clipped sums taken within backward, for parameter groups that are clipped separately.

If each layer has a clipping norm of its own, its factors need no other layer's norms. Once the last use of a layer's
parameters has arrived, it is ready: its norms and sums can be taken, and its inputs and output gradients dropped.
Layers that are ready wait for each other up to some bytes (`window`), and are taken together: many small ones cost few
calls. What never becomes ready, or still waits, is taken at the end of backward, as under flat clipping.

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

WINDOW = 64 << 20  # bytes of inputs and output gradients, on the CPU
SHARE = 128  # of a GPU's memory: one of so many parts
UsesOf = Mapping[int, Sequence[object]]  # what captured calls used of each parameter, by its id


def window(device: torch.device) -> int:
    """For how many bytes layers that are ready wait."""
    if device.type != "cuda":
        return WINDOW
    return max(WINDOW, torch.cuda.get_device_properties(device).total_memory // SHARE)


class ByGroup(Protocol):
    """How groups of parameters are clipped apart."""

    def groups(self) -> Sequence[Sequence[Tensor]]:
        """The parameters of each group; none if the factors of one group need the norms of others."""

    def factors(self, numbers: Sequence[int], norm_sq: Tensor) -> Tensor:
        """The factors of groups by their squared norms, both [groups, B]."""


class Taken(NamedTuple):
    """What is left of a group. sums, plan: of all groups that were taken together, in the first of them."""

    parameters: Sequence[Tensor]
    norm_sq: Tensor  # [B]
    sums: dict[int, Tensor]
    plan: Plan | None

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
        self._ready: list[int] = []
        self._bytes = 0  # that these hold
        self.taken: dict[int, Taken] = {}

    def recorded(self, tape: ForwardRecord, use: ParameterUse) -> None:
        """The last use on the tape arrived: take the groups that are ready if they hold enough."""
        try:
            number = self._complete(use, len(tape.uses) - 1)
            if number is None or tape.people is not None:
                return
            self._ready.append(number)
            self._bytes += sum(t.nbytes for use in self._uses(tape, [number]) for t in use.data())
            if self._bytes <= window(use.operand.device) or not tape.streams.one():
                return
            uses = self._uses(tape, self._ready)
            places = [place for number in self._ready for place in self._waiting[number]]
            check_unwritten(uses, [tape.versions[place] for place in places])
            assert tape.batch is not None
            tape.streams.replace(uses, self._take(self._ready, uses, tape.batch))
            self._ready, self._bytes = [], 0
        except Exception:
            tape.failed = True
            raise
        tape.calls = None  # the next backward is to be recorded use by use, too
        for place in places:
            tape.uses[place], tape.versions[place] = None, 0

    def _uses(self, tape: ForwardRecord, numbers: Sequence[int]) -> list[ParameterUse]:
        """The uses of these groups, group by group, in the order in which they arrived."""
        places = [place for number in numbers for place in self._waiting[number]]
        return [use for place in places if (use := tape.uses[place]) is not None]

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

    def _take(self, numbers: Sequence[int], uses: Sequence[ParameterUse], batch: int) -> Taken:
        """Norms and sums of groups, from all their uses; returns what is left of the first."""
        groups = [self._groups[number] for number in numbers]
        with torch.no_grad(), exactly():
            gradients = Gradients(
                uses, batch, float(batch) if self._mean else 1.0, uses[0].operand.device, self._planner
            )
            norm_sq = gradients.norms_sq(groups)
            factors = self._by_group.factors(numbers, norm_sq)
            plan = Plan(gradients, self._before.get(numbers[0]))
            sums = gradients.clipped_sums(factors, groups)
        for number, group, own in zip(numbers, groups, norm_sq, strict=True):
            self.taken[number] = Taken(group, own, {}, None)
        first = self.taken[numbers[0]] = self.taken[numbers[0]]._replace(sums=sums, plan=plan)
        return first
