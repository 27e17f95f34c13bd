"""The loop: private steps, none of them unaccounted, whatever happens to the process.

A step is journalled (`journal`) before its noise is drawn. Checkpoints hold the state after some of the steps; a run
that was killed goes on from the last one and has lost the steps since. They were noised, and may have been seen, so
they count. There are two ways to go on:

- Repeat them. The noise, the records drawn, dropout are functions of keys (`keys`) and the step, the weights those of
  the checkpoint: the same sums, the same noise, hence the same release. Who sees it twice learns nothing new, so it
  costs nothing, and the run is the one that would have been.
- Count them as lost, and go on with new keys: epsilon is that of all steps ever made, so fewer are left.

Repeating is sound only if the sums are the same: the same noise on two different sums shows their difference. Bits
depend on the number of threads, the device, versions; these are recorded, and where one differs nothing is repeated.
That is not relied upon: a keyed digest of each step's sums is in the journal, and noise is drawn again only on sums of
the very same digest. Otherwise (floating point that is not deterministic, as on GPUs; a model that draws from a
generator of its own) the sums are dropped, nothing of them is released, and all steps from there on are lost. That such
a difference arose is seen by who watches the run; it is an accident of the machine's arithmetic and is taken to tell
nothing of the data.

New keys are new for the sampling too. The same records with new noise would be one sample with two releases, for which
the amplification by sampling holds once, not twice.

Keys go when the run is over. A folder copied back from an older backup, with keys that were used since, voids all this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import costs, sampling
from ..accounting import epsilon_of
from ..optim import DPAdamW
from ..privacy import Release
from ..sampling import poisson_loader
from .checkpoint import Checkpoints, SaveError
from .job import FREE, FinetuneError, Job, Outcome
from .journal import Entry, Journal
from .keys import Keys, delete, environment, generators_kept, weights_digest

SHOWN = 20  # at so many points of the run epsilon is computed to be shown


def run(job: Job, resume: bool = False) -> Outcome:
    """Train `job.model` in place, from the beginning or (resume) from where the run in `job.folder` was left.

    SIGINT and SIGTERM end it after the step in hand, saved; a second one at once. Raises FinetuneError, with words for
    the user, where it cannot begin or go on; errors of the model and of the data as they are.
    """
    folder = Path(job.folder)
    journal = folder / "journal.jsonl"
    if journal.exists() and not resume:
        raise FinetuneError(f"{folder} holds a run already: resume it, or take another folder")
    with generators_kept():
        loop = _Loop(job, folder, journal)
        try:
            return loop.run()
        finally:
            loop.close()


class _Different(Exception):
    """A repeated step came to other sums than those its noise was drawn for."""


class _Loop:
    """One call of `run`. `step` counts the steps that led to the weights."""

    def __init__(self, job: Job, folder: Path, journal: Path) -> None:
        self.job, self.plan, self.model = job, job.plan, job.model
        self.secret = job.secret or folder.with_name(folder.name + ".secret.key")
        if self.secret.resolve().is_relative_to(folder.resolve()):
            raise FinetuneError(f"the keys in {self.secret} must not lie in the run's folder, which may be given away")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise SaveError(f"{folder} cannot be made: {problem.strerror}") from problem
        self.trained = {name: p for name, p in job.model.named_parameters() if p.requires_grad}
        if not self.trained:
            raise FinetuneError("no parameter of the model is trainable")
        self.device = next(iter(self.trained.values())).device
        self.environment = environment(job.model)
        self.frozen = weights_digest(job.model)
        shown = dataclasses.asdict(job.plan)
        self.journal = Journal(journal, {name: value for name, value in shown.items() if name not in FREE})
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.step, self.saved = 0, -1  # saved: the step of the newest checkpoint
        self.history: list[dict[str, float]] = []
        self.physical = self.plan.max_physical_batch_size
        self.keys: Keys | None = None
        self.repeating = 0  # steps still to be repeated
        self.reason = ""  # why none is
        self._saved_at = time.monotonic()
        self.optimizer: Any = None
        self.batches: Iterator[Any] | None = None
        self.stop = _Stop()
        self._epsilons: dict[int, float] = {0: 0.0}

    def close(self) -> None:
        """Leave the model without hooks, and the folder to others."""
        self.batches = None
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self.optimizer.detach()
        self.journal.close()

    # ------------------------------------------------------------------ the whole run

    def run(self) -> Outcome:
        self._make()
        self._restore()
        self._account()
        self.allowed = self._allowed()
        mode = self.model.training
        self.model.train()
        try:
            with self.stop:
                if self.step < self.last:
                    self._begin()
                while self.step < self.last and not self.stop.asked:
                    self._one_step()
                    self._after_step()
                if not self.stop.asked:
                    self._evaluate()
                if self.saved != self.step:
                    self._save(needed=not self.stop.asked)
        finally:
            self.model.train(mode)
        left = self.step < self.last
        if not left:
            delete(self.secret)
        status: Any = "interrupted" if left else "finished" if self.step >= self.plan.steps else "budget"
        return Outcome(status, self.step, self._epsilon(exact=True), self.history, self.lost, self._nonfinite())

    @property
    def lost(self) -> int:
        """Noised steps that did not lead to the weights, and will not be repeated."""
        return self.journal.count - self.step - self.repeating

    @property
    def last(self) -> int:
        """The step after which no other fits: what was lost is missing at the end."""
        return min(self.plan.steps, self.allowed - self.lost if self.plan.target_epsilon is not None else self.allowed)

    def _make(self) -> None:
        plan = self.plan
        self.optimizer = DPAdamW(
            self.model, lr=plan.lr, betas=tuple(plan.betas), weight_decay=plan.weight_decay, clipping=plan.clipping,
            noise_multiplier=plan.noise_multiplier, max_grad_norm=plan.max_grad_norm, style=plan.style,
            accountant=plan.accountant, seed=plan.seed,
        )  # fmt: skip
        self.privacy = self.optimizer._privacy
        self.privacy.witness = self._witness
        options: dict[str, Any] = {}
        if self.job.group_by is not None:
            options["group_by"] = self.job.group_by
            if plan.max_records_per_group is not None:
                options["max_records_per_group"] = plan.max_records_per_group
        self.loader = poisson_loader(
            self.job.data, sample_rate=plan.sample_rate, steps=plan.steps, max_physical_batch_size=self.physical,
            collate_fn=self.job.collate, generator=torch.Generator(), **options,
        )  # fmt: skip
        if abs(self.loader.expected_batch_size - plan.expected_batch_size) > 0.5:
            raise FinetuneError(
                f"the plan expects {plan.expected_batch_size:g} samples a batch; sampling at {plan.sample_rate:g} gives "
                f"{self.loader.expected_batch_size:g}"
            )

    def _allowed(self) -> int:
        """How many steps fit the budget: the plan's, or fewer."""
        plan = self.plan
        if plan.target_epsilon is None or self._of(plan.steps) <= plan.target_epsilon:
            return plan.steps
        low, high = 0, plan.steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._of(middle) <= plan.target_epsilon else (low, middle)
        return low

    # ------------------------------------------------------------------ taking up a run

    def _restore(self) -> None:
        """The newest checkpoint, and whether the steps after it can be repeated."""
        found = self.checkpoints.load(self._note)
        if found is None and self.journal.count:
            raise FinetuneError(
                f"no checkpoint in {self.checkpoints.folder} is whole, and {self.journal.count} private steps were made: "
                f"they cost epsilon {self._of(self.journal.count):.4g} at delta {self.plan.delta:g}. Begin anew in "
                "another folder, and add this to what the new run spends"
            )
        if found is not None:
            self._load(*found)
        kept, generation = Keys.load(self.secret, self.journal.run), self.journal.generation
        if kept is not None:
            self._compare(kept[1])
            self.keys = kept[0]
        elif self.plan.seed is not None and generation >= 0:
            self.keys = Keys.new(generation, self.plan.seed)
        before = self.journal.environments.get(generation)
        if self.keys is None or before is None or self.keys.generation != generation:
            self.keys = None
            self.reason = "the run's keys are gone" if self.journal.count else ""
            return
        changed = [name for name, value in self.environment.items() if before.get(name) != value]
        if changed:
            self.reason = ", ".join(f"{name} {before.get(name)} -> {self.environment[name]}" for name in changed)
            self.keys = None
            return
        self.repeating = self.journal.repeatable(generation, self.step)
        if self.repeating or not any(g == generation and s >= self.step for g, s in self.journal.steps):
            self._keep_costs(before["costs"])
        else:
            self.reason, self.keys = "the steps since the last whole checkpoint cannot be repeated", None

    def _compare(self, fingerprint: Mapping[str, Any]) -> None:
        new = json.loads(json.dumps(dict(self.job.fingerprint)))
        names = [name for name in {**fingerprint, **new} if fingerprint.get(name) != new.get(name)]
        if names:
            raise FinetuneError(
                f"the run was begun with another {', '.join(names)}: resume with what it was begun with, or begin anew "
                "in another folder"
            )

    def _load(self, step: int, state: dict[str, Any]) -> None:
        if state["frozen"] != self.frozen or set(state["trained"]) != set(self.trained):
            raise FinetuneError(
                "the checkpoint is of another model, or of other trainable parameters: resume with the model and the "
                "options that the run was begun with"
            )
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in state["trained"].items():
                self.trained[name].copy_(value)
            for name, value in state["buffers"].items():
                if name in buffers:
                    buffers[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = self.saved = step
        self.history = [dict(row) for row in state["history"]]

    def _begin(self) -> None:
        """Before the first step: keys, the accountant at what was spent, a checkpoint to return to."""
        if self.repeating:
            self._note(f"repeating {self.repeating} step(s) made since the last checkpoint: they cost nothing again")
        if self.reason:
            lost = f": {self.lost} step(s) since the last checkpoint are lost, and count" if self.lost else ""
            self._note(f"{self.reason}: the run goes on with new keys{lost}")
        if self.keys is None:
            self._new_keys()
        else:
            self._place()
        if self.saved != self.step:
            self._save(needed=True)

    def _new_keys(self) -> None:
        """All steps that were to be repeated are lost; the coming ones have keys of their own."""
        self.repeating = 0
        self.keys = Keys.new(self.journal.generation + 1, self.plan.seed)
        self.keys.save(self.secret, self.journal.run, dict(self.job.fingerprint))
        self.journal.begin(self.keys.generation, {**self.environment, "costs": self._costs()})
        self._place()

    def _place(self) -> None:
        """Noise, sampling and the accountant where the next step is."""
        assert self.keys is not None
        self.privacy.noise.restore(self.keys.noise, self.step)
        self.batches = None
        self._account()

    def _account(self) -> None:
        """The optimizer's accountant knows of every step in the journal but those that it will see again."""
        spent = self.journal.count - self.repeating
        rate, sigma = self.loader.sample_rate, self.plan.noise_multiplier
        self.privacy.ledger.history = [(sigma, rate, spent)] if spent else []

    def _costs(self) -> dict[str, Any]:
        """What the planner chooses routes by: routes decide the last bits of the sums."""
        kinds = {p.dtype in (torch.bfloat16, torch.float16) for p in self.trained.values()}
        kinds |= {False, self.device.type == "cuda"}
        known = {str(int(short)): costs.constants(self.device, short) for short in sorted(kinds)}
        self._keep_costs(known)
        return known

    def _keep_costs(self, known: dict[str, Any] | None) -> None:
        for short, constants in (known or {}).items():
            costs.keep(self.device, short == "1", constants)

    # ------------------------------------------------------------------ a step

    def _one_step(self) -> None:
        assert self.keys is not None
        begun = time.perf_counter()
        factor = schedule(self.step, self.plan.warmup_steps, self.last)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr * factor
        replayed = self.repeating > 0
        known = self.journal.steps.get((self.keys.generation, self.step)) if replayed else None
        size = known.physical if known is not None else self.physical
        while True:
            try:
                loss, samples = self._logical(size)
                break
            except _Different:
                self._begin_again()
                return
            except RuntimeError as problem:
                if self._released or not out_of_memory(problem):
                    raise
                largest = self._largest
            size = self._smaller(size, largest)
        self.step += 1
        self.repeating -= replayed
        if self.privacy.ledger.steps != self.journal.count - self.repeating:
            raise AssertionError(
                f"{self.journal.count - self.repeating} steps in the journal, {self.privacy.ledger.steps} accounted"
            )
        self._log("step", step=self.step, steps=self.last, lr=self.plan.lr * factor, loss=loss, samples=samples,
                  seconds=time.perf_counter() - begun, epsilon=self._epsilon(), replayed=replayed,
                  nonfinite=self._nonfinite())  # fmt: skip

    def _logical(self, size: int | None) -> tuple[float, int]:
        """One logical batch: (mean loss, samples)."""
        assert self.keys is not None
        self.keys.seed_generators(self.step)
        self._size, self._largest, self._released = size, 0, False
        self.loader.sampler.limit = size
        if self.batches is None:
            self.loader.load_state_dict({"pass": 0, "step": self.step, "key": self.keys.sampling})
            self.batches = iter(self.loader)
        total, samples = torch.zeros((), device=self.device), 0
        while True:
            batch = next(self.batches)
            current = sampling.current(id(self.loader))
            assert current is not None
            self._largest = max(self._largest, current.size)
            if current.size:
                batch = to_device(batch, self.device) if self.job.to_device is None else self.job.to_device(batch)
                loss = self.job.loss(self.model, batch)
                loss.backward()
                total, samples = total + loss.detach() * current.size, samples + current.size
                del loss
            self.optimizer.step()
            self.optimizer.zero_grad()
            if current.final:
                return float(total) / max(samples, 1), samples

    def _witness(self, release: Release) -> None:
        """The sums are there, the noise is not drawn: journal the step, or compare with what was journalled."""
        assert self.keys is not None
        if self.privacy.noise.step != self.step:
            raise AssertionError(f"noise of step {self.privacy.noise.step} for step {self.step}")
        entry = Entry(self.keys.digest(release, self.step), self._size)
        known = self.journal.steps.get((self.keys.generation, self.step))
        if known is None:
            self.journal.add(self.keys.generation, self.step, entry)
        elif known.digest != entry.digest:
            raise _Different
        self._released = True  # from here on the weights may have changed

    def _begin_again(self) -> None:
        """A repetition differs: nothing of it was released. New keys from here on, also for the records drawn."""
        self._note(
            f"step {self.step + 1} could not be repeated bit for bit: {self.repeating} step(s) are lost, and count; the "
            "run goes on with new keys"
        )
        self._drop_sums()
        self._new_keys()
        if self.saved != self.step:
            self._save(needed=False)

    def _drop_sums(self) -> None:
        self.optimizer.zero_grad()
        self.privacy.discard()
        self.batches = None

    def _smaller(self, size: int | None, largest: int) -> int:
        """After running out of memory: half the physical batch, for the same logical batch from its beginning."""
        self._drop_sums()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        tried = min(size or largest, largest) if largest else size or 1
        if tried <= 1:
            raise FinetuneError(
                "memory does not suffice for a single sample: shorten the samples, train fewer parameters, or use "
                "activation checkpointing"
            )
        self.physical = tried // 2
        self._note(f"out of memory with {tried} samples at once: the batch is repeated with {self.physical}")
        return self.physical

    # ------------------------------------------------------------------ between steps

    def _after_step(self) -> None:
        job, plan = self.job, self.plan
        if job.evaluate_every and self.step % job.evaluate_every == 0 and self.step < self.last:
            self._evaluate()
        due = plan.checkpoint_steps is not None and self.step % plan.checkpoint_steps == 0
        if plan.checkpoint_seconds is not None and time.monotonic() - self._saved_at >= plan.checkpoint_seconds:
            due = True
        if due and self.step < self.last and self.saved != self.step:
            self._save(needed=False)

    def _evaluate(self) -> None:
        if self.job.evaluate is None or (self.history and self.history[-1]["step"] == self.step):
            return
        mode = self.model.training
        self.model.eval()
        with torch.no_grad():
            metrics = {name: float(value) for name, value in self.job.evaluate(self.model).items()}
        self.model.train(mode)
        row = {"step": self.step, "epsilon": self._epsilon(), **metrics}
        self.history.append(row)
        self._log("evaluate", **row)

    def _save(self, needed: bool) -> None:
        """A checkpoint. One that is not needed may fail: the steps since the last one can be repeated."""
        begun = time.monotonic()
        state = {
            "step": self.step, "frozen": self.frozen, "history": self.history,
            "trained": {name: p.detach() for name, p in self.trained.items()},
            "buffers": {name: b.detach() for name, b in self.model.named_buffers()},
            "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip
        self._saved_at = begun
        try:
            path = self.checkpoints.save(self.step, state)
        except SaveError as problem:
            if needed:
                raise SaveError(f"{problem}, and resume") from problem
            self._note(f"{problem}. The steps since step {max(self.saved, 0)} would have to be repeated")
            return
        self.saved, self._saved_at = self.step, time.monotonic()
        self._log("checkpoint", step=self.step, path=str(path), seconds=self._saved_at - begun)

    # ------------------------------------------------------------------ words and numbers

    def _log(self, kind: str, **values: Any) -> None:
        if self.job.log is not None:
            self.job.log(kind, values)

    def _note(self, text: str) -> None:
        self._log("note", text=text)

    def _nonfinite(self) -> int:
        return int(self.optimizer.nonfinite_samples)

    def _epsilon(self, exact: bool = False) -> float:
        """Of all steps in the journal; to be shown, of some more, as PRV accounting takes a tenth of a second."""
        count, every = self.journal.count, -(-self.plan.steps // SHOWN)
        return self._of(count if exact or count > self.plan.steps else min(-(-count // every) * every, self.plan.steps))

    def _of(self, count: int) -> float:
        if count not in self._epsilons:
            if self.plan.noise_multiplier == 0:
                return math.inf
            runs: Any = [(self.plan.noise_multiplier, self.plan.sample_rate, count)]
            self._epsilons[count] = epsilon_of(runs, self.plan.delta, self.plan.accountant)
        return self._epsilons[count]


class _Stop:
    """SIGINT and SIGTERM ask for an end after the step in hand; the second time they end it at once."""

    def __init__(self) -> None:
        self.asked = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *problem: Any) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def schedule(step: int, warmup: int, last: int) -> float:
    """Factor of the learning rate of a step (counted from 0): up linearly over `warmup` steps, down to 0 at `last`.

    >>> [schedule(step, 2, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = min(warmup, last)
    if step < warmup:
        return (step + 1) / warmup
    return (last - step) / max(last - warmup, 1)


def out_of_memory(problem: BaseException) -> bool:
    """Whether an error says that memory did not suffice, on any device."""
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device: in tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[to_device(item, device) for item in batch])
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(item, device) for item in batch)
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {name: to_device(item, device) for name, item in batch.items()}
    if hasattr(batch, "to"):
        with contextlib.suppress(TypeError):
            return batch.to(device)
    return batch
