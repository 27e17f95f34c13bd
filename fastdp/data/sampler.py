"""The draw of Poisson samples: which records are in which logical batch, and how each is cut into physical batches."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from ..accounting.participation import Participation
from ..accounting.used_draws import BY_SEED
from ..batch_axis.row_groups import People
from ..distributed.fingerprints import mark
from .grouping import Grouping
from .skipped_batches import mark_of_key

Part = tuple[list[int], People | None]  # the records of a physical batch, and whose they are


class PoissonSampler(Sampler[list[int]]):
    """Lists of indices, one per physical batch. `pending` says, in order, which of them end a logical batch.

    The draw is a function of (key, pass, step) alone, so a run can resume at any step, whatever was fetched ahead.
    Every iteration is a separate pass; no two passes draw the same batches. With a `share` (rank, ranks), the draw is
    the same, and each rank gets its part of it, in as many physical batches as every other rank.
    """

    secret = True  # whether the draws must be
    views = 1  # of each record, one after the other

    def __init__(
        self,
        size: int,
        sample_rate: float,
        steps: int,
        max_physical_batch_size: int | None,
        seed: int | None,
        grouping: Grouping | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        self.size, self.sample_rate, self.steps = size, sample_rate, steps  # size: of samples
        self.grouping, self.largest = grouping, max_batch_size
        self.limit = max_physical_batch_size
        self.seed, self.key = seed, secrets.randbits(256) if seed is None else seed
        self.share, self.dealt = (0, 1), False
        self.passes, self.first = 0, 0  # passes begun, and the step at which the next one begins
        self.pending: deque[tuple[int, bool, People | None, int]] = deque()  # of the pass begun last
        self.running = (0, 0)  # of the pass begun last: its number, and its first step

    def __len__(self) -> int:
        return self.steps

    @property
    def seeded(self) -> bool:
        """Whether batches that should be secret are drawn by a seed."""
        return self.seed is not None and self.secret

    @property
    def participation(self) -> Participation | None:
        """As of a PhysicalBatch."""
        return None

    @property
    def settings(self) -> str:
        """A mark of what the draws depend on beside the key."""
        grouping = self.grouping
        groups: Any = None if grouping is None else (grouping.cap, grouping.mark)
        return mark(self.size, self.sample_rate, self.steps, self.limit, self.largest, groups)

    @property
    def mark(self) -> str:
        """A mark of the key, and of what else the draws depend on."""
        return (BY_SEED if self.seeded else "") + mark(mark_of_key(self.key), self.settings)

    def __iter__(self) -> Iterator[list[int]]:
        pending = self.pending = deque()  # a queue of its own for every pass
        place, first = self.running = (self.passes, self.first)
        self.passes, self.first = self.passes + 1, 0
        for step in range(first, self.steps):
            draw = np.random.default_rng(np.random.SeedSequence(self.key, spawn_key=(place, step)))
            parts, whole = self._mine(self.chosen(place, step, draw), draw)
            for number, (part, people) in enumerate(parts):
                pending.append((len(part), number == len(parts) - 1, people, whole))
                yield [record for record in part for _ in range(self.views)]

    def chosen(self, number: int, step: int, draw: np.random.Generator) -> list[int]:
        """The samples of a logical batch, of all ranks; number: of the pass; draw: the random numbers of this step."""
        chosen: list[int] = np.flatnonzero(draw.random(self.size) < self.sample_rate).tolist()
        if self.largest is not None and len(chosen) > self.largest:
            chosen = sorted(draw.choice(chosen, self.largest, replace=False).tolist())
        return chosen

    def _mine(self, chosen: list[int], draw: np.random.Generator) -> tuple[list[Part], int]:
        """This rank's physical batches, and the number of records of all ranks.

        There is at least one batch, and as many as every rank has, so the last may be empty.
        """
        rank, ranks = self.share
        if self.grouping is None:
            mine, largest = chosen[rank::ranks], len(chosen[::ranks])
            limit = self.limit or max(largest, 1)
            count = max(1, math.ceil(largest / limit))
            return [(mine[i * limit : (i + 1) * limit], None) for i in range(count)], len(chosen)
        records = self.grouping.records(chosen, draw)  # of all ranks: the caps are drawn one after the other
        shares = [self.grouping.parts(share, self.limit) for share in self.grouping.shares(records, ranks)]
        parts = shares[rank] + [[] for _ in range(max(map(len, shares)) - len(shares[rank]))]
        found: list[Part] = [
            ([r for own in part for r in own], People.of_counts([len(own) for own in part])) for part in parts
        ]
        return found, sum(map(len, records))
