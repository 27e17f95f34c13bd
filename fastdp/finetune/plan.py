"""What a run is planned to do, what it is made of, and how it ended."""

from __future__ import annotations

import dataclasses
import math
import warnings
from argparse import Namespace
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..accounting import History, default_delta, delta_problem, epsilon_by, noise_multiplier_for, steps_per_epoch
from ..errors import AccountingError, ClippingError, FastDPError
from ..optim.adaptive_clipping import Quantile
from ..utils.formatting import at_most, count
from .options import default_batch
from .tasks import TASKS

NEW_LR = 5e-3  # of a new head: it has everything to learn, the weights below it little
WEAK_EPSILON, WEAK_DELTA = 10.0, 0.1  # the latter over the number of records


class FinetuneError(FastDPError):
    """A run cannot begin or go on: says why, and what to do. Shown to the user without a traceback."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that decides the guarantee and the trajectory: it cannot change between resumes.

    sample_rate and expected_batch_size are of records; with groups, of groups. new_lr is for parameters that are not
    pre-trained. seed is for experiments, and not private.
    """

    noise_multiplier: float
    sample_rate: float
    expected_batch_size: float
    steps: int
    lr: float
    new_lr: float
    delta: float
    target_epsilon: float
    max_grad_norm: float = 1.0
    clipping: str = "local"
    weight_decay: float = 0.0
    accountant: str = "prv"
    seed: int | None = None
    max_records_per_group: int | None = None

    def epsilon(self, steps: int) -> float:
        """What so many noised steps cost."""
        history: History = [(self.noise_multiplier, self.sample_rate, steps)] if steps else []
        return epsilon_by(history, self.delta, self.accountant)


@dataclasses.dataclass
class Job:
    """What is trained on what.

    losses: each sample's own loss, which no other sample may change. collate: items to a batch, on the CPU. lengths:
    numbers that grow with the memory of the record. groups: the person of each record. fingerprint: what must be the
    same when the run is resumed. new: names of the parameters that learn at `new_lr`. physical: samples at once.
    keep_physical: whether a resumed run keeps that number, as dropout and rounding depend on it.
    """

    options: Namespace
    plan: Plan
    model: nn.Module
    losses: Callable[[nn.Module, Any], Tensor]
    data: Any
    collate: Callable[[list[Any]], Any]
    lengths: Sequence[int]
    groups: Sequence[Hashable] | None = None
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    fingerprint: dict[str, str] = dataclasses.field(default_factory=dict)
    new: Collection[str] = ()
    physical: int | None = None
    keep_physical: bool = True

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the samples."""
        return self.losses(model, batch).mean()

    def batch(self, places: Sequence[int]) -> dict[str, Tensor]:
        """The records at these places, collated, on the model's device."""
        return self.collated([self.data[place] for place in places])

    def collated(self, records: list[Any]) -> dict[str, Tensor]:
        """These records as a batch on the model's device."""
        return {name: value.to(self.device) for name, value in self.collate(records).items()}


@dataclasses.dataclass
class Outcome:
    """How a run ended: "finished", "interrupted" (saved, and can be resumed), or "budget" (no further step fits, as
    steps lost in a crash took part). history: (noise multiplier, sample rate, steps) as the optimizer's ledger has
    them; those that did not lead to the weights are lost, but cost as much as the others."""

    status: Literal["finished", "interrupted", "budget"]
    steps: int
    history: list[tuple[float, float, int]]
    nonfinite: int = 0

    @property
    def lost_steps(self) -> int:
        return sum(run[2] for run in self.history) - self.steps


def make_plan(options: Namespace, units: int) -> Plan:
    """Sample rate, steps and noise of a budget. units: records, or persons. Raises FinetuneError if there is none."""
    batch = options.batch_size or default_batch(units)
    rate = batch / units
    steps = math.ceil(options.epochs * steps_per_epoch(rate))
    delta = options.delta if options.delta is not None else default_delta(units)
    if problem := delta_problem(delta, units, unit_of(options)):
        raise FinetuneError(f"{problem}. Leave --delta out for {default_delta(units):g}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            noise = noise_multiplier_for(target_epsilon=options.epsilon, delta=delta, sample_rate=rate, steps=steps,
                                         accountant=options.accountant)  # fmt: skip
        if options.clipping == "adaptive":
            Quantile().of_gradients(noise, batch)
    except AccountingError as problem:
        raise FinetuneError(f"epsilon {options.epsilon:g} cannot be reached: {problem}") from None
    except ClippingError:
        raise FinetuneError(
            f"--clipping adaptive counts with noise of {batch / 20:g}, a twentieth of the batch: too little beside "
            f"a noise multiplier of {noise:.3g}: give --batch-size {math.ceil(20 * noise)} or more, a larger "
            "--epsilon, or another --clipping"
        ) from None
    lr = options.lr or (3e-3 if options.lora or options.train_only else TASKS[options.task].lr)
    taken = ("max_grad_norm", "clipping", "weight_decay", "accountant", "seed", "max_records_per_group")
    return Plan(
        noise_multiplier=noise, sample_rate=rate, expected_batch_size=batch, steps=steps, lr=lr,
        new_lr=options.new_lr or max(lr, NEW_LR), delta=delta, target_epsilon=options.epsilon,
        **{name: getattr(options, name) for name in taken},
    )  # fmt: skip


def unit_of(options: Namespace) -> str:
    """What the guarantee is of."""
    return "person" if options.group_by else "record"


def weaknesses(epsilon: float, delta: float, units: int | None, unit: str) -> list[str]:
    """What is weak in a guarantee, each with what would be better. units: records, or persons; None: not known."""
    found = []
    if epsilon > WEAK_EPSILON:
        found.append(
            f"epsilon {at_most(epsilon, 4)} is above {WEAK_EPSILON:g}: it allows that a {unit} is recognised with near "
            "certainty. Aim at 8 or less, at 1 for a strong guarantee"
        )
    if units and delta * units > WEAK_DELTA * (1 + 1e-9):
        found.append(
            f"delta {delta:g} is large for {units:,} {unit}s: publishing each of them in full with this "
            f"probability would reveal {delta * units:.2g} on average. Aim at 1/(10 n) or less"
        )
    return found


def privacy_lines(plan: Plan, options: Namespace, units: int) -> list[str]:
    """The guarantee, the noise and the sampling, to say before the run."""
    unit, spent = unit_of(options), plan.epsilon(plan.steps)
    whence = "1/(10 n), rounded down" if options.delta is None else "as given"
    lines = [
        f"epsilon {at_most(spent, 4)} at delta {at_most(plan.delta, 6)} ({whence}), for one {unit} added or removed, "
        f"by the {plan.accountant.upper()} accountant",
        f"noise multiplier {plan.noise_multiplier:.3f}; clipping {plan.clipping}, norm {plan.max_grad_norm:g}",
        f"Poisson sampling: {plan.expected_batch_size:g} of {count(units)} {unit}s expected in a step (rate "
        f"{plan.sample_rate:.4g}); epochs: {options.epochs:g}, steps: {count(plan.steps)}",
    ]  # fmt: skip
    if plan.seed is not None:
        lines.append(
            f"--seed {plan.seed}: NO GUARANTEE. Whoever knows the seed can take the noise off; for experiments"
        )
    if plan.accountant == "gdp":
        lines.append("gdp is an approximation, and no upper bound on epsilon: prv is")
    lines += [f"Warning: {line}" for line in weaknesses(spent, plan.delta, units, unit)]
    if units < 100:
        lines.append(f"{units} {unit}s are very few: at this noise expect to learn little or nothing")
    return lines
