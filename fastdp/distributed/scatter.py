"""Reduce-scatters clipped sums of whole parameters to the processes that hold their shards.

A group's sums make one collective, as they do in fully_shard, or share one with the next group's (`ends`). A large sum
that is cut as it lies is read where it lies: nothing is copied. Small ones, and those of parameters whose size the
number of processes does not divide, are laid into one buffer for each collective, and freed. The collective runs while
the next sums are taken; no more is held at once than two neighbouring groups' sums, of those so far that have the
most, and some buckets (what backward has kept is dropped group by group, so that later is cheaper).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.common import sum_type
from .reduce import ALIGNED, BUCKET
from .shards import Part

LARGE = 1 << 20  # bytes of a sum that is worth an operation of its own within the collective

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13


class Piece(NamedTuple):
    """What one operation of a collective reads, and what it gives this process."""

    members: list[tuple[Tensor, Part]]  # the whole parameters whose sums these are
    by_rank: Tensor  # [ranks, elements of a share]
    share: Tensor


class Scatter:
    """The sums of one backward: `put` those of a group, in the same order on every process; `done` gives the parts."""

    def __init__(self) -> None:
        self._waiting: tuple[list[Any], list[Piece]] = [], []  # works, and what they read and give
        self._group: Any = None  # of those that no collective has taken yet
        self._members: list[tuple[Tensor, Part]] = []
        self._sums: dict[int, Tensor] = {}
        self.found: dict[int, Tensor] = {}  # this process's part of each sum, by the id of the whole parameter

    def put(
        self, group: Any, members: Sequence[tuple[Tensor, Part]], sums: MutableMapping[int, Tensor], end: bool
    ) -> None:
        """sums: of the wholes among the members, by id, which are taken out; zero where there is none.
        group: a process group. end: whether the collective ends with these."""
        if group is not self._group:
            self._send()
        self._group = group
        self._members += members
        self._sums.update(sums)
        sums.clear()
        if end:
            self._send()

    def _send(self) -> None:
        members, sums, pieces = self._members, self._sums, list[Piece]()
        self._members, self._sums = [], {}
        for kind in (torch.float32, torch.float64):
            own = [(w, p) for w, p in members if sum_type(w) == kind]
            large = [(w, p) for w, p in own if not _laid(w, p)]
            pieces += [_piece([member], _as_it_lies(*member, sums, kind)) for member in large]
            apart = {id(whole) for whole, _ in large}
            if small := [(w, p) for w, p in own if id(w) not in apart]:
                pieces.append(_piece(small, _laid_out(small, sums, kind)))
        works = _begin(self._group, pieces)
        self._settle()
        self._waiting = works, pieces

    def _settle(self) -> None:
        works, pieces = self._waiting
        self._waiting = [], []
        for work in works:
            work.wait()
        for members, _, share in pieces:
            start = 0
            for whole, part in members:
                self.found[id(whole)] = part.own(share[start : start + part.padded])
                start += _aligned(part)

    def done(self) -> dict[int, Tensor]:
        self._send()
        self._settle()
        return self.found


def ends(groups: Sequence[Sequence[tuple[Tensor, Part]]]) -> list[bool]:
    """Whether a collective ends with each group's sums: small groups (LoRA) share one until they fill a bucket, others
    where no more is held at once than was before, if each had its own, but for a bucket. It follows from the model
    alone."""
    sizes = [[sum(bytes_of(*member) for member in members) for bytes_of in (_size, _laid)] for members in groups]
    alone = [last + size + laid for (last, _), (size, laid) in zip([(0, 0), *sizes], sizes, strict=False)]
    limits = [BUCKET + most for most in itertools.accumulate(alone, max)]
    sent, collected, copied = 0, 0, 0  # bytes of the collective that runs, and of the next one

    def fit(number: int, held: int) -> bool:
        """Whether the sums of a group may be taken beside these bytes."""
        return number >= len(sizes) or held + sum(sizes[number]) <= limits[number]

    found = list[bool]()
    for number, (size, laid) in enumerate(sizes[:-1], 1):
        collected, copied, next_ = collected + size, copied + laid, sizes[number][0]
        small = max(collected, next_) < BUCKET
        found.append(not (small or fit(number, sent + collected + copied) and fit(number + 1, collected + next_)))
        if found[-1]:
            sent, collected, copied = collected, 0, 0
    return [*found, True]


def _size(whole: Tensor, part: Part) -> int:
    """Bytes of a sum."""
    return whole.numel() * sum_type(whole).itemsize


def _laid(whole: Tensor, part: Part) -> int:
    """Bytes that are laid out beside a sum before the collective begins."""
    size = _size(whole, part)
    return 0 if size >= LARGE and part.even else size


def _piece(members: list[tuple[Tensor, Part]], by_rank: Tensor) -> Piece:
    alone = by_rank.size(0) == 1
    return Piece(members, by_rank, by_rank.view(-1) if alone else by_rank.new_empty(by_rank.size(1)))


def _as_it_lies(whole: Tensor, part: Part, sums: MutableMapping[int, Tensor], kind: torch.dtype) -> Tensor:
    """[ranks, elements of a share]."""
    total = sums.pop(id(whole), None)
    flat = torch.zeros(whole.numel(), dtype=kind, device=whole.device) if total is None else total
    return flat.to(kind).contiguous().view(part.ranks, -1)


def _laid_out(members: Sequence[tuple[Tensor, Part]], sums: MutableMapping[int, Tensor], kind: torch.dtype) -> Tensor:
    """[ranks, elements of a share]. Each sum is freed once it is copied."""
    ranks, size = members[0][1].ranks, sum(_aligned(part) for _, part in members)
    laid = torch.zeros(ranks, size, dtype=kind, device=members[0][0].device)
    start = 0
    for whole, part in members:
        total = sums.pop(id(whole), None)
        if total is not None:
            part.cut(total, laid[:, start : start + part.padded])
        start += _aligned(part)
    return laid


def _begin(group: Any, pieces: Sequence[Piece]) -> list[Any]:
    """One collective for each type of numbers and device, of as many operations as there are pieces: NCCL launches them
    as one."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Piece]] = {}
    for piece in pieces:
        if piece.by_rank.size(0) > 1:
            by_kind.setdefault((piece.share.dtype, piece.share.device), []).append(piece)
    return [_reduced(group, [p.share for p in own], [p.by_rank.view(-1) for p in own]) for own in by_kind.values()]


def _reduced(group: Any, shares: list[Tensor], sums: list[Tensor]) -> Any:
    if len(shares) == 1:
        return _reduce_scatter(shares[0], sums[0], group=group, async_op=True)
    call = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    options = dist.ReduceScatterOptions()
    options.asyncOp = True
    return call(shares, sums, options)


def _aligned(part: Part) -> int:
    """Elements from the begin of one share to that of the next."""
    return -(-part.padded // ALIGNED) * ALIGNED


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
