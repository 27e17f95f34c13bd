"""What a DPTrainer looks at before its first step, while the model is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StepError
from ..losses.language_model_head import FusedHead
from .batches import varied
from .checks import check_model, check_padding, check_rows, evaluating
from .losses import Head, find_head, rows, without_labels
from .spending import Spending, logger


class Examination(Spending):
    """The part of `DPTrainer` that finds the head, and verifies the model and the loss on a few records."""

    model: Any
    _prepare_inputs: Callable[[Any], Any]
    _step_loss: Callable[[nn.Module, Any], Tensor]
    _takes_losses: Callable[[], bool]
    _head: Head | None = None
    _fused: FusedHead | None = None

    def _examine(self) -> None:
        """Find the head, and verify the model and the loss on a few records."""
        inner = self._batches.loader
        collate, data = inner.loader.collate_fn.collate, inner.dataset  # type: ignore[union-attr]
        # from everywhere: where the data is sorted by length, the first records would all be as long
        places = sorted({k * (len(data) - 1) // 15 for k in range(16)}) if len(data) else []
        examples = varied([data[index] for index in places], collate)
        half = self._is_half()
        with evaluating(self.model):
            batch = self._beside_model(collate(examples))
            check_rows(batch, len(examples))
            if self._takes_losses():
                with torch.no_grad():
                    self._find_loss(batch, 3e-2 if half else 1e-3)
            if self.privacy.fused_loss:
                self._fuse(batch, half)
            open_question = check_padding(
                self.model, self._step_loss, collate, self._beside_model, examples, 5e-2 if half else 1e-3,
                self.privacy.per_sample_max_grad_norm,
            )  # fmt: skip
            if open_question:
                logger.warning(open_question)
            if not self.privacy.verify or len(examples) < 2:
                return
            report = check_model(self.model, self._step_loss, batch, {}, 5e-2 if half else None)
            logger.info(str(report))

    def _is_half(self) -> bool:
        """Whether forwards are in 16 bits, and so less accurate."""
        return self.args.bf16 or any(p.dtype in (torch.bfloat16, torch.float16) for p in self.model.parameters())

    def _known_head(self, batch: Any) -> Head:
        """The head; found here where a compute_loss of the user's calls DPTrainer's."""
        if self._head is None:
            with evaluating(self.model), torch.no_grad():
                Examination._find_loss(self, batch, 3e-2 if self._is_half() else 1e-3)
        assert self._head is not None
        return self._head

    def _find_loss(self, batch: Any, tolerance: float) -> None:
        """Find out what the loss of a sample is, or raise StepError. Called in eval mode, without gradients."""
        self._head = find_head(self.model, batch, tolerance)
        if self.args.label_smoothing_factor and not self._head.smooths:
            raise StepError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} has no meaning for the head of "
                f"{type(self.model).__name__} ({self._head.name}); leave it 0"
            )

    def _beside_model(self, batch: Any) -> Any:
        """The inputs where the model lies: FSDP moves it to the device when it lays it in parts."""
        device = next(self.model.parameters()).device
        inputs = self._prepare_inputs(batch)
        if device == self.args.device:
            return inputs
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def _fuse(self, batch: Any, half: bool) -> None:
        """From now on losses are computed without logits. Raises StepError if those would be others."""
        if self._head is None or self._head.name != "next token" or self.args.torch_compile:
            why = "torch_compile=True" if self.args.torch_compile else "a loss of your own, or no causal language model"
            raise StepError(f"fused_loss=True fuses the head of a causal language model with its loss, not with {why}")
        fused = FusedHead(self.model)
        fused.check(self.model, without_labels(self.model, rows(batch, 0, 2))[0], 3e-2 if half else 1e-4)
        self._fused = fused
