"""The criterion of grad_sample_mode "ghost": an ordinary loss, averaged over each sample first."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from ..grad_sample import GradSampleHooksFastGradientClipping
from ..optimizers import DPOptimizerFastGradientClipping


def reduced(loss_per_sample: Tensor, loss_reduction: str) -> Tensor:
    """Losses [B, ...] to one number: each sample's mean (or sum), then that of the samples.

    Raises ValueError on a reduction that is neither "mean" nor "sum".
    """
    if loss_reduction == "mean":
        return loss_per_sample.mean()  # every sample has as many losses
    if loss_reduction == "sum":
        return loss_per_sample.sum()
    raise ValueError(f"loss_reduction = {loss_reduction}. Only 'sum' and 'mean' losses are supported")


class DPTensorFastGradientClipping:
    """DPTensorFastGradientClipping(module, optimizer, loss_per_sample, loss_reduction) is an ordinary scalar tensor.

    Its `backward()` is an ordinary one, at whose end the module's hooks clip; it may be added, scaled and divided.
    """

    def __new__(  # type: ignore[misc]
        cls, module: Any, optimizer: Any, loss_per_sample: Tensor, loss_reduction: str = "mean"
    ) -> Tensor:
        return reduced(loss_per_sample, loss_reduction)


class DPLossFastGradientClipping:
    """A criterion as `make_private(..., grad_sample_mode="ghost")` returns it.

    Any loss of the model's outputs is clipped, this one or another. This one takes the mean of each sample's losses
    before that of the batch, so that samples do not meet in a denominator (a mean over the tokens of all samples).
    Raises AssertionError where module, optimizer, criterion and loss_reduction disagree.
    """

    def __init__(
        self,
        module: GradSampleHooksFastGradientClipping,
        optimizer: DPOptimizerFastGradientClipping,
        criterion: Any,
        loss_reduction: str = "mean",
    ) -> None:
        assert loss_reduction in ("mean", "sum"), f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}"
        said = {
            "criterion": getattr(criterion, "reduction", loss_reduction),
            "module": module.loss_reduction,
            "optimizer": optimizer.loss_reduction,
        }
        odd = {name: value for name, value in said.items() if value != loss_reduction}
        assert not odd, f"loss_reduction should be the same everywhere: here {loss_reduction!r}, but {odd}"
        self.module, self.optimizer, self.criterion = module, optimizer, criterion
        self.loss_reduction = loss_reduction
        self._each = copy.copy(criterion)  # gives the losses one by one, if it can
        if hasattr(criterion, "reduction"):
            self._each.reduction = "none"

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> Tensor:
        """The loss, a scalar. shape: (B, T, ...) of the outputs, where the criterion is given them as [B * T, ...]."""
        losses: Tensor = self._each(*args, **kwargs)
        if shape is not None and losses.dim() and losses.shape[0] == shape[0] * shape[1]:
            losses = losses.view(shape[0], shape[1], *losses.shape[1:])
        if self.loss_reduction == "mean" and losses.dim() > 1:
            losses = self._sample_means(losses.flatten(1), kwargs.get("target", args[1] if len(args) > 1 else None))
        return reduced(losses, self.loss_reduction)

    def _sample_means(self, losses: Tensor, targets: Any) -> Tensor:
        """[B, N] to [B]: means over each sample's losses, without those that `ignore_index` leaves out."""
        ignore = getattr(self.criterion, "ignore_index", None)
        if ignore is None or not isinstance(targets, Tensor) or targets.numel() != losses.numel():
            return losses.mean(1)
        counted = (targets.reshape(losses.shape) != ignore).sum(1).clamp(min=1)
        return losses.sum(1) / counted.to(losses.device)
