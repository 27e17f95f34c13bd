"""The run: `fastdp.hf.DPTrainer` trains, saves and resumes; what the command adds is written here.

That is: its own losses, two learning rates, evaluations and metrics between steps, Ctrl-C, and checkpoints by the
clock. That nothing spent is ever lost, and that a killed run is resumed exactly, is DPTrainer's (`repeat_lost_steps`).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from tqdm import tqdm
from transformers.integrations import TensorBoardCallback

from ..distributed.world import world_of
from ..errors import AccountingError, GraphError
from ..hf import DPTrainer, PrivacyArguments
from .files import SaveError, disk_problems, write
from .plan import FinetuneError, Job, Outcome
from .tasks import headline

MINUTES = 5.0  # between checkpoints
SHOWN = 4  # bits of a number of steps whose epsilon is shown: in logs it is of up to an eighth more steps
FIRST = ("step", "epsilon", "loss", "samples")  # columns of metrics.csv


def run(job: Job, resume: bool) -> tuple[Outcome, list[dict[str, Any]]]:
    """Train the job's model in place, from the beginning or from where its run was left; how it ended, and the rows of
    metrics, by step.

    SIGINT and SIGTERM end it after the current step, saved; a second one ends it at once.
    """
    settings: Any = job.model.config
    cached = getattr(settings, "use_cache", None)
    mask = os.umask(0o077)  # checkpoints hold metrics and counts
    try:
        trainer = Trainer(job)
        with trainer.stoppable(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="noise_seed")
            trainer.train(resume_from_checkpoint=resume or None)
        outcome = trainer.outcome()
        trainer.write_metrics()
    except torch.OutOfMemoryError as problem:
        raise FinetuneError(
            f"memory does not suffice for {job.physical} records at once ({str(problem).splitlines()[0]}): resume with "
            "a smaller --max-physical-batch-size"
        ) from problem
    except GraphError as problem:
        raise FinetuneError(
            f"--graphed: the step of this model cannot be replayed: {problem}. Go on with --resume, without --graphed"
        ) from problem
    finally:
        os.umask(mask)
        if cached is not None:  # Trainer turns it off for training, and it would stay off in the saved model
            settings.use_cache = cached
        job.model.eval()
    return outcome, trainer.rows()


class Trainer(DPTrainer):
    """A DPTrainer that trains a job."""

    def __init__(self, job: Job) -> None:
        options, plan, out = job.options, job.plan, job.options.out
        self.job, self.asked, self.nonfinite = job, False, 0
        self.epsilon_of = functools.cache(plan.epsilon)
        arguments = transformers.TrainingArguments(
            output_dir=str(out / "checkpoints"), max_steps=plan.steps, learning_rate=plan.lr,
            weight_decay=plan.weight_decay, lr_scheduler_type="linear", optim="adamw_torch",
            per_device_train_batch_size=job.physical or len(job.data), save_strategy="steps",
            save_steps=options.checkpoint_every or plan.steps, save_total_limit=2, logging_steps=1, report_to="none",
            disable_tqdm=True, use_cpu=job.device.type == "cpu", remove_unused_columns=False,
            dataloader_pin_memory=False, logging_nan_inf_filter=False,
        )  # fmt: skip
        if job.device.type == "cuda" and arguments.world_size == 1:  # Trainer would take all GPUs that there are
            arguments.__dict__["_setup_devices"], arguments._n_gpu = job.device, 1
            torch.cuda.set_device(job.device)
        privacy = PrivacyArguments(
            target_epsilon=plan.target_epsilon, noise_multiplier=plan.noise_multiplier, delta=plan.delta,
            per_sample_max_grad_norm=plan.max_grad_norm, clipping=plan.clipping, accountant=plan.accountant,
            sample_rate=plan.sample_rate, group_by=options.group_by, max_records_per_group=plan.max_records_per_group,
            noise_seed=plan.seed, graphed=options.graphed, verify=False, repeat_lost_steps=True,  # verified before
        )  # fmt: skip
        super().__init__(
            model=job.model, args=arguments, train_dataset=job.data, data_collator=job.collate, privacy=privacy,
            callbacks=[Between(self), *_board(out)],
        )  # fmt: skip
        self.remove_callback(transformers.PrinterCallback)
        self.log_file, self.key_file = out / "journal.jsonl", out.with_name(out.name + ".secret.key")
        self.fingerprint, self.keep_physical = job.fingerprint, job.keep_physical

    # ------------------------------------------------------------------ what is trained

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return one loss per sample [B]."""
        return self.job.losses(model, inputs)

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW, whose new parameters learn at a rate of their own."""
        plan, parts = self.job.plan, dict[float, list[nn.Parameter]]()
        for name, parameter in self.job.model.named_parameters():
            if parameter.requires_grad:
                parts.setdefault(plan.new_lr if name in self.job.new else plan.lr, []).append(parameter)
        groups = [{"params": params, "lr": rate} for rate, params in sorted(parts.items())]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=plan.weight_decay)
        return self.optimizer

    def _group_keys(self) -> Any:
        return self.job.groups

    def _fixed(self) -> dict[str, Any]:
        return vars(self.job.plan)

    def _plan(self, max_steps: int) -> None:
        """As DPTrainer's. A run that has spent its budget makes no step, and its outputs are written."""
        try:
            super()._plan(max_steps)
        except AccountingError:
            self.state.max_steps = self.state.global_step

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for an end after the current step; the second time they end it at once."""

        def ask(number: int, frame: Any) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        here = threading.current_thread() is threading.main_thread()
        former = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM) if here}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    # ------------------------------------------------------------------ between steps

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """DPTrainer's. One that is not needed may fail: the steps since the last one can be repeated."""
        again = "The same command with --resume goes on from the last checkpoint"
        try:
            with disk_problems(self.job.options.out / "checkpoints", again):
                super()._save_checkpoint(model, trial)
                self.write_metrics()
        except SaveError as problem:
            needed = self.control.should_training_stop or self.state.global_step in (0, self.state.max_steps)
            if needed or world_of().size > 1:
                raise
            self._say(str(problem))

    def _say(self, text: str) -> None:
        if world_of().rank == 0:
            tqdm.write(f"  {text}")

    def _privacy_logs(self, final: bool) -> dict[str, float]:
        """What the log of a step has beside its loss."""
        if self._private is None:  # the run is over
            return {}
        self.nonfinite = int(self._private.nonfinite_samples)
        return {"epsilon": self.spent(), "samples": self._whole, "nonfinite": self.nonfinite}

    def made(self) -> int:
        """The noised steps ever made, lost ones included."""
        return sum(run[2] for run in self.history)

    def spent(self) -> float:
        """Epsilon of all steps made; of up to an eighth more, as accounting takes a tenth of a second."""
        made = self.made()
        every = 2 ** max(0, made.bit_length() - SHOWN)
        return self.epsilon_of(
            made if made > self.job.plan.steps else min(-(-made // every) * every, self.job.plan.steps)
        )

    def rows(self) -> list[dict[str, Any]]:
        """The log, a row a step. It is part of each checkpoint, so a repeated step has one row."""
        found: dict[int, dict[str, Any]] = {}
        for entry in self.state.log_history:
            if "train_loss" not in entry:  # Trainer's summary
                found.setdefault(entry["step"], {}).update(entry)
        return [found[step] for step in sorted(found)]

    def write_metrics(self) -> None:
        """metrics.csv. Raises SaveError."""
        if world_of().rank > 0:
            return
        rows, text = self.rows(), io.StringIO()
        others = {name for row in rows for name in row} - {*FIRST}
        writer = csv.DictWriter(text, [*FIRST, *sorted(others)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{value:.8g}" for name, value in row.items()} for row in rows)
        write(self.job.options.out / "metrics.csv", text.getvalue())

    def evaluate_now(self) -> None:
        """The figures of the held-out records, by the first process, once a step."""
        last = next((row for row in self.rows() if row["step"] == self.state.global_step), {})
        if world_of().rank > 0 or self.job.evaluate is None or headline(self.job.options.task) in last:
            return
        found, spent = self.job.evaluate(self.job.model), self.spent()
        self.log({"epsilon": spent, **found})
        figures = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        self._say(f"step {self.state.global_step}: epsilon {spent:.2f}, {figures}")

    def outcome(self) -> Outcome:
        """How the run ended."""
        steps, made = self.state.global_step, Counter[Any]()
        for noise, rate, count, *_ in self.history:
            made[noise, rate] += count
        status: Any = "finished" if steps >= self.job.plan.steps else "budget"
        if self.asked and steps < self.state.max_steps:
            status = "interrupted"
        else:
            self.evaluate_now()
        return Outcome(status, steps, [(*run, count) for run, count in made.items()], self.nonfinite)


class Between(transformers.TrainerCallback):
    """What happens between two steps of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.saved = trainer, time.monotonic()
        # None: a bar on terminals alone
        self.bar = tqdm(total=trainer.job.plan.steps, file=sys.stdout, disable=None, leave=False, unit="step")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.trainer.evaluate_now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        clock = trainer.job.options.checkpoint_every is None and time.monotonic() - self.saved > 60 * MINUTES
        asked = world_of().everywhere("what follows a step", (trainer.asked, clock))
        control.should_save = control.should_save or any(stop or due for stop, due in asked)
        if any(stop for stop, _ in asked):
            control.should_training_stop = trainer.asked = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        trainer = self.trainer
        if "loss" not in (logs or {}) or world_of().rank > 0:
            return
        self.bar.n = state.global_step
        self.bar.set_postfix_str(f"loss {logs['loss']:.4f}, epsilon {logs['epsilon']:.2f}")
        epoch = max(1, round(1 / trainer.job.plan.sample_rate))
        if state.global_step % epoch == 0 and state.global_step < state.max_steps:
            trainer.evaluate_now()
        if trainer.asked and world_of().size == 1:  # since the step's end
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = time.monotonic()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()


def _board(out: Any) -> list[Any]:
    """TensorBoard's callback, where it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return []
    return [TensorBoardCallback(SummaryWriter(str(out / "tensorboard")))]
