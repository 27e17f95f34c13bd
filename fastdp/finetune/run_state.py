"""Where a run stands: its journal, checkpoints and keys, and what a resumed run begins with. See `training`."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..accounting import delta_problem, epsilon_by
from ..distributed.world import world_of
from ..grad_sample import cost_model
from ..optim.optimizers import DPAdamW
from ..sampling import poisson_loader
from .checkpoint import Checkpoints, SaveError, in_words
from .job import FREE, FinetuneError, Job
from .journal import Journal
from .keys import Keys, environment, weights_digest
from .ranks import Told, about, tell_keys
from .replays import Replays

SHOWN = 4  # bits of a number of steps whose epsilon is computed to be shown: 8 of them from a number to its double


class Standing:
    """The run in a folder. `step` counts the steps that led to the weights."""

    def __init__(self, job: Job, folder: Path, journal: Path) -> None:
        self.world = world_of()
        self.job, self.plan, self.model = job, job.plan, job.model
        self.secret = job.secret or folder.resolve().with_name(folder.resolve().name + ".secret.key")
        if self.secret.resolve().is_relative_to(folder.resolve()):
            raise FinetuneError(f"the keys in {self.secret} must not lie in the run's folder, which may be given away")
        if self.world.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as problem:
                raise SaveError(in_words(problem, folder)) from problem
        self.trained = {name: p for name, p in job.model.named_parameters() if p.requires_grad}
        if not self.trained:
            raise FinetuneError("no parameter of the model is trainable")
        self.device = next(iter(self.trained.values())).device
        self.environment = environment(job.model)
        if self.world.size > 1:
            self.environment["processes"] = self.world.size
        self.frozen = weights_digest(job.model)
        shown = dataclasses.asdict(job.plan)
        fixed = {name: value for name, value in shown.items() if name not in FREE}
        mine = Journal(journal, fixed) if self.world.rank == 0 else None
        known = self.world.told("a journal", None if mine is None else about(mine))
        self.journal = mine or Told(known)
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.step, self.saved = 0, -1  # saved: the step of the newest checkpoint
        self.history: list[dict[str, float]] = []
        self.physical = self.plan.max_physical_batch_size
        self.keys: Keys | None = None
        self.allowed = self.plan.steps  # that fit the budget
        self.repeating = 0  # steps still to be repeated
        self.reason = ""  # why none is
        self._saved_at = time.monotonic()
        self.optimizer: Any = None
        self.replays: Replays | None = None
        self.batches: Iterator[Any] | None = None
        self._epsilons: dict[int, float] = {0: 0.0}

    def close(self) -> None:
        """Leave the model without hooks, and the folder to others."""
        self.batches = None
        cost_model.forget()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self.optimizer.detach()
        self.journal.close()

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
            self.model, params=self._groups(), lr=plan.lr, betas=(plan.betas[0], plan.betas[1]),
            weight_decay=plan.weight_decay, clipping=plan.clipping,
            noise_multiplier=plan.noise_multiplier, max_grad_norm=plan.max_grad_norm, style=plan.style,
            accountant=plan.accountant, seed=plan.seed,
        )  # fmt: skip
        self.privacy = self.optimizer._privacy
        self.replays = None if self.job.graphed is None else Replays(self.job, self.optimizer, self.device)
        options: dict[str, Any] = {}
        if self.job.group_by is not None:
            options["group_by"] = self.job.group_by
            if plan.max_records_per_group is not None:
                options["max_records_per_group"] = plan.max_records_per_group
        try:
            self.loader = poisson_loader(
                self.job.data, sample_rate=plan.sample_rate, steps=plan.steps, max_physical_batch_size=self.physical,
                collate_fn=self.job.collate, generator=torch.Generator(), **options,
            )  # fmt: skip
        except ValueError as problem:
            raise FinetuneError(str(problem)) from problem
        if plan.noise_multiplier and (wrong := delta_problem(plan.delta, self.loader.sampler.size, "sample")):
            raise FinetuneError(f"{wrong}. Take a smaller delta")
        if abs(self.loader.expected_batch_size - plan.expected_batch_size) > 0.5:
            raise FinetuneError(
                f"the plan expects {plan.expected_batch_size:g} samples a batch; sampling at {plan.sample_rate:g} "
                f"gives {self.loader.expected_batch_size:g}"
            )

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, each with its learning rate before the schedule."""
        new = set(self.job.new) if self.plan.new_lr is not None else set()
        parts = {self.plan.lr: [p for name, p in self.trained.items() if name not in new]}
        if new & set(self.trained):
            assert self.plan.new_lr is not None
            parts.setdefault(self.plan.new_lr, []).extend(p for name, p in self.trained.items() if name in new)
        return [{"params": params, "lr": rate, "peak": rate} for rate, params in parts.items() if params]

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
        found = self.checkpoints.load(self._note) if self.world.rank == 0 else None
        if found is None and self.journal.count and self.world.rank == 0:
            raise FinetuneError(
                f"no checkpoint in {self.checkpoints.folder} is whole, and {self.journal.count} private steps were "
                f"made: they cost epsilon {self._of(self.journal.count):.4g} at delta {self.plan.delta:g}. Begin anew "
                "in another folder, and add this to what the new run spends"
            )
        found = self.world.told("a checkpoint", found)
        if found is not None:
            self._load(*found)
        if self.job.keep_physical and self.journal.steps:  # dropout and rounding depend on it
            self.physical = list(self.journal.steps.values())[-1].physical
        kept = Keys.load(self.secret, self.journal.run) if self.world.rank == 0 else None
        generation = self.journal.generation
        if kept is not None:
            self._compare(kept[1])
            self.keys = kept[0]
        if self.world.size > 1:  # whether all would come to the same sums again, none can tell
            self.reason = "steps of several processes are not repeated" if self.journal.count else ""
            self.keys = None
            return
        if kept is None and self.plan.seed is not None and generation >= 0:
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
        if self.world.rank == 0:
            self.keys = Keys.new(self.journal.generation + 1, self.plan.seed)
            self.keys.save(self.secret, self.journal.run, dict(self.job.fingerprint))
        self.keys = tell_keys(self.world, self.keys)
        assert self.keys is not None
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
        self.privacy.ledger.begin([(sigma, rate, spent)] if spent else [])

    def _costs(self) -> dict[str, Any]:
        """What the planner chooses routes by: routes decide the last bits of the sums."""
        kinds = {p.dtype in (torch.bfloat16, torch.float16) for p in self.trained.values()}
        kinds |= {False, self.device.type == "cuda"}
        known = {str(int(short)): cost_model.constants(self.device, short) for short in sorted(kinds)}
        self._keep_costs(known)
        return known

    def _keep_costs(self, known: dict[str, Any] | None) -> None:
        for short, constants in (known or {}).items():
            cost_model.keep(self.device, short == "1", constants)

    def _save(self, needed: bool) -> None:
        """A checkpoint. One that is not needed may fail: the steps since the last one can be repeated."""
        if self.world.rank > 0:
            self.saved = self.step
            return
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
        """Of all steps in the journal; in logs, of up to an eighth more, as accounting takes a tenth of a second."""
        count = self.journal.count
        every = 2 ** max(0, count.bit_length() - SHOWN)
        return self._of(count if exact or count > self.plan.steps else min(-(-count // every) * every, self.plan.steps))

    def _of(self, count: int) -> float:
        if count not in self._epsilons:
            if self.plan.noise_multiplier == 0:
                return math.inf
            runs: Any = [(self.plan.noise_multiplier, self.plan.sample_rate, count)]
            self._epsilons[count] = epsilon_by(runs, self.plan.delta, self.plan.accountant)
        return self._epsilons[count]
