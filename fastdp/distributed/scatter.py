"""Clipped sums of whole parameters, cut and added up over the processes that hold the parts.

A large sum that is cut as it lies is what the collective reads: nothing is copied. Small ones, and those of parameters
whose size the number of processes does not divide, are laid into one buffer for each group of parameters. One
collective runs while the next sums are taken; what is held at once are the sums of two groups at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .parts import Part
from .reduce import ALIGNED

LARGE = 1 << 20  # bytes of a sum that is worth a collective of its own

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13

Waiting = tuple[Any, Tensor, list[tuple[Tensor, Part]], Tensor]  # work, shares, whose they are, what it reads


class Scatter:
    """The sums of one backward: `put` those of a group, in the same order on every process; `done` gives the parts."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []
        self.found: dict[int, Tensor] = {}  # this process's part of each sum, by the id of the whole parameter

    def put(self, group: Any, members: Sequence[tuple[Tensor, Part]], sums: Mapping[int, Tensor]) -> None:
        """sums: of the wholes among the members, by id; zero where there is none. group: a process group."""
        small: list[tuple[Tensor, Part]] = []
        begun: list[Waiting] = []
        for whole, part in members:
            total = sums.get(id(whole))
            kind = torch.float64 if whole.dtype == torch.float64 else torch.float32
            if whole.numel() * kind.itemsize < LARGE or not part.even:
                small.append((whole, part))
                continue
            flat = torch.zeros(whole.numel(), dtype=kind, device=whole.device) if total is None else total
            begun.append(_begin(group, flat.to(kind).contiguous().view(part.ranks, -1), [(whole, part)]))
        for kind in (torch.float32, torch.float64):
            own = [(w, p) for w, p in small if (w.dtype == torch.float64) == (kind == torch.float64)]
            if own:
                begun.append(_begin(group, _laid_out(own, sums, kind), own))
        self._settle()
        self._waiting = begun

    def _settle(self) -> None:
        while self._waiting:
            work, shares, members, _ = self._waiting.pop(0)
            if work is not None:
                work.wait()
            start = 0
            for whole, part in members:
                self.found[id(whole)] = part.own(shares[start : start + part.padded])
                start += _aligned(part)

    def done(self) -> dict[int, Tensor]:
        self._settle()
        return self.found


def _laid_out(members: Sequence[tuple[Tensor, Part]], sums: Mapping[int, Tensor], kind: torch.dtype) -> Tensor:
    """[ranks, elements of a share]."""
    ranks, size = members[0][1].ranks, sum(_aligned(part) for _, part in members)
    laid = torch.zeros(ranks, size, dtype=kind, device=members[0][0].device)
    start = 0
    for whole, part in members:
        total = sums.get(id(whole))
        if total is not None:
            part.cut(total, laid[:, start : start + part.padded])
        start += _aligned(part)
    return laid


def _aligned(part: Part) -> int:
    """Elements from the begin of one share to that of the next."""
    return -(-part.padded // ALIGNED) * ALIGNED


def _begin(group: Any, by_rank: Tensor, members: list[tuple[Tensor, Part]]) -> Waiting:
    if by_rank.size(0) == 1:
        return None, by_rank.view(-1), members, by_rank
    shares = by_rank.new_empty(by_rank.size(1))
    return _reduce_scatter(shares, by_rank.view(-1), group=group, async_op=True), shares, members, by_rank


def buckets_of(wholes: Sequence[Tensor], groups: Sequence[Any]) -> Iterator[tuple[Any, list[Tensor]]]:
    """(group, those of its parameters that are among these), the last group first; (None, the others) at the end.

    They follow from the model alone, never from what a process's samples used.
    """
    wanted = {id(whole) for whole in wholes}
    for group in reversed(groups):
        own = [whole for whole in group.wholes if id(whole) in wanted]
        wanted -= set(map(id, own))
        if own:
            yield group, own
    others = [whole for whole in wholes if id(whole) in wanted]
    if others:
        yield None, others
