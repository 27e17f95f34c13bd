"""`DPTrainer`: Hugging Face's Trainer with private steps."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_utils import get_last_checkpoint

from ..accounting import History
from ..distributed.world import world_of
from ..errors import AccountingError, ParameterError, StepError
from ..optim.optimizers import PrivateOptimizer
from ..optim.privatize import privatize
from . import arguments, ledger
from .batches import Ticket, are_tickets, check_dataset, make_source, tickets
from .combining import Combining
from .examination import Examination
from .losses import LoggedLoss, reduced, size_of, without_labels
from .options import PrivacyArguments
from .parts import InParts
from .repeating import Repeating, Unrepeatable
from .spending import Watch, logger

if TYPE_CHECKING:
    from ..optim.graphed_shapes import GraphedShapes


class DPTrainer(Combining, InParts, Repeating, Examination):
    """A `transformers.Trainer` that trains with differential privacy.

    Batches are Poisson samples of train_dataset, cut into physical batches of per_device_train_batch_size. The loss is
    the mean of the samples' own losses. Every step's gradient is clipped by sample, and noise is added. Evaluation and
    prediction are those of Trainer. `epsilon()` returns the privacy spent.

    The guarantee covers the trained weights under the addition or removal of one record of train_dataset (with
    group_by, of one group). It does not cover logged losses, metrics, and choices made by them.

    Args:
        privacy: a `PrivacyArguments`. All other arguments are those of Trainer.

    Raises:
        ArgumentError: if a field of TrainingArguments is refused.
        VerificationError: if `fastdp.verify` finds a fault, before the first step.
        StepError: if the loop does something that has no private meaning. The engine's other errors are also possible.
    """

    model: Any
    optimizer: Any

    def __init__(self, *positional: Any, privacy: PrivacyArguments | None = None, **named: Any) -> None:
        given = self._named(positional, named)
        if not isinstance(privacy, PrivacyArguments):
            raise TypeError(
                f"{type(self).__name__} needs privacy=PrivacyArguments(target_epsilon=...) or (noise_multiplier=...)"
            )
        if isinstance(given.get("args"), transformers.TrainingArguments):
            arguments.check(given["args"], self._reads)
        if given.get("train_dataset") is not None:
            check_dataset(given["train_dataset"])
        self._begin_account(privacy)
        self._graphed: GraphedShapes | None = None
        self._taken_over: History = []  # what an optimizer has spent in whose place this one's came
        self._training = False
        self._trained: Any = None  # the model, or its compiled form
        self._learning = False  # inside the loss of a training step, or of a check of it
        self._complete = False  # the logical batch of the step in hand has been taken whole
        self._whole = 0  # the number of all records of that batch
        super().__init__(*positional, **named)
        self._given = self.optimizer is not None
        arguments.check(self.args, self._reads)
        if self.is_model_parallel:
            raise ParameterError("the model is spread over several devices, which is not supported: load it on one")
        if self.args.max_grad_norm:
            logger.info("TrainingArguments.max_grad_norm is off: gradients are clipped by sample, before the noise")
        self.callback_handler.callbacks.insert(0, Watch(self))  # a step is noted before anyone is shown it

    # ------------------------------------------------------------------ the run

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Run Trainer.train. A checkpoint to resume from must be one of a DPTrainer; see docs/huggingface.md."""
        with world_of().deciding():  # what a process refuses before the first step, all refuse
            return self._train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train(self, resume_from_checkpoint: str | bool | None, trial: Any, ignore_keys_for_eval: Any) -> Any:
        if trial is not None:
            self.hyperparameter_search()
        arguments.check(self.args, self._reads)
        if self.train_dataset is not None:
            check_dataset(self.train_dataset)
            self.delta()
        if self._history:
            self._refuse_other_neighbours(self._counted, "this trainer's first training")
        resume = bool(resume_from_checkpoint)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            # a run with a log saves one before its first step
            if resume_from_checkpoint is None and not (self.privacy.repeat_lost_steps and self._log_place().exists()):
                raise ValueError(f"no checkpoint in {self.args.output_dir}")
        self._resumed = self._spent_before(str(resume_from_checkpoint)) if resume_from_checkpoint else None
        self._forget_optimizer()
        if self.privacy.noise_seed is not None:
            warnings.warn("noise_seed is for experiments: it voids the guarantee of the epsilon stated", stacklevel=2)
        self._training, self._complete, over = True, False, False
        self._losses_seen = LoggedLoss(self.args.device, self.args.logging_nan_inf_filter)
        self._open_log(resume)
        try:
            found = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            over = self._is_over()
            return found
        except Unrepeatable as problem:
            self._cannot_repeat(problem)
        finally:
            self._leave()
            self._close_log(over)
            self._training = self.is_in_train = False
        return self._train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _forget_optimizer(self) -> None:
        """A second training makes a new optimizer: that of the first is tied to its run."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(inner, PrivateOptimizer) and self._given:
            raise ParameterError("optimizers= was tied to the first training: set trainer.optimizer to a new one")
        if isinstance(inner, PrivateOptimizer):
            self.optimizer, self.lr_scheduler = None, None

    def _leave(self) -> None:
        """Take the engine off the model; what was spent is kept."""
        if self._source is not None:
            self._source.close()
        if self._private is not None:
            self._history, self._counted = self.history, self._neighbours()
            self._private.detach()
            self._left, self._private, self._graphed = self._private, None, None

    # ------------------------------------------------------------------ data

    def get_train_dataloader(self) -> Any:
        """Make the Poisson loader and return its tickets; see `fastdp.hf.batches`."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        data, collate = self.train_dataset, self.data_collator
        if hasattr(data, "remove_columns"):
            data = self._remove_unused_columns(data, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        self._source = make_source(data, self._samples_first(collate), self._group_keys(), self.args, self.privacy)
        return tickets(self._source.loader.steps_per_epoch, self.args.gradient_accumulation_steps)

    def _samples_first(self, collate: Any) -> Any:
        """A collator whose tensors have one row for each record."""
        return collate

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of records of the training data, or of another loader, as evaluation's."""
        return self._records() if are_tickets(dataloader) else super().num_examples(dataloader)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the tickets of one step.

        The contents of the batches are not counted, because nothing may be divided by the count.
        """
        found, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return found, None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if batch_samples and isinstance(batch_samples[0], Ticket):
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    # ------------------------------------------------------------------ making it private

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the optimizer private, then schedule it.

        This is the trainer's last call before it uses the optimizer.
        """
        if self._training and self._private is None:
            self._make_private(num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """As Trainer's; what torch_compile makes of the model is made here, where it can be kept for the engine."""
        wrapped = super()._wrap_model(model, training, dataloader)
        if self._training and training:
            if self.args.torch_compile:
                wrapped = self.accelerator.prepare_model(wrapped)
            self._trained = wrapped
        return wrapped

    def _make_private(self, steps: int) -> None:
        plain = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(plain, torch.optim.Optimizer):
            raise ParameterError(f"{type(plain).__name__} is no torch.optim.Optimizer")
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        held = {id(p) for group in plain.param_groups for p in group["params"]}
        left = [name for name, p in named.items() if id(p) not in held]
        if left:
            raise ParameterError(
                f"{left[:5]} ({len(left)} parameters) require grad but are not the optimizer's, so they would not be "
                "trained: add them to it, or freeze them (requires_grad_(False))"
            )
        if not self._lies_in_parts():
            self._examine()
        options = {**self.privacy.engine_options(), **self._noise_for(steps, self._trained)}
        self._private = privatize(plain, self._trained, **options)
        self._taken_over = self._private._privacy.ledger.spent
        if self.privacy.graphed and self.args.torch_compile:
            raise StepError("graphed=True and torch_compile=True are two ways to the same end: leave one of them out")
        if self.args.torch_compile:
            logger.warning(
                "torch_compile=True compiles evaluation only: private training runs the model as it is. "
                "PrivacyArguments(graphed=True) makes training faster instead"
            )
        if self.privacy.graphed:
            self._graphed = self._private.graphed(self._losses, sizes=(self.args.train_batch_size,))

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        private, source = self._attached(), self._batches
        run = private._privacy
        if isinstance(prepared[0], DistributedDataParallel):
            run.replica.adopt(prepared[0])
        chosen = self.privacy.noise_multiplier
        if self._resumed is not None:
            if chosen is not None and private.noise_multiplier != chosen:
                raise AccountingError(
                    f"the checkpoint's run had noise_multiplier={private.noise_multiplier}, this one has {chosen}"
                )
            run.ledger.begin([*self._taken_over, *self._resumed.history])
            source.loader.load_state_dict(self._resumed.loader)
        else:
            run.ledger.begin([*self._taken_over, *self._history])  # of an earlier training of the same model
        self._take_up()
        if (logged := self._logged_history()) is not None:
            run.ledger.begin([*self._taken_over, *logged])
        run.ledger.warn(stacklevel=2)  # of steps of a trainer or optimizer that is detached by now
        self._place = source.loader.state_dict()
        self._plan(max_steps)
        self._accounting = [time.monotonic(), 0.0]
        return prepared

    # ------------------------------------------------------------------ the step

    def _takes_losses(self) -> bool:
        return self.compute_loss_func is None and type(self).compute_loss is DPTrainer.compute_loss

    def _losses(self, model: nn.Module, inputs: Any) -> Tensor:
        """What compute_loss says of the batch: one loss per sample [B], or their mean."""
        self._learning = True
        try:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, dict(inputs))
        finally:
            self._learning = False
        return loss[0] if isinstance(loss, tuple) else loss

    def _step_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        """The loss that is trained on: the mean over the samples' own."""
        return reduced(self._losses(model, inputs), size_of(inputs))

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training, return one loss per sample [B], or the result of compute_loss_func.

        In evaluation, return Trainer's loss.
        """
        if not self._learning:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        given, labels = without_labels(self.model, inputs)
        if self._fused is not None:
            losses = self._fused.losses(model, given, labels["labels"], self.args.label_smoothing_factor)
            return (losses, {}) if return_outputs else losses
        if self.compute_loss_func is None:
            self._known_head(inputs)
        outputs = model(**given)
        if self.compute_loss_func is not None:
            target = labels.get("labels", labels or None)
            loss = self.compute_loss_func(outputs, target, num_items_in_batch=None)
        else:
            head = self._known_head(inputs)
            found = head.losses(outputs, labels, self.args.label_smoothing_factor)
            if found is None:
                raise StepError(f"the batch is not like the first ones: {head.name} no longer fits its labels")
            loss = found
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of the physical batches that a ticket stands for, and return 0.

        Their losses are logged when Trainer logs, averaged over tokens where Trainer's are.
        """
        if not isinstance(inputs, Ticket):
            raise StepError("DPTrainer's training step takes tickets of its own loader, not batches")
        private = self._attached()
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        while not self._complete:
            self._physical_batch(model, private, inputs)
            if not inputs.last:
                break
        self._complete = self._complete and not inputs.last
        return torch.zeros((), device=self.args.device)

    def _physical_batch(self, model: nn.Module, private: PrivateOptimizer, ticket: Ticket) -> None:
        raw, current = self._batches.next()
        if current.size:
            batch = self._prepare_inputs(raw)
            if self._graphed is None:
                losses = self._losses(model, batch)
                loss = reduced(losses, size_of(batch))
            else:
                self._graphed.backward(dict(batch))
                losses = self._graphed.losses
            self._losses_seen.add(losses.detach(), current.size, self._head and self._head.tokens(batch))
            ticket.flops += int(super().floating_point_ops(batch))
            super()._track_num_input_tokens(batch)
            del batch
            every = self.args.torch_empty_cache_steps
            if every is not None and self.state.global_step % every == 0:
                transformers.trainer.clear_device_cache()
            if self._graphed is None:
                self.accelerator.backward(loss)
            self._note_clipped(private)
        elif self._lies_in_parts():
            self._stand_in(model, private)
        self._complete, self._whole = current.final, current.whole
        if not current.final:
            private.step()  # accumulates
            private.zero_grad()

    def _note_clipped(self, private: PrivateOptimizer) -> None:
        if self.privacy.log_clipped_share and isinstance(private.norms, Tensor):
            clipped = (private.norms > private.max_grad_norm).sum()  # which adaptive clipping moves
            before, norms = self._clipped or (torch.zeros_like(clipped), [])
            self._clipped = before + clipped, [*norms, private.norms.detach()]

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of the batches of a ticket."""
        return inputs.flops if isinstance(inputs, Ticket) else int(super().floating_point_ops(inputs))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not isinstance(inputs, Ticket):
            super()._track_num_input_tokens(inputs)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None  # gradients are clipped by sample

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        return None

    # ------------------------------------------------------------------ logs, checkpoints, the end

    def _taken_loss(self) -> float:
        return self._losses_seen.take(lambda sums: self.accelerator.reduce(sums, "sum"))

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *positional: Any, **named: Any) -> None:
        steps = self.state.global_step - self._globalstep_last_logged
        if self.control.should_log and steps > 0:
            tr_loss.fill_(self._taken_loss() * steps)  # which Trainer divides by them
        super()._maybe_log_save_evaluate(tr_loss, *positional, **named)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Run Trainer.log, and add the epsilon so far to a training loss unless computing it would take too long."""
        if self._training and ("loss" in logs or "train_loss" in logs):
            logs.update(self._privacy_logs(final="train_loss" in logs))
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The model, and privacy.json beside it."""
        super()._save(output_dir, state_dict)
        if (self.history or self._run_log is not None) and self.args.should_save:
            folder = output_dir if output_dir is not None else self.args.output_dir
            ledger.write(folder, self._spent(), self.epsilon())

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        self._leave()
        self._taken_loss()  # what was not logged
        self._tr_loss.zero_()
        self._total_loss_scalar = self._losses_seen.mean() * (self.state.global_step - self._initial_global_step)
        if self.history and self.args.should_save:
            ledger.write(self.args.output_dir, self._spent(), self.epsilon())
        return super()._finalize_training(trial, num_train_samples, start_time)
