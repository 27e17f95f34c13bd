"""Runs of a DPTrainer that may be killed at any moment: whole checkpoints, and steps that are repeated bit for bit.

A killed run resumes from its last checkpoint. The steps since were noised, and may have been seen, so they count. With
`repeat_lost_steps`, every step is in the log before its noise is drawn (`run_log`), and the run's keys are kept
(`run_keys`). A resumed run then repeats those steps: the same sums and the same noise give the same release, of which
nobody learns anything new, so it costs nothing, and the run is the one that would have been.

The same noise on other sums would show their difference. So steps are repeated in the same environment only, and the
noise of a step is drawn again only if the digest of its sums is the one in the log. Otherwise nothing is released, the
remaining steps count as lost, and the run goes on from the checkpoint with new keys. Several processes do not repeat.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import rotate_checkpoints

from ..distributed.world import world_of
from ..errors import AccountingError, FastDPError
from ..grad_sample import cost_model
from ..optim.fused_update import Release
from ..utils.append_log import sync_folder
from .run_keys import Keys, delete, environment, frozen_digest
from .run_log import Entry, RunLog
from .spending import Spending, logger


class Unrepeatable(FastDPError):
    """A repeated step came to other sums than those that its noise was drawn for."""


class Repeating(Spending, transformers.Trainer):  # type: ignore[misc]
    """The part of `DPTrainer` that saves checkpoints, and repeats lost steps.

    log_file, key_file: where the log and the keys lie (default: `run_log.jsonl` in output_dir, and
    `<output_dir>.secret.key` beside it). fingerprint: what must be the same when the run is resumed.
    keep_physical: whether a resumed run keeps the physical batch size it had, so that it rounds as before.
    """

    model: Any
    log_file: Path | None = None
    key_file: Path | None = None
    fingerprint: Mapping[str, Any] = {}
    keep_physical = False
    _staged: Path | None = None
    _run_log: RunLog | None = None
    _keys: Keys | None = None
    _repeating = 0  # steps still to be repeated

    # ------------------------------------------------------------------ checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged) if self._staged is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's, in a folder that gets its name when all of it is on the disk."""
        if self.args.push_to_hub or self.args.save_on_each_node:
            super()._save_checkpoint(model, trial)
            return
        run_dir, name = Path(super()._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        staged, target, world = run_dir / ".unfinished", run_dir / name, world_of()
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        world.agree({"a checkpoint begins": name})
        if self.state.best_global_step and (best := run_dir / f"checkpoint-{self.state.best_global_step}").exists():
            self.state.best_model_checkpoint = str(best)
        self._staged = staged
        try:
            super()._save_checkpoint(model, trial)
            world.agree({"a checkpoint ends": name})
            if self.args.should_save:
                if self.state.best_global_step == self.state.global_step:
                    self.state.best_model_checkpoint = str(target)
                    self.state.save_to_json(str(staged / name / "trainer_state.json"))
                _sync(staged)
                shutil.rmtree(target, ignore_errors=True)  # of this step, saved before by a run that lost it
                os.replace(staged / name, target)
                sync_folder(run_dir)
        finally:
            self._staged = None
            if self.args.should_save:
                shutil.rmtree(staged, ignore_errors=True)
        if self.args.should_save:
            rotate_checkpoints(str(run_dir), self.args.save_total_limit, self.state.best_model_checkpoint, True)
        world.agree({"a checkpoint is in place": name})

    # ------------------------------------------------------------------ taking up a run

    def _log_place(self) -> Path:
        return self.log_file or Path(self.args.output_dir) / "run_log.jsonl"

    def _key_place(self) -> Path:
        folder = Path(self.args.output_dir).absolute()
        found = self.key_file or folder.with_name(folder.name + ".secret.key")
        if found.resolve().is_relative_to(folder.resolve()):
            raise AccountingError(f"the keys in {found} must not lie in {folder}, which may be given away")
        return found

    def _open_log(self, resume: bool) -> None:
        """Open the log before anything is made. Raises AccountingError."""
        if not self.privacy.repeat_lost_steps:
            return
        world, plan = world_of(), self._fixed()
        if world.rank == 0 and self._log_place().exists() and not resume:
            raise AccountingError(
                f"{self._log_place()} is of a run already: resume it (resume_from_checkpoint=True), or take another "
                "output_dir"
            )
        mine = RunLog(self._log_place(), plan) if world.rank == 0 else RunLog(None, plan)
        names = ("steps", "environments", "damaged", "run")
        known = world.told("the log of a run", {name: getattr(mine, name) for name in names})
        vars(mine).update(known)
        self._run_log = mine

    def _say(self, text: str) -> None:
        """Tell the user what becomes of lost steps."""
        logger.warning(text)

    def _fixed(self) -> dict[str, Any]:
        """What cannot change between a run and its resuming."""
        chosen = self.privacy
        return {
            **self._options(), "target_epsilon": chosen.target_epsilon, "noise_multiplier": chosen.noise_multiplier,
            "delta": self.delta(), "accountant": chosen.accountant, "neighbours": self._neighbours(),
        }  # fmt: skip

    def _take_up(self) -> None:
        """Decide which steps are repeated, with which keys, and place noise, sampling and account there."""
        log = self._run_log
        if log is None:
            return
        world, step, private, loader = (
            world_of(),
            self.state.global_step,
            self._attached()._privacy,
            self._batches.loader,
        )
        mine = environment(self.model, world.size)
        made_of = {**self.fingerprint, "frozen weights": frozen_digest(self.model)}
        kept = Keys.load(self._key_place(), log.run) if world.rank == 0 else None
        if kept is not None:
            changed = [name for name in made_of | kept[1] if made_of.get(name) != kept[1].get(name)]
            if changed:
                raise AccountingError(
                    f"the run was begun with another {', '.join(changed)}: resume with what it was begun with, or "
                    "begin anew in another folder"
                )
        reason = self._judge(log, mine, kept, step)
        if self._repeating:
            logger.warning(
                f"repeating {self._repeating} step(s) made since the last checkpoint: they cost nothing again"
            )
        if reason:
            lost = log.count - step
            counted = f": {lost} step(s) since the last checkpoint are lost, and count" if lost else ""
            self._say(f"{reason}: the run goes on with new keys{counted}")
        if step < self.state.max_steps:
            if self._keys is None:
                self._new_keys(log, mine, made_of)
            self._keep_costs(log.environments[log.generation]["costs"])
            assert self._keys is not None
            private.noise.restore(self._keys.noise, step)
            loader.load_state_dict({**loader.state_dict(), "key": int.from_bytes(self._keys.sampling, "little")})
        private.release_hook = self._witness

    def _judge(self, log: RunLog, mine: dict[str, Any], kept: tuple[Keys, Any] | None, step: int) -> str:
        """Set the keys and the number of steps to repeat; returns why none are, if there are any."""
        generation = log.generation
        before = log.environments.get(generation)
        self._keys, self._repeating = None, 0
        if before is None or mine["processes"] > 1:
            return "steps of several processes are not repeated" if log.count else ""
        seed = self.privacy.noise_seed
        keys = kept[0] if kept is not None else None if seed is None else Keys.new(generation, seed)
        if keys is None or keys.generation != generation:
            return "the run's keys are gone"
        changed = [f"{name} {before.get(name)} -> {value}" for name, value in mine.items() if before.get(name) != value]
        if changed:
            return ", ".join(changed)
        self._repeating = log.repeatable(generation, step)
        if not self._repeating and any(g == generation and s >= step for g, s in log.steps):
            return "the steps since the last checkpoint cannot be repeated"
        self._keys = keys
        return ""

    def _new_keys(self, log: RunLog, mine: dict[str, Any], made_of: Mapping[str, Any]) -> None:
        """Begin a generation of keys: all steps that were to be repeated are lost."""
        world, self._repeating = world_of(), 0
        keys = Keys.new(log.generation + 1, self.privacy.noise_seed)
        if world.rank == 0:
            keys.save(self._key_place(), log.run, made_of)
        self._keys = world.told("the keys of a run", keys)
        log.begin(self._keys.generation, {**mine, "costs": self._costs()})

    def _costs(self) -> dict[str, Any]:
        """What the planner chooses routes by; routes decide the last bits of the sums."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        kinds = {p.dtype in (torch.bfloat16, torch.float16) for p in trained} | {False, self.args.device.type == "cuda"}
        families = ("linear", "conv") if any(p.dim() > 2 for p in trained) else ("linear",)
        device = trained[0].device
        return {
            str(int(short)): {
                job: values
                for family in families
                for job, values in cost_model.constants(device, short, family).items()
            }
            for short in sorted(kinds)
        }

    def _keep_costs(self, known: Mapping[str, Any]) -> None:
        device = next(self.model.parameters()).device
        for short, constants in known.items():
            cost_model.keep(device, short == "1", constants)

    def _logged_history(self) -> list[Any] | None:
        """The steps in the log that will not be made again, as the account's history; None without a log."""
        if self._run_log is None:
            return None
        spent = self._run_log.count - self._repeating
        return [(self._attached().noise_multiplier, self._batches.loader.sample_rate, spent)] if spent else []

    # ------------------------------------------------------------------ a step

    def before_step(self) -> None:
        """Seed the generators for the step; a repeated step takes the physical batch size it had."""
        log = self._run_log
        if log is None or self._keys is None:
            return
        step, sampler = self.state.global_step, self._batches.loader.sampler
        known = log.steps.get((self._keys.generation, step))
        if known is not None:
            sampler.limit = known.physical
        elif not self.keep_physical or not log.steps:
            sampler.limit = self.args.train_batch_size
        else:
            sampler.limit = list(log.steps.values())[-1].physical
        self._keys.seed_generators(step, world_of().rank)

    def _witness(self, release: Release) -> None:
        """The sums are there, and the noise is not drawn yet: log the step, or compare it with the log."""
        log, keys, step = self._run_log, self._keys, self.state.global_step
        assert log is not None and keys is not None
        entry = Entry(keys.digest(release, step), self._batches.loader.sampler.limit)
        known = log.steps.get((keys.generation, step))
        if known is None:
            log.add(keys.generation, step, entry)
        elif known.digest != entry.digest:
            raise Unrepeatable(f"step {step + 1} could not be repeated bit for bit")
        else:
            self._repeating -= 1
        world_of().agree({"logged": (keys.generation, step)})  # no process draws noise before

    def _cannot_repeat(self, problem: Unrepeatable) -> None:
        """Nothing of the repeated step was released: new keys, also for the records that are drawn."""
        assert self._run_log is not None
        self._say(f"{problem}: {self._repeating} step(s) are lost, and count; the run goes on with new keys")
        made_of = {**self.fingerprint, "frozen weights": frozen_digest(self.model)}
        self._new_keys(self._run_log, environment(self.model, world_of().size), made_of)

    def _close_log(self, over: bool) -> None:
        """Leave the log to others. over: the run has made its last step, and its keys are deleted."""
        log, self._run_log, self._keys = self._run_log, None, None
        if log is None:
            return
        log.close()
        cost_model.forget()
        if over and world_of().rank == 0:
            delete(self._key_place())


def _sync(folder: Path) -> None:
    """Bring all files of a folder to the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError), open(os.path.join(place, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(place))
