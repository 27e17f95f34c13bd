"""The clipped sums of a backward, and what of them this process holds until the step: all, or its parts.

The sums of a sharded model are cut and added up over the processes at the end of every backward, as the whole sums of
all parameters would not fit. All processes agree before that, also on which parameters must be gathered once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..batch_axis.deferred_checks import DeferredCheck
from ..distributed.reduce import riding
from ..distributed.scatter import Scatter, buckets_of, ends
from ..distributed.sharded import Group, Sharded
from ..distributed.shards import Box, Part
from ..distributed.world import World
from ..engine.gradients import Gradients
from ..engine.layerwise import Taken
from ..engine.parameter_reads import readings
from ..engine.tracked_parameters import Shards
from ..grad_sample.checkpoint_regions import module_of
from ..ops.noise import Noise
from .fused_update import Release

GroupParameters = Sequence[Sequence[Tensor]]  # the parameters of each clipping group
DROPPED = -2  # by which key sums count the samples whose gradient is not finite
Share = tuple[Any, dict[int, Tensor]]  # a process group (None: of all that train), and what is added up over it


class Clips(Protocol):
    """What makes clip factors of norms: `Clipping`, perhaps."""

    def factors(self, norm_sq: Sequence[Tensor]) -> list[Tensor]:
        """The clip factors [B] of each clipping group, of these squared norms."""


class Sums:
    """Of a model that is whole on this process."""

    def begin(self, gradients: Gradients, members: GroupParameters, said: Mapping[str, object]) -> None:
        """A backward has ended. said: what it is, the same on every process."""

    def norm_sq(self, gradients: Gradients, members: GroupParameters) -> list[Tensor]:
        """Squared norms [B] of each clipping group."""
        taken = gradients.taken
        others = iter(gradients.norms_sq([p for k, p in enumerate(members) if k not in taken]).unbind())
        return [taken[k].norm_sq.to(gradients.device) if k in taken else next(others) for k in range(len(members))]

    def factors(self, clipping: Clips, norm_sq: Sequence[Tensor]) -> list[Tensor]:
        """The clip factors [B] of each clipping group."""
        return clipping.factors(norm_sq)

    def clipped(
        self, gradients: Gradients, members: GroupParameters, factors: Sequence[Tensor], numbers: dict[int, Tensor]
    ) -> list[dict[int, Tensor]]:
        """What this process holds of the clipped sums, by the ids of the tracked parameters, and of these numbers,
        which are added up over the processes as the sums are: by keys below 0, whole or half ones."""
        taken: Mapping[int, Taken] = gradients.taken
        others = [(p, c) for k, (p, c) in enumerate(zip(members, factors, strict=True)) if k not in taken]
        found = [each.sums for each in taken.values()]
        if others:
            c = torch.stack([own for _, own in others])
            found.append(gradients.clipped_sums(c, [p for p, _ in others], not gradients.watched))
        return [*found, numbers]

    def held(
        self, named: Mapping[str, Tensor], found: Mapping[int, Tensor], offsets: Mapping[str, int]
    ) -> tuple[dict[int, Tensor], dict[int, int]]:
        """What is held of every trained parameter, zero where no sample used it, and the index of its first element;
        by the ids of what the optimizer updates."""
        sums, places = {}, {}
        for name, parameter in named.items():
            total = found.get(id(parameter))
            sums[id(parameter)] = (_zeros(parameter, parameter.shape) if total is None else total).contiguous()
            places[id(parameter)] = offsets[name]
        return sums, places

    def shares(self, sums: dict[int, Tensor]) -> list[Share]:
        """Over whom these are to be added up at the step; all ids come up once."""
        return [(None, sums)]

    def settled(self, sums: dict[int, Tensor]) -> tuple[dict[int, Tensor], list[DeferredCheck]]:
        """The sums, once they were added up over all samples, as all processes that hold the same ones have them; and
        whether these had the same ones before."""
        return sums, []

    def release(
        self, sums: dict[int, Tensor], places: dict[int, int], noise: Noise, std: float, scale: float
    ) -> Release:
        """Of what this process holds."""
        return Release(sums, places, noise, std, scale)

    def with_wholes(self, style: Any) -> Any:
        """Clipping groups, with the tracked parameters in the place of what the user named."""
        return style


class ShardedSums(Sums):
    """Of a model whose parameters lie in parts on several processes.

    Others wait for this process's sums: an error on the way to them is raised at the end, and the sums are zero till
    then. No process makes a step of them, as the others hear of the error before.
    """

    def __init__(self, shards: Sharded, world: World) -> None:
        self._shards, self._world = shards, world
        self._problem: Exception | None = None
        self._needed: list[tuple[list[Group], list[Group]]] = []  # of each bucket: for its norms, and for its sums

    def _buckets(self, members: GroupParameters) -> list[tuple[Group | None, list[Tensor]]]:
        return list(buckets_of([p for group in members for p in group], self._shards.groups))

    @contextlib.contextmanager
    def _held_back(self) -> Iterator[None]:
        """An error within is raised at the end of the sums."""
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - raised by `clipped`
            self._problem = self._problem or problem

    def begin(self, gradients: Gradients, members: GroupParameters, said: Mapping[str, object]) -> None:
        self._problem = None
        buckets, groups = self._buckets(members), self._shards.groups
        bucket_of = {id(p): number for number, (_, own) in enumerate(buckets) for p in own}
        group_of = {id(p): number for number, group in enumerate(groups) for p in group.wholes}
        flags = torch.zeros(len(buckets), len(groups), dtype=torch.uint8)  # 1: for the sums, 2: for the norms, too
        for reading in readings(gradients):
            read = set(reading.leaves) if reading.block is None else self._wholes_in(reading.block.module)
            for function in reading.again:  # what another function than a module's reads is not known: all, then
                read |= self._wholes_in(module_of(function) or self._shards.model)
            columns = sorted({group_of[leaf] for leaf in read if leaf in group_of})
            for row in {bucket_of[leaf] for leaf in reading.leaves if leaf in bucket_of}:
                flags[row, columns] = flags[row, columns].clamp(min=1 if reading.block is not None else 2)
        if self._world.agree(said, int(flags.any())):
            flags = self._world.any_of(flags)
        self._needed = [
            ([groups[g] for g in range(len(groups)) if row[g] >= 2], [groups[g] for g in range(len(groups)) if row[g]])
            for row in flags.tolist()
        ]

    def _wholes_in(self, module: nn.Module) -> set[int]:
        return {id(self._shards.whole(p)) for p in module.parameters()}

    def norm_sq(self, gradients: Gradients, members: GroupParameters) -> list[Tensor]:
        found = [torch.zeros(gradients.batch, dtype=torch.float64, device=gradients.device) for _ in members]
        for (_, own), (needed, _) in zip(self._buckets(members), self._needed, strict=True):
            with self._at_hand(needed), self._held_back():
                places, parts = _among(members, own)
                for place, norms in zip(places, gradients.norms_sq(parts), strict=True):
                    found[place] += norms
        return found

    def factors(self, clipping: Clips, norm_sq: Sequence[Tensor]) -> list[Tensor]:
        with self._held_back():
            return clipping.factors(norm_sq)
        return [torch.zeros_like(squares, dtype=torch.float32) for squares in norm_sq]

    def clipped(
        self, gradients: Gradients, members: GroupParameters, factors: Sequence[Tensor], numbers: dict[int, Tensor]
    ) -> list[dict[int, Tensor]]:
        scatter, whole = Scatter(), dict[int, Tensor]()
        buckets = self._buckets(members)
        rows = self._rows(numbers, buckets[0][1][0])
        if rows is not None:  # with the first group's sums, which they have a collective in common with
            first = self._shards.groups[0]
            scatter.put(first.scatter, [(rows, Part(rows.shape, 0, first.rank, first.ranks))], {id(rows): rows}, False)
        placed = [[(p, place[1]) for p in own if (place := self._shards.place(p))] for _, own in buckets]
        for (group, own), (_, needed), its, end in zip(buckets, self._needed, placed, ends(placed), strict=True):
            sums: dict[int, Tensor] = {}
            with self._at_hand(needed), self._held_back():
                clipped, parts = _among(members, own)
                if self._problem is None:
                    c = torch.stack([factors[place] for place in clipped])
                    sums = gradients.clipped_sums(c, parts, not gradients.watched)
            if group is None:
                whole.update(sums)
                continue
            with self._world.exchanging():
                scatter.put(group.scatter, its, sums, end)
        with self._world.exchanging():
            found = {**scatter.done(), **whole}
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if rows is not None:
            numbers = dict(zip(numbers, found.pop(id(rows)).view(-1).split(1), strict=True))
        return [found, numbers]

    def _rows(self, numbers: dict[int, Tensor], like: Tensor) -> Tensor | None:
        """The numbers, once for each process of a group: every part of their sum is then the sum. None: they wait for
        the step."""
        if not numbers or not self._shards.are_alike:
            return None
        row = torch.cat([riding(number, like) for number in numbers.values()])
        return row.repeat(self._shards.groups[0].ranks, 1)

    def _at_hand(self, groups: list[Group]) -> contextlib.AbstractContextManager[None]:
        return self._shards.at_hand(groups) if groups else contextlib.nullcontext()

    def held(
        self, named: Mapping[str, Tensor], found: Mapping[int, Tensor], offsets: Mapping[str, int]
    ) -> tuple[dict[int, Tensor], dict[int, int]]:
        sums, places = {}, {}
        for name, parameter in named.items():
            place, total = self._shards.place(parameter), found.get(id(parameter))
            shape = parameter.shape if place is None else place[1].box.local_shape
            key = id(self._shards.part(parameter))
            sums[key] = (_zeros(parameter, shape) if total is None else total).contiguous()
            places[key] = offsets[name] + (0 if place is None else place[1].box.first)
        return sums, places

    def shares(self, sums: dict[int, Tensor]) -> list[Share]:
        """Parts were added up over those who hold other parts: what is left are those who hold the same ones."""
        copies: dict[int, Share] = {}
        numbers = {key: total for key, total in sums.items() if key < 0 and self._shards.are_alike}
        done = set(numbers)
        for group in self._shards.groups:
            keys = [key for whole in group.wholes if (key := id(self._shards.part(whole))) in sums]
            done.update(keys)
            if group.copies is not None and group.copy_count > 1 and (keys or numbers):
                mine = copies.setdefault(id(group.copies), (group.copies, {}))[1]
                mine.update({key: sums[key] for key in keys} | numbers)
        return [(None, {key: total for key, total in sums.items() if key not in done}), *copies.values()]

    def release(
        self, sums: dict[int, Tensor], places: dict[int, int], noise: Noise, std: float, scale: float
    ) -> Release:
        parts: dict[int, Box] = {}
        for group in self._shards.groups:
            for whole in group.wholes:
                place, key = self._shards.place(whole), id(self._shards.part(whole))
                if place is not None and key in sums:
                    parts[key] = place[1].box
        return Release(sums, places, noise, std, scale, parts)

    def with_wholes(self, style: Any) -> Any:
        return with_wholes(self._shards, style)


def with_wholes(shards: Shards, style: Any) -> Any:
    """Clipping groups, with the tracked parameters in the place of what the user named."""
    if isinstance(style, str) or not isinstance(style, Sequence):
        return style
    return [
        {**item, "params": [shards.whole(p) if isinstance(p, Tensor) else p for p in item["params"]]}
        if isinstance(item, Mapping) and isinstance(item.get("params"), list | tuple)
        else item
        for item in style
    ]


def _zeros(parameter: Tensor, shape: Sequence[int]) -> Tensor:
    kind = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(tuple(shape), dtype=kind, device=parameter.device)


def _among(members: GroupParameters, own: Sequence[Tensor]) -> tuple[list[int], list[list[Tensor]]]:
    """The places of the clipping groups that have some of these, and those."""
    wanted = set(map(id, own))
    found = {place: some for place, group in enumerate(members) if (some := [p for p in group if id(p) in wanted])}
    return [*found], [*found.values()]
