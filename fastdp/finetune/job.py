"""What the loop is given and what it gives back: the plan, the job, the outcome."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.utils.data import Dataset

from ..accounting import delta_problem
from ..errors import FastDPError


class FinetuneError(FastDPError):
    """A run cannot begin or go on: says why, and what to do. Shown to the user without a traceback."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that decides the guarantee and the trajectory; it cannot change between resumes.

    target_epsilon None: no budget (with noise_multiplier 0: training without privacy). seed: for experiments, not
    private. max_physical_batch_size may change, as may the intervals: what they were is recorded with each step.
    """

    noise_multiplier: float
    sample_rate: float  # of records; with groups, of groups
    expected_batch_size: float
    steps: int
    lr: float
    delta: float
    new_lr: float | None = None  # of parameters that are not pre-trained; None: lr
    target_epsilon: float | None = None
    max_grad_norm: float = 1.0
    clipping: str = "local"
    style: str = "flat"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_steps: int = 0
    accountant: str = "prv"
    seed: int | None = None
    max_records_per_group: int | None = None
    max_physical_batch_size: int | None = None
    checkpoint_steps: int | None = None  # a checkpoint every so many steps,
    checkpoint_seconds: float | None = 300.0  # or when so many seconds have passed

    def __post_init__(self) -> None:
        finite = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("noise_multiplier", "lr", "new_lr", "weight_decay", "warmup_steps"):
            if finite[name] is not None and not 0 <= finite[name] < math.inf:
                raise FinetuneError(f"{name} must be 0 or larger and finite, not {finite[name]!r}")
        if not 0 < self.sample_rate <= 1:
            raise FinetuneError(f"sample_rate must lie in (0, 1], not {self.sample_rate!r}")
        if not 0 < self.delta < 1:
            raise FinetuneError(f"delta must lie in (0, 1), not {self.delta!r}")
        if self.noise_multiplier and (problem := delta_problem(self.delta, self.samples, "sample")):
            raise FinetuneError(f"{problem}. Take a smaller delta")
        for name in ("steps", "max_records_per_group", "max_physical_batch_size", "checkpoint_steps"):
            value = finite[name]
            if (value is not None or name == "steps") and (not isinstance(value, int) or value < 1):
                raise FinetuneError(f"{name} must be a whole number of at least 1, not {value!r}")

    @property
    def samples(self) -> float:
        """How many records the rate is of; with groups, how many groups."""
        return self.expected_batch_size / self.sample_rate


FREE = ("max_physical_batch_size", "checkpoint_steps", "checkpoint_seconds")  # of the plan: may change on resuming

Log = Callable[[str, dict[str, Any]], None]


class Graphed(NamedTuple):
    """What replayed steps need.

    losses: (model, batch) -> [B]: the loss of each sample, of which `Job.loss` is the mean.
    example: (batch, size) -> `size` records of the data, collated to the shape of the batch; None if there are not two.
    """

    losses: Callable[[nn.Module, Any], Tensor]
    example: Callable[[Any, int], Any]


@dataclasses.dataclass
class Job:
    """A run.

    model: on its device, in the types it shall be trained in; what requires grad is trained.
    loss: (model, batch) -> scalar: the mean over the batch's samples of their own losses, none of which another
        sample may change. It is not called for a batch without samples.
    data: a map-style dataset; collate: list of items -> batch, on the CPU; to_device: moves a batch (default: tensors
        in tuples, lists and mappings go to the device of the model's first parameter).
    folder: of the run: holds `checkpoints/` and `journal.jsonl`; nothing else in it is touched.
    secret: the file of the keys; default: `<folder>.secret.key` beside the folder, never in it.
    evaluate: model -> metrics, in eval mode without gradients; every `evaluate_every` steps and at the end.
    log: called as log(kind, values) with the kinds
        "step"        step (made so far), steps, lr, epsilon, seconds (of this step), replayed (a repetition of a step
                      lost in a crash), and, of the training data and NOT covered by the guarantee: loss, samples,
                      nonfinite (samples left out so far)
        "evaluate"    step, epsilon and the metrics
        "checkpoint"  step, path, seconds
        "note"        text: one line for the user (a fallback, a smaller batch, lost steps)
    fingerprint: what must be the same when a run is resumed (the data's digest, the model's name, columns): JSON. It is
        kept with the secret only, as a digest of data can tell whether a record is in it.
    group_by: a key for every record of `data` (a person): the records of one form one sample.
    keep_physical: a resumed run keeps the physical batch size it had, whatever the plan now says, so that it is the run
        that would have been; False where the user chose another.
    new: names of the parameters that are not pre-trained and learn at `new_lr`.
    length: index -> a number that grows with the memory of the record (tokens); to find the physical batch size.
    graphed: to replay forward and backward (`optimizer.graphed`); batches are dicts of tensors then.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    data: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    plan: Plan
    folder: Path
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    evaluate_every: int | None = None
    log: Log | None = None
    fingerprint: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    to_device: Callable[[Any], Any] | None = None
    secret: Path | None = None
    group_by: Sequence[Hashable] | None = None
    length: Callable[[int], int] | None = None
    new: Collection[str] = ()
    keep_physical: bool = True
    graphed: Graphed | None = None


@dataclasses.dataclass
class Outcome:
    """How a run ended; the model holds the weights.

    status: "finished" (all steps made), "interrupted" (saved; can be resumed), or "budget" (no step more fits the
        budget: steps lost in a crash took part of it).
    steps: that led to the weights. lost_steps: noised steps that did not, but are in epsilon.
    history: one dict for each evaluation ({"step", "epsilon", **metrics}).
    nonfinite: samples left out because their gradient was not finite (not covered by the guarantee).
    """

    status: Literal["finished", "interrupted", "budget"]
    steps: int
    epsilon: float
    history: list[dict[str, float]]
    lost_steps: int = 0
    nonfinite: int = 0
