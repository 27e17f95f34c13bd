"""Forwards within `optimizer.public()`: ordinary forwards of public batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..batch_axis.generations import LOADERS
from ..batch_axis.inputs import nested_tensors
from ..batch_axis.tensor_notes import LOADED, MOMENT
from ..errors import StepError
from ..utils.autograd_graph import on_gradient
from .backward import Backward


class PublicForward:
    """The outermost call of the model or a part of it."""

    def __init__(self, backward: Backward, given: Any) -> None:
        self._backward = backward
        for tensor in nested_tensors(given):
            moment = tensor.__dict__.get(MOMENT)
            if LOADED in tensor.__dict__ or (moment is not None and (moment.owner is LOADERS or moment.before)):
                raise StepError(
                    "the model is given a batch of a poisson_loader within public(), where nothing is clipped or "
                    "noised: train on it outside of public()."
                )

    def leave(self, out: Any) -> None:
        """Its backward must be within `public()`, too."""
        for tensor in nested_tensors(out):
            if tensor.requires_grad:
                on_gradient(tensor, self._arrived)

    def _arrived(self, grad: Tensor) -> None:
        if not self._backward.public:
            raise StepError(
                "a backward outside of public() through a forward that was made within it, so that its gradients would "
                "get lost: call backward() within public(), too."
            )
