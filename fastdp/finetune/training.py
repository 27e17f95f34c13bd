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

Several processes (`ranks`) do not repeat: whether all would come to the same sums again, none of them can tell. The
first one journals a step for all, and none draws noise before it has.

Keys go when the run is over. A folder copied back from an older backup, with keys that were used since, voids all this.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import sampling
from ..distributed.world import world_of
from ..optim.fused_update import Release
from .job import FinetuneError, Job, Outcome
from .journal import Entry
from .keys import delete, generators_kept
from .run_state import Standing


def run(job: Job, resume: bool = False) -> Outcome:
    """Train `job.model` in place, from the beginning or (resume) from where the run in `job.folder` was left.

    SIGINT and SIGTERM end it after the step in hand, saved; a second one at once. Raises FinetuneError, with words for
    the user, where it cannot begin or go on; errors of the model and of the data as they are.
    """
    folder = Path(job.folder)
    journal = folder / "journal.jsonl"
    world = world_of()
    with world.deciding(), generators_kept():
        if journal.exists() and not resume and world.rank == 0:
            raise FinetuneError(f"{folder} holds a run already: resume it, or take another folder")
        loop = _Loop(job, folder, journal)
        try:
            return loop.run()
        finally:
            loop.close()


class _Different(Exception):
    """A repeated step came to other sums than those its noise was drawn for."""


class _Loop(Standing):
    """One call of `run`."""

    def __init__(self, job: Job, folder: Path, journal: Path) -> None:
        super().__init__(job, folder, journal)
        self.stop = _Stop()

    def run(self) -> Outcome:
        self._make()
        self.privacy.release_hook = self._witness
        self._restore()
        self._account()
        self.allowed = self._allowed()
        mode = self.model.training
        self.model.train()
        try:
            with self.stop:
                if self.step < self.last:
                    self._begin()
                while self.step < self.last and not self._stops():
                    self._one_step()
                    self._after_step()
                stopped = self._stops()
                if not stopped:
                    self._evaluate()
                if self.saved != self.step:
                    self._save(needed=not stopped)
        finally:
            self.model.train(mode)
        left = self.step < self.last
        self.world.agree({"a run's end": self.step})  # what the first process could not save, all hear of
        if not left and self.world.rank == 0:
            delete(self.secret)
        status: Any = "interrupted" if left else "finished" if self.step >= self.plan.steps else "budget"
        return Outcome(status, self.step, self._epsilon(exact=True), self.history, self.lost, self._nonfinite())

    def _stops(self) -> bool:
        """Whether a process was asked to end."""
        return self.world.agree({"a run's step": self.step}, int(self.stop.asked)) > 0

    # ------------------------------------------------------------------ a step

    def _one_step(self) -> None:
        assert self.keys is not None
        begun = time.perf_counter()
        factor = schedule(self.step, self.plan.warmup_steps, self.last)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
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
                if self._released or not out_of_memory(problem):  # released: the noise is drawn
                    raise
                if self.world.size > 1:  # the others have made their part of the batch
                    raise FinetuneError(
                        f"out of memory with {self._largest} samples at once: resume with a smaller "
                        "--max-physical-batch-size"
                    ) from problem
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
        self.keys.seed_generators(self.step, self.world.rank)
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
                total, samples = (
                    total + self._backward(batch, current.size, size) * current.size,
                    samples + current.size,
                )
            self.optimizer.step()
            self.optimizer.zero_grad()
            if current.final and self.world.size > 1:
                parts = self.world.everywhere("the loss of a step", (float(total), samples))
                total, samples = sum(part[0] for part in parts), sum(part[1] for part in parts)
            if current.final:
                return float(total) / max(samples, 1), samples

    def _backward(self, batch: Any, samples: int, size: int | None) -> Tensor:
        """The mean loss of a physical batch, detached."""
        if self.replays is not None:
            return self.replays.backward(batch, samples, size)
        loss = self.job.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

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
        self.world.agree({"journalled": entry.digest})  # by the first process: none draws noise before
        self._released = True  # from here on the weights may have changed

    def _begin_again(self) -> None:
        """A repetition differs: nothing of it was released. New keys from here on, also for the records drawn."""
        self._note(
            f"step {self.step + 1} could not be repeated bit for bit: {self.repeating} step(s) are lost, and count; "
            "the run goes on with new keys"
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
        if self.world.rank > 0 or self.job.evaluate is None or (self.history and self.history[-1]["step"] == self.step):
            return
        mode = self.model.training
        self.model.eval()
        with torch.no_grad():
            metrics = {name: float(value) for name, value in self.job.evaluate(self.model).items()}
        self.model.train(mode)
        row = {"step": self.step, "epsilon": self._epsilon(), **metrics}
        self.history.append(row)
        self._log("evaluate", **row)


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
