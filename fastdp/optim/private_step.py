"""One private training run: sums of clipped gradients, when to step, noise, and the ledger."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..accounting import check_accountant, check_options, warn_of_delta
from ..accounting.ledger import Ledger
from ..accounting.runs import finite
from ..accounting.used_draws import Place
from ..batch_axis.current_batch import Unit
from ..batch_axis.deferred_checks import AwaitedChecks, DeferredCheck, withhold
from ..data import loader, loop_checks
from ..data.loader_batch import LoaderBatch
from ..data.sample_rates import RateCheck
from ..data.skipped_batches import SkippedBatches
from ..distributed.frameworks import check_frameworks
from ..distributed.wrappers import Replica, check_samples, world_for
from ..engine.explain import Plan
from ..engine.gradients import Gradients, add
from ..engine.per_sample import PerSampleGradients
from ..engine.unused_batches import Known
from ..errors import SampleMixingError, SampleRateWarning, StepError
from ..ops.clip import GAMMA
from ..ops.noise import Noise
from ..utils import allocator
from . import distributed_step
from .clip_groups import ClipGroups
from .clipped_sums import DROPPED
from .clipping import Clipping, ClippingFunction, refuse_own_norms
from .fused_update import Release
from .graphed_forwards import graph_forwards
from .option_checks import of_loader
from .tensor_parallel_sums import sums_of


class PrivateStep:
    """What an optimizer adds to its own update rule. The arguments are those of `fastdp.privatize`."""

    _of_loader = staticmethod(of_loader)
    mechanism: Any = None  # of `fastdp.mechanisms`, with a state of its own: "name", `state()`, `read(state)`
    quantile: Any = None  # that the clipping norm follows: `adaptive_clipping.Quantile`
    reads_later = True  # what a device knows of a step, where nothing but sums with factors is released
    noise_std = 0.0  # on an element of the last step's sum: R may have moved since

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Tensor],
        *,
        noise_multiplier: float,
        max_grad_norm: float = 1.0,
        expected_batch_size: float | None = None,
        clipping: ClippingFunction = "local",
        style: str | Sequence[Any] = "flat",
        loss_reduction: str = "mean",
        sample_rate: float | None = None,
        accountant: str = "prv",
        gamma: float = GAMMA,
        batch_first: bool = True,
        batch_size: int | None = None,
        rows_per_sample: int = 1,
        memory_budget: int | None = None,
        seed: int | None = None,
        process_group: Any = None,
        mesh: Any = None,
        ledger: str | PathLike[str] | None = None,
        graphed: bool = False,
    ) -> None:
        check_frameworks(model)
        self.world = world_for(model, process_group, mesh)
        self._loader_position, self._truncation, self._drawn = ("", 0, 0), 0.0, list[Place]()  # at the last step
        self.graphs, self._graphed = None, graphed  # the `graphed_forwards.GraphedForwards`, if forwards are replayed
        self.deferred_setup: Any = None  # for a framework that lays the model in parts: `deferred_setup`
        with self.world.deciding():
            check_options(noise_multiplier, expected_batch_size, sample_rate, gamma)
            self.noise_multiplier, self.accountant = finite(noise_multiplier), check_accountant(accountant)
            self.expected_batch_size, self.sample_rate = expected_batch_size, sample_rate
            self.loss_reduction = loss_reduction
            self.world.check()
            self.noise, self.ledger = Noise(seed), Ledger()
            self._of_engine: dict[str, Any] = {
                "loss_reduction": loss_reduction, "batch_first": batch_first, "batch_size": batch_size,
                "rows_per_sample": rows_per_sample, "memory_budget": memory_budget,
            }  # fmt: skip
            try:
                self.attach(model, params)
                named = self.engine.named_parameters()
                self.clipping = Clipping(named, clipping, max_grad_norm, self.sums.with_wholes(style), gamma)
                self.unit = Unit()
                self.replica.check_others(self.engine)
                shared = (self.engine, self.noise, self.ledger)
                distributed_step.agree_on_setup(self.world, self.replica, *shared, ledger, self._settings)
            except Exception:
                self.ledger.close()
                self.detach()
                raise
        if any(p.device.type == "cpu" for p in self.engine.parameters()):
            allocator.keep_freed()
        self.norms: Tensor | dict[str, Tensor] | None = None
        self._awaited = AwaitedChecks(self.reads_later)
        self._plan: Plan | None = None
        self._dropped: Tensor | int = 0  # samples, of all processes at the steps so far
        self._fresh: Tensor | int = 0  # the same since the last step, of this process and those it has parts of
        self._records, self._sums_of = 0, -1  # of this process since the last step; the logical batch of the sums
        self._backward_of = self.stepped_on = (-1, -1)  # (logical, physical) of the last backward and step
        self._backwards = self._first = 0  # so far, and the number of the first that is pending
        self.detached, self._released = False, False  # released: this optimizer has made a step
        self.replaced_by, self.warned = "", dict[str, str]()  # (by another optimizer of the same model); by their kind
        self.loader_batch, self.rate_check = LoaderBatch(lambda: self.engine.whose.given_by), RateCheck()
        self._rate, self._expected = sample_rate, expected_batch_size  # of the last step
        self.release_hook: Callable[[Release], None] | None = None  # called before the noise; no step if it raises
        self.missed = SkippedBatches(self.replica.module)
        self.missed.refused = self.world.refuse
        self.listen()
        self.discard()

    def attach(self, model: nn.Module, params: Iterable[Tensor]) -> None:
        """Put an engine on the model."""
        self.replica = Replica(model, self.world, self._of_engine["memory_budget"])
        self.sums, shards = sums_of(self.replica.shards, self.world), self.replica.shards
        self.engine = PerSampleGradients(
            self.replica.module, params, on_backward=self.clip, shards=shards, **self._of_engine
        )
        self.graphs = graph_forwards(self) if self._graphed else None

    def detach(self) -> None:
        """Take the engine off the model."""
        if self.deferred_setup is not None:
            self.deferred_setup.cancel()
        if hasattr(self, "engine"):
            self.engine.detach()
        if hasattr(self, "replica"):
            self.replica.restore()

    def close(self, by: str = "") -> None:
        """Train the model no more; by: what does so now. What was spent stays spent."""
        self.detach()
        self.discard()
        self.ledger.close()
        self.detached, self.missed.over, self.replaced_by = True, True, by or self.replaced_by

    def listen(self) -> None:
        """Hear of what happens in the engine, which was attached."""
        self.engine.watch(self.replica.begins, self.replica.refused, self.replica.broken)
        self.ledger.register(self.engine.named_parameters().values(), self.engine.model)
        self.engine.whose.batch_in_hand = self.loader_batch.of_forward
        self._members = ClipGroups(self._clipping_now, self.loader_batch)
        # the sums of parts wait for those of other processes
        self.engine.clip_by_group(self._members if self.replica.shards is None else None)

    def discard(self) -> None:
        """Forget everything since the last step."""
        self._pending: dict[int, Tensor] = {}  # of backwards since the last call of step
        self._sums: dict[int, Tensor] = {}  # of the logical batch's steps so far
        self._has_pending = self._has_sums = False
        self._doubts: list[DeferredCheck] = []
        self._taken: list[Known] = []  # the batches of these backwards, if they were taken out of their loader before
        self.unit.forget()

    def clip(self, gradients: Gradients) -> None:
        """Take the gradients of a backward: their clipped sums wait for the step."""
        stands_in, records = self.loader_batch.stands_in, 0 if self.loader_batch.stands_in else gradients.records
        if not stands_in:
            self.unit.take(gradients.people, begun=self.busy or self.ledger.begun)
        self._check_batch(gradients)
        named = self.engine.named_parameters()
        self._check_groups(named)
        members = self._members.all(self.clipping, named)
        self._members.check(gradients.taken)
        self.sums.begin(gradients, members, {"backward": self._backwards, "of step": self.noise.step})
        norm_sq = self.sums.norm_sq(gradients, members)
        if stands_in:
            factors, norm_sq = [torch.zeros_like(n, dtype=torch.float32) for n in norm_sq], [n[:0] for n in norm_sq]
        else:
            factors = self.sums.factors(self.clipping, norm_sq)
        withhold(gradients.doubts if self.reads_later else (), factors, *(t.sums for t in gradients.taken.values()))
        norms = torch.stack(norm_sq).sqrt().float().unbind()
        flat = self.clipping.style == "flat"
        self.norms = norms[0] if flat else dict(zip([g.name for g in self.clipping.groups], norms, strict=True))
        # of all groups before any is kept: of a backward that fails here nothing may wait for the next step
        plan = gradients.plan or Plan(gradients, self._plan)
        sums = self.sums.clipped(gradients, members, factors, self._numbers(norm_sq))
        self._doubts, self._backwards = [*self._doubts, *gradients.doubts], self._backwards + 1
        self._first = self._first if self._has_pending else self._backwards
        self._has_pending, self._records, self._plan = True, self._records + records, plan
        add(self._pending, *sums)
        self._fresh = self._fresh + self._pending.pop(DROPPED).long()

    def _numbers(self, norm_sq: Sequence[Tensor]) -> dict[int, Tensor]:
        return {DROPPED: (~torch.isfinite(torch.stack(list(norm_sq)))).any(0).sum()}

    def _warn_once(self, text: str, kind: str) -> None:
        if kind not in self.warned:
            self.warned[kind] = text
            warnings.warn(text, stacklevel=3)

    def _clipping_now(self) -> tuple[Clipping, dict[str, Tensor]]:
        named = self.engine.named_parameters() if self.clipping.apart else {}
        self._check_groups(named)
        return self.clipping, named

    def _check_batch(self, gradients: Gradients) -> None:
        self.world.check()
        self.replica.check()
        check_samples(self.world)
        self.replica.check_others(self.engine)
        current = self.loader_batch.trained()
        if current is None:
            if self.world.share[1] == 1:
                self.rate_check.check(self.sample_rate, gradients.batch, self.expected_batch_size)
            elif gradients.people is not None:
                raise StepError(loop_checks.PERSONS_APART)
            else:
                self._warn_once(loop_checks.OWN_BATCHES.format(n=self.world.share[1]), "own batches")
            if self._has_pending:
                self._warn_once(loop_checks.ADDED, "added")
            if known := self.engine.taken or self.missed.stepped.like(self.sample_rate, gradients.records):
                self._taken.append(known)
            elif self.missed.stepped.again(self.sample_rate, gradients.records):
                self._warn_once(loop_checks.PERHAPS_REPEATED, "repeated")
            return
        number = (current.logical, current.physical)
        if self._has_pending and number != self._backward_of:
            self.loader_batch.check_left()
            self.zero_grad()
        loop_checks.check_skipped(current)
        none = self.loader_batch.stands_in
        loop_checks.check_whole(current, *((0, current.people) if none else (gradients.records, gradients.people)))
        if number in (self._backward_of, self.stepped_on):
            raise StepError(loop_checks.AGAIN)
        self._backward_of = number
        loader.train(current, self.missed)

    def _check_groups(self, named: dict[str, Tensor]) -> None:
        known = {name for group in self.clipping.groups for name in group.parameters}
        new = [name for name in named if name not in known]
        if new and isinstance(self.clipping.style, str):  # unfrozen since
            self._regroup(named)
        elif new:
            raise StepError(loop_checks.UNGROUPED.format(new[:5]))

    def _regroup(self, named: dict[str, Tensor]) -> None:
        """Other parameters are trained than before."""
        self.clipping = self.clipping.changed(named)
        self.ledger.register(named.values(), self.engine.model)

    def pending(self) -> range:
        """Numbers of the backwards that no step has taken."""
        return range(self._first, self._backwards + 1) if self._has_pending else range(0)

    @property
    def busy(self) -> bool:
        """Whether gradients of a logical batch are held that no noised step has ended."""
        return self._has_pending or self._has_sums

    @property
    def nonfinite_samples(self) -> int:
        """Samples dropped so far because their gradient was not finite."""
        return int(self._dropped) + int(self._fresh)

    def set_dropped(self, count: int) -> None:
        """So many samples were dropped before."""
        self._dropped, self._fresh = count, 0

    def ready(self) -> bool:
        """Take the gradients at hand; True where the logical batch is complete. Checks first, then takes."""
        current, rate, expected = self.loader_batch.current(), self.sample_rate, self.expected_batch_size
        if current is not None:
            loop_checks.check_skipped(current)
            loop_checks.check_share(current, *self.world.share)
            rate, expected = self._of_loader(current, self.stepped_on, rate, expected)
            if current.size == 0 and self.unit.grouped is None:  # of a process whose first batches have no record
                self.unit.grouped = current.people is not None
        empty = current is not None and current.size == 0
        if not self._has_pending and not empty:
            outside = not self._released and any(p.grad is not None for p in self.engine.parameters())
            raise StepError(loop_checks.OUTSIDE if outside else loop_checks.NO_BACKWARD)
        if self.loss_reduction == "mean" and expected is None:
            raise StepError(loop_checks.NO_SIZE + self.loader_batch.of_no_loop())
        logical = -1 if current is None else current.logical
        if self._has_sums and logical != self._sums_of:
            warnings.warn(loop_checks.DROPPED, stacklevel=3)
            self._sums, self._has_sums = {}, False
        add(self._sums, self._pending)
        self._pending, self._has_pending, self._has_sums = {}, False, True
        self.unit.forget()
        self._rate, self._expected, self._sums_of = rate, expected, logical
        self._truncation, self._loader_position = 0.0, ("", 0, 0)
        if current is not None:
            self._truncation, self._loader_position = current.truncation, current.place
            self.stepped_on = (current.logical, current.physical)
            loader.train(current, self.missed, stepped=True)
        self._drawn = [p for p in (self._loader_position, *(taken.places[n] for taken, n in self._taken)) if p[0]]
        while self._taken:
            self.missed.take(self._taken.pop())
        return current is None or current.final

    def zero_grad(self) -> None:
        """Drop the gradients of backwards that no step has taken."""
        self._pending, self._has_pending, self._taken = {}, False, []
        self.unit.forget()

    def release(self) -> Release:
        """Every parameter's clipped sum, and the noise to add to it once (deviation noise_multiplier * sensitivity)."""
        loop_checks.refuse_capture(self._sums.values())
        try:
            self._awaited.settle(self._doubts)
            self.ledger.write_ahead(self.noise_multiplier, self._rate, self._truncation, self._drawn, self.noise)
        except (SampleMixingError, StepError):
            self.discard()
            raise
        assert self._expected is not None or self.loss_reduction != "mean"  # checked in ready()
        divisor = float(self._expected or 1) if self.loss_reduction == "mean" else 1.0
        sums, places = self.sums.held(self.engine.named_parameters(), self._sums, self.engine.offsets())
        if self.world.size > 1:
            sums = self._summed(sums)
        self.noise_std = self._gradient_noise() * self.clipping.sensitivity_of_sums(self._expected or self._records)
        self._dropped, self._fresh, self._records = self._dropped + self._fresh, 0, 0
        release = self.sums.release(sums, places, self.noise, self.noise_std, 1 / divisor)
        if self.release_hook is not None:
            self.release_hook(release)
        return release

    def _gradient_noise(self) -> float:
        return self.noise_multiplier

    def _summed(self, sums: dict[int, Tensor]) -> dict[int, Tensor]:
        """The sums over all processes, which agree on the step."""
        said = distributed_step.settings_of_step(
            self, not self._released, sample_rate=self._rate, expected_batch_size=self._expected,
            truncation=self._truncation, **self._settings(),
        )  # fmt: skip
        look = None if self._released else self.replica.check_copies
        found, self._fresh, self._records = distributed_step.reduce_sums(
            self.world, self.sums, sums, self._fresh, self._records, said, self._awaited.add, look
        )
        if not (self.sample_rate is None or self._loader_position[0] or self.ledger.begun):
            self.rate_check.check_size(self.sample_rate, self._records, self.expected_batch_size)
        return found

    def _settings(self) -> dict[str, Any]:
        return distributed_step.settings_of(
            self.clipping, self.engine, noise_multiplier=self.noise_multiplier, loss_reduction=self.loss_reduction,
            accountant=self.accountant, grouped=self.unit.grouped,
        )  # fmt: skip

    def finish(self) -> None:
        """The noised step was made: count it."""
        if self._rate is None and self.mechanism is None and self.noise_multiplier and "rate" not in self.warned:
            self.warned["rate"] = loop_checks.NO_RATE + self.rate_check.seen_text
            warnings.warn(self.warned["rate"], SampleRateWarning, stacklevel=5)
        self.ledger.by_seed = self.ledger.by_seed or not self.noise.secure
        for again in self.ledger.add(self.noise_multiplier, self._rate, self._truncation, self._drawn):
            self._warn_once(loop_checks.REPEATED.format(*again), "repeated")
        self.noise.step, self._released = self.noise.step + 1, True
        self.replica.changed()
        self.discard()

    def epsilon(self, delta: float | None, sample_rate: float | None = None) -> float:
        """epsilon at delta of the steps so far; sample_rate: of those whose rate is not known."""
        with self.world.deciding():  # what has come of earlier steps may differ between processes
            self._awaited.look(wait=True)
        rate, expected = self._rate or self.sample_rate or sample_rate, self._expected or self.expected_batch_size
        delta = self.ledger.default_delta(expected, rate) if delta is None else delta
        found = self.ledger.epsilon(delta, self.accountant, sample_rate)
        warn_of_delta(delta, expected / rate if rate and expected else None, stacklevel=4)
        self.rate_check.compare(sample_rate)
        return found

    def explain(self, profile: bool = False) -> str:
        """The plan of the last backward, a row a use."""
        self.engine.profile = self.engine.profile or profile
        if self._plan is None:
            raise StepError("no plan yet: call loss.backward() first")
        table = self._plan.table(self.engine.named_parameters(), profile) + self.clipping.hint(self.norms)
        return table if self.graphs is None else f"{table}\n{self.graphs.told()}"

    def retrack(self, params: list[Tensor]) -> None:
        """Train these parameters from now on."""
        if self.busy:
            raise StepError("parameters cannot be added between backward and step")
        if not isinstance(self.clipping.style, str):
            raise StepError("with custom groups, make a new optimizer whose groups hold the new parameters")
        self.engine.track(params)
        self._regroup(self.engine.named_parameters())

    def set_clipping(self, *changes: Any) -> None:
        """Clip the coming batches by `Clipping.changed(..., *changes)`."""
        if self.busy:
            raise StepError("set_clipping between backward and step: change the clipping between steps")
        named, (function, norm, style, gamma) = self.engine.named_parameters(), changes
        refuse_own_norms(norm, self.norms)
        self.clipping = self.clipping.changed(named, function, norm, self.sums.with_wholes(style), gamma)
