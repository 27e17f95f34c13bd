"""What a run is planned to do, what it is made of, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import FastDPError

Losses = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> [B]: each sample's own loss


class FinetuneError(FastDPError):
    """A run cannot begin or go on: says why, and what to do. Shown to the user without a traceback."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that decides the guarantee and the trajectory. It cannot change between resumes, but for FREE.

    sample_rate and expected_batch_size are of records; with groups, of groups. new_lr is for parameters that are not
    pre-trained. seed is for experiments, and not private.
    """

    noise_multiplier: float
    sample_rate: float
    expected_batch_size: float
    steps: int
    lr: float
    delta: float
    new_lr: float
    target_epsilon: float
    max_grad_norm: float = 1.0
    clipping: str = "local"
    weight_decay: float = 0.0
    accountant: str = "prv"
    seed: int | None = None
    max_records_per_group: int | None = None
    max_physical_batch_size: int | None = None
    checkpoint_steps: int | None = None  # None: every five minutes

    def fixed(self) -> dict[str, Any]:
        """The fields that cannot change between resumes."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in FREE}


FREE = ("max_physical_batch_size", "checkpoint_steps")


class Graphed(NamedTuple):
    """What replayed steps need: example(batch, size) gives `size` records of the data, collated to the shape of the
    batch, or None if there are not two."""

    example: Callable[[Any, int], Any]


@dataclasses.dataclass
class Job:
    """What is trained on what.

    losses: each sample's own loss, which no other sample may change. data: a map-style dataset. collate: items to a
    batch, on the CPU. length: index -> a number that grows with the memory of the record. groups: the person of each
    record. fingerprint: what must be the same when the run is resumed. new: names of the parameters that learn at
    `new_lr`. keep_physical: whether a resumed run keeps its physical batch size, as dropout and rounding depend on it.
    """

    model: nn.Module
    losses: Losses
    data: Any
    collate: Callable[[list[Any]], Any]
    plan: Plan
    out: Path
    length: Callable[[int], int]
    groups: Sequence[Hashable] | None = None
    group_by: str | None = None
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    new: Collection[str] = ()
    keep_physical: bool = True
    graphed: Graphed | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the samples."""
        return self.losses(model, batch).mean()

    def batch(self, places: Sequence[int]) -> dict[str, Tensor]:
        """These records, collated, on the model's device."""
        found = self.collate([self.data[place] for place in places])
        return {name: value.to(self.device) for name, value in found.items()}


@dataclasses.dataclass
class Outcome:
    """How a run ended: "finished", "interrupted" (saved, and can be resumed), or "budget" (no further step fits, as
    steps lost in a crash took part of it). lost_steps did not lead to the weights, but are in epsilon."""

    status: Literal["finished", "interrupted", "budget"]
    steps: int
    epsilon: float
    lost_steps: int = 0
    nonfinite: int = 0
