"""Norms and clipped sums of a model whose layers are split over processes (tensor parallelism).

Squares of split parameters add up over these processes, and those of copied ones count once: one all-reduce of numbers
for each sample gives every process the same factors. A split parameter's clipped sum stays where the parameter is. Of
copied ones all processes must have found the same: their squares are compared in the same message, as is what the
forwards were given, and their sums at the step, where all take the mean of them. Nobody waits for a device to know the
answers (`deferred_checks`): whatever they are, a sample's share in the mean is at most the root of the mean of its
squares, which is what its factor bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..batch_axis.deferred_checks import DeferredCheck
from ..distributed.reduce import Reduction
from ..distributed.sharded import Sharded
from ..distributed.tensor import TensorParallel
from ..distributed.world import World
from ..engine.gradients import Gradients
from ..errors import StepError
from ..ops.noise import Noise
from .clipped_sums import GroupParameters, ShardedSums, Share, Sums, with_wholes
from .fused_update import Release

_ALIKE = 1e-8  # of squared relative differences of norms, which are float64
_LOSSES = 1e-7  # of squared differences of outputs, and of their gradients, beside their squares
_ROUNDING = 1e-6  # of those of sums, which are float32
_APART = (
    "the processes that share the model's layers (tensor parallelism) {what}. Every one of them must have the same "
    "batch (deal samples over mesh['dp'] alone), and a parameter that is whole on each must meet the same data on "
    "each: one that meets a part of the sequence needs SequenceParallel, and dropout the same seed on each."
)


class TensorSums(Sums):
    """inner: of the same parameters as if they were all."""

    def __init__(self, split: TensorParallel, inner: Sums, world: World) -> None:
        self._split, self._inner, self._world = split, inner, world

    def begin(self, gradients: Gradients, members: GroupParameters, said: Mapping[str, object]) -> None:
        self._inner.begin(gradients, members, said)

    def norm_sq(self, gradients: Gradients, members: GroupParameters) -> list[Tensor]:
        split = [[p for p in group if not self._split.is_copied(p)] for group in members]
        copied = [[p for p in group if self._split.is_copied(p)] for group in members]
        found = torch.stack(self._inner.norm_sq(gradients, [*split, *copied]))  # [2 groups, B]
        own, same = found[: len(members)], found[len(members) :]
        given, arrived = self._split.take_lanes(), self._split.take_arrived()
        lanes = same.new_zeros(4) if given is None else given.to(same)
        told, sizes = (same.new_zeros(2, 2) if arrived is None else arrived.to(same)).unbind(1)
        beside = torch.cat([lanes, lanes.square(), told, told.square(), sizes])
        message = torch.cat([own.flatten(), same.flatten(), same.square().flatten(), beside])
        with self._world.exchanging():
            dist.all_reduce(message, group=self._split.group)
        n, count = self._split.size, own.numel()
        total, once, squares = message[: 3 * count].view(3, *own.shape)
        (lanes, of_lanes), (told, of_told, sizes) = message[3 * count : -6].view(2, 4), message[-6:].view(3, 2)
        outputs, grads = (n * of_told - told.square() > _LOSSES * n * sizes).unbind()
        gradients.doubts += [
            _apart("were given different batches", lanes, of_lanes, n),
            # outputs that differ are parts of one
            _doubt("have other losses of the same batch (other labels)", grads & ~outputs),
            _apart("found different norms of the parameters that are whole on each", once, squares, n),
        ]
        return list(total + once / n)

    def clipped(
        self, gradients: Gradients, members: GroupParameters, factors: Sequence[Tensor], numbers: dict[int, Tensor]
    ) -> list[dict[int, Tensor]]:
        return self._inner.clipped(gradients, members, factors, numbers)

    def held(
        self, named: Mapping[str, Tensor], found: Mapping[int, Tensor], offsets: Mapping[str, int]
    ) -> tuple[dict[int, Tensor], dict[int, int]]:
        sums, _ = self._inner.held(named, found, offsets)
        held, places = {}, {}
        for name, leaf in named.items():
            key, place = id(self._split.part(leaf)), self._split.place(leaf)
            total = sums.get(key, sums.get(id(leaf)))
            assert total is not None
            held[key], places[key] = total, offsets[name] + (0 if place is None else place.first)
        self._copied = [id(self._split.part(leaf)) for leaf in named.values() if self._split.is_copied(leaf)]
        self._leaves = list(named.values())
        return held, places

    def shares(self, sums: dict[int, Tensor]) -> list[Share]:
        return self._inner.shares(sums)

    def settled(self, sums: dict[int, Tensor]) -> tuple[dict[int, Tensor], list[DeferredCheck]]:
        own = {key: sums[key] for key in self._copied}
        if not own:
            return sums, []
        clones = [total.clone() for total in own.values()]
        means = [total / self._split.size for total in self._world.sums(Reduction(clones), group=self._split.group)]
        apart = sum((total - mean).square().sum() for total, mean in zip(own.values(), means, strict=True))
        size = sum(mean.square().sum() for mean in means)
        flag = torch.as_tensor(apart > _ROUNDING * size).to(torch.uint8)
        with self._world.exchanging():
            dist.all_reduce(flag, dist.ReduceOp.MAX)  # of all processes: each raises the error, or none
        what = "found different sums of the parameters that are whole on each"
        return sums | dict(zip(own, means, strict=True)), [
            DeferredCheck(flag.bool(), "", _APART.format(what=what), StepError)
        ]

    def release(
        self, sums: dict[int, Tensor], places: dict[int, int], noise: Noise, std: float, scale: float
    ) -> Release:
        parts = {
            id(self._split.part(leaf)): place for leaf in self._leaves if (place := self._split.place(leaf)) is not None
        }
        return Release(sums, places, noise, std, scale, parts)

    def with_wholes(self, style: Any) -> Any:
        return with_wholes(self._split, style)


def _apart(what: str, total: Tensor, squares: Tensor, count: int) -> DeferredCheck:
    """Whether numbers of which these are the sum, and the sum of squares, are not the same on so many processes."""
    return _doubt(what, ((count * squares - total.square()) > _ALIKE * total.square()).any())


def _doubt(what: str, differ: Tensor) -> DeferredCheck:
    return DeferredCheck(differ, "", _APART.format(what=what), StepError)


def sums_of(shards: Sharded | TensorParallel | None, world: World) -> Sums:
    """Of a model with these shards; None of a whole one."""
    if isinstance(shards, TensorParallel):
        return TensorSums(shards, Sums() if shards.sharded is None else ShardedSums(shards.sharded, world), world)
    return Sums() if shards is None else ShardedSums(shards, world)
