"""What a DPTrainer's run spends: the account, the plan within a budget, and what a checkpoint has spent."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import SaveStrategy

from ..accounting import epsilon_of, noise_multiplier_for, warn_of_delta
from ..accounting.card import PrivacyCard
from ..accounting.participation import block_of
from ..accounting.runs import most_within, steps_in, steps_within
from ..data.grouping import column
from ..errors import AccountingError, StepError
from ..mechanisms import CycleLoader
from ..optim import adaptive_clipping
from ..optim.correlated_noise import Blocks, CorrelatedStep
from ..optim.optimizer_replacement import spent_before
from ..optim.optimizers import PrivateOptimizer
from ..utils.formatting import at_most
from . import ledger
from .batches import Source
from .correlated import SAMPLING, strategy_of
from .options import PrivacyArguments

logger = transformers.utils.logging.get_logger("transformers.fastdp")
NORM_QUANTILES = {"norm_p10": 0.1, "norm_median": 0.5, "norm_p90": 0.9}
ACCOUNTING_SHARE, ACCOUNTING_FREE = 0.05, 30.0  # of the time, and seconds, at most for epsilon in the logs


class Spending:
    """The part of `DPTrainer` that keeps the account."""

    args: Any
    accelerator: Any
    state: Any
    control: Any
    train_dataset: Any
    privacy: PrivacyArguments

    def _begin_account(self, privacy: PrivacyArguments) -> None:
        self.privacy = privacy
        self._private: PrivateOptimizer | None = None  # while it trains
        self._left: PrivateOptimizer | None = None  # that of the last training
        self._source: Source | None = None
        self._history: ledger.History = []  # of everything this trainer and its checkpoint have spent
        self._counted: str | None = None  # between which data sets
        self._place: dict[str, Any] = {}
        self._allowed: int | None = None  # noised steps in all before the budget is spent
        self._resumed: ledger.Spent | None = None
        self._clipped: tuple[Tensor, list[Tensor]] | None = None  # how many since the last log, and the norms of all
        self._computed: tuple[tuple[Any, float], float] | None = None  # the last epsilon, and of what
        self._accounting = [0.0, 0.0]  # when training began, and seconds spent on epsilon since

    @property
    def _batches(self) -> Source:
        """The physical batches of the run."""
        assert self._source is not None
        return self._source

    def _attached(self) -> PrivateOptimizer:
        if self._private is not None:
            return self._private
        raise StepError("DPTrainer trains by train(): its step needs the private optimizer made there")

    @property
    def history(self) -> ledger.History:
        """(noise multiplier, sample rate, steps) of every noised step, those of the resumed checkpoint included."""
        return list(self._private.history) if self._private is not None else list(self._history)

    def delta(self) -> float:
        """delta of the guarantee: `accounting.default_delta` of the records or groups, unless given."""
        return self.privacy.delta_for(self._records())

    def epsilon(self, delta: float | None = None) -> float:
        """epsilon at delta (default: the run's) of all steps so far."""
        if delta is not None:
            warn_of_delta(delta, self._records())
        blocks = self._blocks
        spent: list[Any] = self.history if blocks is None else list(blocks.all.values())
        asked = (tuple(spent), self.delta() if delta is None else delta)
        if self._computed is None or self._computed[0] != asked:  # logs and checkpoints ask for the same
            of = epsilon_of if blocks is None else blocks.strategy.epsilon
            self._computed = asked, of(spent, asked[1], self.privacy.accountant)
        return self._computed[1]

    @property
    def _blocks(self) -> Blocks | None:
        """The blocks of correlated noise, in this training or in the last one."""
        private = self._private or self._left
        return None if private is None else private._privacy.mechanism

    def privacy_card(self) -> PrivacyCard:
        """What is guaranteed about the weights so far, as a page (`json()`, `html()`, `save(path)`).

        Raises AccountingError before training.
        """
        private = self._private or self._left
        if private is None:
            raise AccountingError("a privacy card tells of training: call train() first")
        return private.privacy_card(self.delta())

    def _records(self) -> int:
        """Samples in the training data: records, or groups of them."""
        if self._source is not None:
            return int(self._source.loader.sampler.size)
        keys = self._group_keys()
        return len(self.train_dataset) if keys is None else len(set(keys))

    def _group_keys(self) -> list[Any] | None:
        """The key of each record, where samples are groups of them."""
        name = self.privacy.group_by
        keys = None if name is None else column(self.train_dataset, name)
        try:
            set(keys or ())
        except TypeError as problem:
            raise ValueError(
                f"group_by: the values of {name!r} cannot be keys of persons ({problem}): give a column of texts or of "
                "whole numbers"
            ) from None
        return keys

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial spends privacy of its own, and so does the choice among them."""
        raise AccountingError(
            "hyperparameter_search trains on the private data once a trial, and chooses by what it saw: the epsilon of "
            "one trial would not hold. Search on public data, or train each with a DPTrainer and add their epsilons"
        )

    def _spent_before(self, checkpoint: str) -> ledger.Spent:
        """What a checkpoint has spent; with the steps that its run made after it, unless those will be repeated."""
        spent = ledger.read(checkpoint)
        if spent is None or not (Path(checkpoint) / self._state_file()).exists():
            raise AccountingError(
                f"{checkpoint} has no {ledger.NAME} and {self._state_file()}, so what it has spent and where it stood "
                "is not known: it was saved by another trainer, with save_only_model=True, or with other settings of "
                "fsdp and its state_dict_type"
            )
        options = self._options()
        seldom = (*adaptive_clipping.OPTIONS, "noise")
        for name in (*options, *seldom):
            mine = options.get(name)
            theirs = spent.options.get(name, None if name in seldom else mine)
            if theirs != mine:
                raise AccountingError(f"the checkpoint's run had {name}={theirs!r}, this one has {mine!r}")
        after = ledger.read(Path(checkpoint).parent)
        for found in filter(None, (spent, after)):
            self._refuse_other_neighbours(found.options.get("neighbours"), f"the run of {checkpoint}")
        # the very same steps will be made again, or the log of the run counts them
        repeated = self.privacy.noise_seed is not None or self.privacy.repeat_lost_steps
        if after is None:
            logger.warning(f"no {ledger.NAME} beside {checkpoint}: steps made after it, if any, are not counted")
        elif not ledger.continues(after.history, spent.history):
            if ledger.continues(spent.history, after.history):
                return spent
            if self.privacy.count_lost_steps:
                logger.warning(
                    f"{ledger.NAME} beside {checkpoint} is of another run: its {after.steps} steps are added to the "
                    f"{spent.steps} of the checkpoint, as both may have seen this data"
                )
                lost = [*spent.options.get("blocks", ()), *after.options.get("blocks", ())]
                return spent._replace(
                    history=[*spent.history, *after.history], options={**spent.options, "blocks": lost}
                )
        elif after.steps > spent.steps and self.privacy.count_lost_steps and not repeated:
            logger.warning(f"{after.steps - spent.steps} steps made after {checkpoint} are lost, and stay counted")
            lost = after.options.get("blocks", ())
            return spent._replace(history=after.history, options={**spent.options, "blocks": lost})
        return spent

    def _neighbours(self) -> str:
        """What the account is of."""
        if self.privacy.noise is not None:
            return "one sample added or removed, whose places in its batches stay empty without it"
        if self.privacy.group_by is None:
            return "one sample added or removed"
        return f"all records of one value of {self.privacy.group_by!r} added or removed"

    def _refuse_other_neighbours(self, before: str | None, run: str) -> None:
        """Steps that protect records and steps that protect persons have no epsilon in common."""
        if before is not None and before != self._neighbours():
            raise AccountingError(
                f"{run} is accounted for {before}, this one for {self._neighbours()}: no one epsilon holds for the "
                "steps of both. Keep group_by as it was, or train a new model in another output_dir"
            )

    def _saves_parts(self) -> bool:
        """Whether checkpoints hold parts (SHARDED_STATE_DICT), and save_model saves nothing."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        return plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type)

    def _state_file(self) -> str:
        """What holds the optimizer's state in a checkpoint that this trainer can take up."""
        if getattr(self.accelerator.state, "fsdp_plugin", None) is None:
            return "optimizer.pt"
        return "optimizer_0" if self._saves_parts() else "optimizer.bin"

    def _noise_for(self, steps: int, model: nn.Module) -> dict[str, Any]:
        """The strategy of the noise, and the noise multiplier that was given, or with which so many steps, and those
        made before, keep the budget."""
        sigma, loader = self.privacy.noise_multiplier, self._batches.loader
        wanted: Any = {
            "target_epsilon": self.privacy.target_epsilon, "delta": self.delta(), "steps": steps,
            "accountant": self.privacy.accountant,
        }  # fmt: skip
        if isinstance(loader, CycleLoader):
            noise = strategy_of(self.privacy.noise, steps, loader.participation)
            noise.check(loader.participation)
            if sigma is None:
                before = self._blocks.all.values() if self._blocks is not None and self._resumed is None else ()
                sigma = noise.noise_multiplier(**wanted, participation=loader.participation, before=before)
            return {"noise_multiplier": sigma, "noise": noise}
        if sigma is None:
            history = (
                [*spent_before(model, self.privacy.target_epsilon), *self._history] if self._resumed is None else None
            )
            sigma = noise_multiplier_for(**wanted, sample_rate=loader.sample_rate, history=history)
        return {"noise_multiplier": sigma}

    def _carry_blocks(self, blocks: Blocks) -> None:
        """Count the blocks of an earlier training, or those that were begun or went on after the checkpoint."""
        if self._resumed is not None:
            try:
                blocks.add(block_of(*said) for said in self._resumed.options.get("blocks", ()))
            except (TypeError, ValueError) as problem:
                raise AccountingError(f"{ledger.NAME} has blocks of noise that are none: {problem!r}") from None
        elif self._left is not None and self._history:
            before = self._left._privacy.mechanism
            if before is None or before.name != blocks.name:
                raise AccountingError(
                    "an earlier training of this trainer had other noise, and no one epsilon holds for the steps of "
                    "both: keep PrivacyArguments.noise and the number of steps, or train a new model with a new trainer"
                )
            blocks.add(before.all.values())

    def _plan(self, max_steps: int) -> None:
        """How many steps the budget allows; raises AccountingError where it allows none."""
        target, history, run = self.privacy.target_epsilon, self.history, self._attached()._privacy
        if isinstance(run, CorrelatedStep):
            self._carry_blocks(run.mechanism)
        if target is None:
            return
        done, rest, loader = steps_in(history), max_steps - self.state.global_step, self._batches.loader
        by, delta = self.privacy.accountant, self.delta()
        if isinstance(run, CorrelatedStep) and isinstance(loader, CycleLoader):
            spent, place, promise = run.mechanism.strategy.epsilon, self._place["step"], loader.participation
            allowed = most_within(
                rest, lambda steps: spent(run.blocks_after(steps, promise, place), delta, by) <= target
            )
        else:
            allowed = steps_within(target, history, (run.noise_multiplier, loader.sample_rate, rest), delta, by)
        if allowed == 0 and self.state.global_step < max_steps:
            raise AccountingError(
                f"the budget is spent: {done} steps have taken epsilon {at_most(self.epsilon(), 6)} of {target} at "
                f"delta {self.delta():.3g}. A larger target_epsilon, or new data, allows more"
            )
        if self.state.global_step + allowed < max_steps:
            logger.warning(f"the budget allows {allowed} more steps of {max_steps - self.state.global_step}")
        self._allowed = done + allowed

    def _run_epoch(self, *positional: Any, **named: Any) -> None:
        """Of a run that has made all its steps: nothing. Trainer would make one more where it is taken up there."""
        if self._private is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*positional, **named)  # type: ignore[misc]

    def after_step(self) -> bool:
        """Note the step that was made; True where the budget allows no further one."""
        if self._private is None or self._source is None:
            return False
        self._place = self._source.loader.state_dict()
        if self.args.should_save:
            ledger.write(self.args.output_dir, self._spent(), None)
        return self._allowed is not None and steps_in(self.history) >= self._allowed

    def before_step(self) -> None:
        """Called when a step begins."""

    def _is_over(self) -> bool:
        """Whether the run has made its last step."""
        spent = self._allowed is not None and steps_in(self.history) >= self._allowed
        return spent or self.state.global_step >= self.state.max_steps

    def _options(self) -> dict[str, Any]:
        named = self.privacy.engine_options()
        clipping = named["clipping"]
        return {
            "max_grad_norm": named["max_grad_norm"],
            "clipping": clipping if isinstance(clipping, str) else getattr(clipping, "__name__", "function"),
            "style": named["style"],
            "noise_seed": named["seed"],
            **{name: named[name] for name in adaptive_clipping.OPTIONS if named[name] is not None},
            **(
                {} if self.privacy.noise is None else {"noise": getattr(self.privacy.noise, "mark", self.privacy.noise)}
            ),
        }

    def _spent(self) -> ledger.Spent:
        told: dict[str, Any] = {"sampling": "Poisson", "sample_rate": None}
        if self._blocks is not None:
            plain = [block.plain for block in self._blocks.all.values()]
            told = {"sampling": self.privacy.sampling or SAMPLING[0], "blocks": plain}
        elif self._source is not None:
            told["sample_rate"] = self._source.loader.sample_rate
        told |= {
            "delta": self.delta(), "accountant": self.privacy.accountant, "neighbours": self._neighbours(),
            **self._options(),  # not the count of samples left out, which no guarantee covers: checkpoints get uploaded
        }  # fmt: skip
        return ledger.Spent(self.history, self._place, told)

    def _privacy_logs(self, final: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        began, spent = self._accounting
        now = time.monotonic()
        if final or spent <= max(ACCOUNTING_FREE, ACCOUNTING_SHARE * (now - began)):
            found["epsilon"] = self.epsilon()
            self._accounting[1] += time.monotonic() - now
        if self._private is not None:
            found["noise_multiplier"] = self._private.noise_multiplier
            if self._private.nonfinite_samples:
                found["nonfinite_samples"] = self._private.nonfinite_samples
        if self._clipped is not None:
            clipped, norms = self._clipped
            seen = torch.cat(norms)
            found["clipped_share_not_private"] = float(clipped) / max(len(seen), 1)
            finite = seen[seen.isfinite()].double().numpy(force=True)  # torch.quantile takes 16 million at most
            for name, share in NORM_QUANTILES.items():
                found[f"{name}_not_private"] = float(np.quantile(finite, share)) if len(finite) else math.nan
            self._clipped = None
        return found


class Watch(transformers.TrainerCallback):
    """Seeds each noised step, notes it in privacy.json, and stops where the budget is spent."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.privacy.repeat_lost_steps and state.global_step == 0:
            self.trainer._save_checkpoint(kwargs["model"], None)  # to repeat the first steps from

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.after_step() and not control.should_training_stop:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy == SaveStrategy.STEPS
