"""A DPTrainer whose model Accelerate lays in parts on all processes: fsdp=True, with `version` 2 of fsdp_config.

Trainer makes its optimizer, then `accelerator.prepare` calls `fully_shard` on the model, and then the optimizer is made
private. So the model is looked at before that, while it is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn

from ..distributed.fingerprints import mark_of_model
from ..distributed.frameworks import lays_in_parts
from ..distributed.sharded import is_sharded
from ..distributed.world import world_of
from ..optim.optimizers import PrivateOptimizer
from . import ledger
from .spending import Spending, logger


class InParts(Spending, transformers.Trainer):  # type: ignore[misc]
    """The part of `DPTrainer` that differs for a model in parts."""

    model: Any
    _training: bool
    _examine: Callable[[], None]
    _step_loss: Callable[[nn.Module, Any], Tensor]

    def _lies_in_parts(self) -> bool:
        return is_sharded(self.model)

    def create_optimizer(self, model: Any = None) -> Any:
        """Trainer.create_optimizer, before which a model that is about to be laid in parts is examined."""
        if self._training and lays_in_parts() and not self._lies_in_parts():
            world_of().agree({"model (its weights, in names, shapes and values)": mark_of_model(self.model)})
            self._examine()
        return super().create_optimizer() if model is None else super().create_optimizer(model)

    def _stand_in(self, model: nn.Module, private: PrivateOptimizer) -> None:
        """Forward and backward of a process that has no record in this physical batch, for those that have."""
        inner: Any = self._source and self._source.loader
        with private._privacy.loader_batch.standing_in():
            batch = self._prepare_inputs(inner.loader.collate_fn.collate([inner.dataset[0]]))
            self.accelerator.backward(self._step_loss(model, batch))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer.save_model, and privacy.json also where that saves nothing."""
        super().save_model(output_dir, _internal_call)
        if not self._saves_parts():
            return
        if not _internal_call:
            logger.warning(
                "save_model saves no weights under state_dict_type SHARDED_STATE_DICT, checkpoints hold them: merge "
                "those of one by `accelerate merge-weights`, or leave state_dict_type out of fsdp_config"
            )
        if self.history and self.args.should_save:
            ledger.write(str(output_dir or self.args.output_dir), self._spent(), self.epsilon())
