"""The run: `fastdp.hf.DPTrainer` trains, saves and resumes; what the command adds is written here.

That is: its own losses, two learning rates, evaluations and metrics between steps, Ctrl-C, and checkpoints by the
clock. That nothing spent is ever lost, and that a killed run is resumed exactly, is DPTrainer's (`repeat_lost_steps`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..accounting import epsilon_by
from ..distributed.world import world_of
from ..errors import AccountingError, GraphError
from ..hf import DPTrainer, PrivacyArguments
from .files import SaveError, disk_problems
from .plan import FinetuneError, Job, Outcome
from .progress import Progress

MINUTES = 5.0  # between checkpoints
SHOWN = 4  # bits of a number of steps whose epsilon is shown: in logs it is of up to an eighth more steps


def run(job: Job, resume: bool, progress: Progress) -> Outcome:
    """Train the job's model in place, from the beginning or from where its run was left.

    SIGINT and SIGTERM end it after the current step, saved; a second one ends it at once.
    """
    settings: Any = job.model.config
    cached = getattr(settings, "use_cache", None)
    mask = os.umask(0o077)  # checkpoints hold metrics and counts
    try:
        trainer = Trainer(job, progress)
        with trainer.stop, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="noise_seed")
            trainer.train(resume_from_checkpoint=resume or None)
    except torch.OutOfMemoryError as problem:
        raise FinetuneError(
            f"memory does not suffice for {job.plan.max_physical_batch_size} records at once "
            f"({str(problem).splitlines()[0]}): resume with a smaller --max-physical-batch-size"
        ) from problem
    finally:
        os.umask(mask)
        if cached is not None:  # Trainer turns it off for training, and it would stay off in the saved model
            settings.use_cache = cached
        job.model.eval()
    return trainer.outcome()


def _train_on(arguments: transformers.TrainingArguments, device: torch.device) -> None:
    """One process trains on the GPU that was asked for, however many there are (Trainer would take all of them)."""
    if device.type == "cuda" and arguments.world_size == 1:
        arguments.__dict__["_setup_devices"], arguments._n_gpu = device, 1
        torch.cuda.set_device(device)


class Trainer(DPTrainer):
    """A DPTrainer that trains a job."""

    def __init__(self, job: Job, progress: Progress) -> None:
        plan = job.plan
        self.job, self.progress, self.stop = job, progress, Stop()
        self.epsilons: dict[int, float] = {0: 0.0}
        self.nonfinite = 0
        self.replays: dict[Any, Any] = {}
        arguments = transformers.TrainingArguments(
            output_dir=str(job.out / "checkpoints"), max_steps=plan.steps, learning_rate=plan.lr,
            weight_decay=plan.weight_decay, lr_scheduler_type="linear", optim="adamw_torch",
            per_device_train_batch_size=plan.max_physical_batch_size or len(job.data), save_strategy="steps",
            save_steps=plan.checkpoint_steps or plan.steps, save_total_limit=2, logging_steps=1, report_to="none",
            disable_tqdm=True, use_cpu=job.device.type == "cpu", remove_unused_columns=False,
            dataloader_pin_memory=False, logging_nan_inf_filter=False,
        )  # fmt: skip
        _train_on(arguments, job.device)
        privacy = PrivacyArguments(
            target_epsilon=plan.target_epsilon, noise_multiplier=plan.noise_multiplier, delta=plan.delta,
            per_sample_max_grad_norm=plan.max_grad_norm, clipping=plan.clipping, accountant=plan.accountant,
            sample_rate=plan.sample_rate, group_by=job.group_by, max_records_per_group=plan.max_records_per_group,
            noise_seed=plan.seed, verify=False, repeat_lost_steps=True,  # the check was made before
        )  # fmt: skip
        super().__init__(
            model=job.model, args=arguments, train_dataset=job.data, data_collator=job.collate, privacy=privacy,
            callbacks=[Between(self)],
        )  # fmt: skip
        self.remove_callback(transformers.PrinterCallback)
        self.log_file, self.key_file = job.out / "journal.jsonl", job.out.with_name(job.out.name + ".secret.key")
        self.fingerprint, self.keep_physical = job.fingerprint, job.keep_physical

    # ------------------------------------------------------------------ what is trained

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return one loss per sample [B]."""
        return self.job.losses(model, inputs)

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW, whose new parameters learn at a rate of their own."""
        plan, trained = self.job.plan, [(n, p) for n, p in self.job.model.named_parameters() if p.requires_grad]
        parts: dict[float, list[nn.Parameter]] = {}
        for name, parameter in trained:
            parts.setdefault(plan.new_lr if name in self.job.new else plan.lr, []).append(parameter)
        groups = [{"params": params, "lr": rate} for rate, params in sorted(parts.items())]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=plan.weight_decay)
        return self.optimizer

    def _group_keys(self) -> Any:
        return self.job.groups

    def _fixed(self) -> dict[str, Any]:
        return self.job.plan.fixed()

    def _plan(self, max_steps: int) -> None:
        """As DPTrainer's. A run that has spent its budget makes no step, and its outputs are written."""
        try:
            super()._plan(max_steps)
        except AccountingError:
            self.state.max_steps = self.state.global_step

    # ------------------------------------------------------------------ replayed steps

    def _make_private(self, steps: int) -> None:
        super()._make_private(steps)
        if self.job.graphed is not None:
            self._graphed = self  # type: ignore[assignment]

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        """Forward and backward by a recording for the shape of the batch; returns the mean loss.

        What is recorded depends on the batch and the data alone, never on batches before: a resumed run has not seen
        them, and repeats steps bit for bit.
        """
        assert self._source is not None and self._private is not None and self.job.graphed is not None
        samples, limit = len(batch["labels"]), self._source.loader.sampler.limit
        size = limit or 1 << (samples - 1).bit_length()
        key = (tuple((name, value.shape[1:]) for name, value in batch.items()), size)
        if key not in self.replays:
            example = self.job.graphed.example(batch, size)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.replays[key] = example and self._private.graphed(self._losses, (example,), sizes=(size,))
            except GraphError as problem:
                raise FinetuneError(
                    f"--graphed: the step of this model cannot be replayed: {problem}. Go on with --resume, without "
                    "--graphed"
                ) from problem
        if self.replays[key] is not None:
            return self.replays[key].backward(batch)  # type: ignore[no-any-return]
        loss = self._losses(self._trained, batch).mean()  # the only record of its width
        loss.backward()
        return loss.detach()

    # ------------------------------------------------------------------ between steps

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """DPTrainer's. One that is not needed may fail: the steps since the last one can be repeated."""
        again = "The same command with --resume goes on from the last checkpoint"
        try:
            with disk_problems(self.job.out / "checkpoints", again):
                super()._save_checkpoint(model, trial)
        except SaveError as problem:
            needed = self.control.should_training_stop or self.state.global_step in (0, self.state.max_steps)
            if needed or world_of().size > 1:
                raise
            self._say(str(problem))

    def _say(self, text: str) -> None:
        if world_of().rank == 0:
            self.progress.say(f"  {text}")

    def _privacy_logs(self, final: bool) -> dict[str, float]:
        return {}  # the log's epsilon is written to the metrics

    def spent(self, exact: bool = False) -> float:
        """Epsilon of all steps ever made; in logs, of up to an eighth more, as accounting takes a tenth of a second."""
        plan, count = self.job.plan, sum(run[2] for run in self.history)
        every = 2 ** max(0, count.bit_length() - SHOWN)
        if not exact and count <= plan.steps:
            count = min(-(-count // every) * every, plan.steps)
        if count not in self.epsilons:
            self.epsilons[count] = epsilon_by(
                [(plan.noise_multiplier, plan.sample_rate, count)], plan.delta, plan.accountant
            )
        return self.epsilons[count]

    def evaluate_now(self) -> None:
        """The figures of the held-out records, by the first process."""
        step, row = self.state.global_step, self.progress.rows.get(self.state.global_step, {})
        if world_of().rank > 0 or self.job.evaluate is None or self.progress.figure in row:
            return
        self.progress.evaluated({"step": step, "epsilon": self.spent(), **self.job.evaluate(self.job.model)})

    def outcome(self) -> Outcome:
        """How the run ended."""
        steps, made = self.state.global_step, sum(run[2] for run in self.history)
        interrupted = self.stop.asked and steps < self.state.max_steps
        if not interrupted:
            self.evaluate_now()
        status: Any = "interrupted" if interrupted else "finished" if steps >= self.job.plan.steps else "budget"
        return Outcome(status, steps, self.spent(exact=True), made - steps, self.nonfinite)


class Between(transformers.TrainerCallback):
    """What happens between two steps of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.saved, self.begun = trainer, time.monotonic(), 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        clock = trainer.job.plan.checkpoint_steps is None and time.monotonic() - self.saved > 60 * MINUTES
        asked = world_of().everywhere("what follows a step", (trainer.stop.asked, clock))
        control.should_save = control.should_save or any(stop or due for stop, due in asked)
        if any(stop for stop, _ in asked):
            control.should_training_stop = trainer.stop.asked = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        trainer = self.trainer
        if "loss" not in (logs or {}) or world_of().rank > 0:
            return
        assert trainer._private is not None
        trainer.nonfinite = int(trainer._private.nonfinite_samples)
        trainer.progress.step({
            "step": state.global_step, "epsilon": trainer.spent(), "loss": logs["loss"], "samples": trainer._whole,
            "seconds": time.perf_counter() - self.begun, "lr": logs["learning_rate"], "nonfinite": trainer.nonfinite,
        })  # fmt: skip
        epoch = max(1, round(1 / trainer.job.plan.sample_rate))
        if state.global_step % epoch == 0 and state.global_step < state.max_steps:
            trainer.evaluate_now()
        if trainer.stop.asked and world_of().size == 1:  # since the step's end
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = time.monotonic()
        if world_of().rank == 0:
            self.trainer.progress.pause()


class Stop:
    """SIGINT and SIGTERM ask for an end after the current step; the second time they end it at once."""

    def __init__(self) -> None:
        self.asked = False
        self.former: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.former[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *problem: Any) -> None:
        for number, former in self.former.items():
            signal.signal(number, former)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
