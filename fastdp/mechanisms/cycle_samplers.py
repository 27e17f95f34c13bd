"""Samplers whose steps come in cycles, in each of which a record takes part at most once.

Correlated noise is accounted by the fewest steps between two that a record takes part in, or by a draw of where that
is, and not by Poisson samples of the whole dataset. Every batch is a function of (key, pass, step), as those of a
PoissonSampler are. A pass is made of whole cycles, so a step is at place `step % period` of its cycle in any pass.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from ..accounting import steps_per_epoch
from ..accounting.participation import Participation
from ..accounting.used_draws import IN_ORDER
from ..data.sampler import PoissonSampler
from ..distributed.fingerprints import mark

Numbers = npt.NDArray[np.int64]


class CycleSampler(PoissonSampler):
    """Lists of indices, one per physical batch.

    Args:
        order: the records.
        batch_size: how many a logical batch has, or is expected to have.
        period: the steps of a cycle.
        steps: those of a pass.
        limit: the largest number of records in a physical batch.
        seed: by which batches are drawn, if they are; None: by a key of the operating system's.
    """

    kind: str  # as of a Participation
    more: tuple[int, ...] = ()  # that the batches depend on
    records: str | None = None  # a mark of them; None: they are not known
    whose = ""  # that mark, or one of this sampler

    def __init__(
        self, order: Numbers, batch_size: float, period: int, steps: int, limit: int | None, seed: int | None
    ) -> None:
        super().__init__(len(order), batch_size / len(order), steps, limit, seed)
        self.order, self.batch_size, self.period = order, batch_size, period

    @functools.cached_property
    def settings(self) -> str:
        """A mark of what the batches depend on beside the key."""
        return mark(self.kind, self.order.tobytes(), self.batch_size, *self.more)

    def of(self, records: str | None) -> None:
        """The numbers are of these records, by a mark; None: which ones cannot be told, so no other loader has them."""
        self.records, self.whose = records, f" of {records}" if records else f"|{secrets.token_hex(8)}"

    def _promise(self, of: str, **changes: Any) -> Participation:
        return Participation(self.kind, self.period, self.period, mark=of + self.whose)._replace(**changes)

    @property
    def participation(self) -> Participation:
        """What holds of every record."""
        return self._promise(self.mark)


class FixedOrder(CycleSampler):
    """Batches of one size, in the same order in every pass; within groups of so many batches, dealt anew in each."""

    secret = False

    def __init__(self, order: Numbers, batch_size: int, limit: int | None, within: int = 1, seed: int = 0) -> None:
        steps = len(order) // batch_size
        super().__init__(order, batch_size, steps, steps, limit, seed)
        self.whole, self.within = batch_size, within
        self.kind, self.more = ("fixed order", ()) if within == 1 else ("separated", (within,))

    @property
    def mark(self) -> str:
        """A mark of the batches of all passes: nothing of them is secret."""
        return IN_ORDER + (self.settings if self.within == 1 else mark(self.settings, self.key))

    @property
    def participation(self) -> Participation:
        """A record stays in its group, so from one pass to the next it moves up by at most within - 1 steps."""
        return self._promise(self.mark, separation=self.steps - self.within + 1)

    def chosen(self, number: int, step: int, draw: np.random.Generator) -> list[int]:
        """The step's part of its group."""
        group, place = divmod(step, self.within)
        size = self.whole * self.within
        records = self.order[: self.steps * self.whole][group * size : (group + 1) * size]
        if self.within > 1:  # the same deal for all steps of the group
            deal = np.random.default_rng(np.random.SeedSequence(self.key, spawn_key=(number, group)))
            records = deal.permutation(records)
        return records[place * self.whole : (place + 1) * self.whole].tolist()


class CyclicPoisson(CycleSampler):
    """Poisson samples of one part of the records after the other; every period-th record of the order is of a part."""

    kind = "cyclic Poisson"

    def __init__(
        self, order: Numbers, batch_size: float, period: int, steps: int | None, limit: int | None, seed: int | None
    ) -> None:
        self.rate = min(1.0, batch_size * period / len(order))
        steps = period * steps_per_epoch(self.rate) if steps is None else steps
        super().__init__(order, batch_size, period, steps, limit, seed)
        self.more = (period,)

    @property
    def participation(self) -> Participation:
        """Every step samples anew, so a run may go on by another key: what must stay are the parts."""
        return self._promise(self.settings, rate=self.rate)

    def chosen(self, number: int, step: int, draw: np.random.Generator) -> list[int]:
        """A Poisson sample of the step's part."""
        part = self.order[step % self.period :: self.period]
        return part[draw.random(len(part)) < self.rate].tolist()


class BallsInBins(CycleSampler):
    """Each record is in a batch of its own, drawn once for all passes, uniformly."""

    kind = "balls in bins"

    def __init__(self, order: Numbers, bins: int, limit: int | None, seed: int | None) -> None:
        super().__init__(order, len(order) / bins, bins, bins, limit, seed)

    def chosen(self, number: int, step: int, draw: np.random.Generator) -> list[int]:
        """The records whose draw is this step. It is repeated at each: to keep it would be to keep it for each key."""
        deal = np.random.default_rng(np.random.SeedSequence(self.key))
        return self.order[deal.integers(self.period, size=self.size) == step].tolist()
