"""Forwards within `optimizer.public()`: ordinary forwards of public batches, which nothing of a private one is in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..batch_axis.generations import LOADERS
from ..batch_axis.inputs import nested_tensors
from ..batch_axis.operator_table import SHAPED, TAKING_A_PATTERN, function_name, is_in_place
from ..batch_axis.tensor_notes import LOADED, MOMENT
from ..errors import StepError
from ..utils.autograd_graph import on_gradient
from ..utils.pytree import tensors_in
from .backward import Backward
from .call_cache import inquires

_MADE_OF_LOADED = "_fastdp_made_of_loaded"  # within `public()`
_SHAPED = SHAPED | {"new_tensor", "randint_like"}  # of the first tensor, only its shape and type
_WITHIN = "within public(), where nothing is clipped or noised: train on it outside of public()."


def _is_private(tensor: Tensor) -> bool:
    """Whether a loader of private records has handed it out, or it was made of what one has."""
    notes = tensor.__dict__
    moment = notes.get(MOMENT)
    return (
        LOADED in notes
        or _MADE_OF_LOADED in notes
        or (moment is not None and (moment.owner is LOADERS or bool(moment.before)))
    )


class PublicBlock(TorchFunctionMode):
    """On within `public()`: notes what is made there of batches that loaders of private records handed out."""

    def __init__(self, backward: Backward) -> None:
        super().__init__()
        self._backward = backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, name = tensors_in((args, kwargs)), function_name(func)
        taken = given[1:] if name in _SHAPED else given[:1] if name in TAKING_A_PATTERN else given
        private = any(map(_is_private, taken)) and not inquires(func)
        if private and func in (Tensor.backward, torch.autograd.backward):
            self._backward.of_private_loss = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._backward.of_private_loss = False
        if private:
            written = given[:1] if is_in_place(name) else tensors_in(kwargs.get("out"))
            for tensor in (*tensors_in(out), *written):
                tensor.__dict__[_MADE_OF_LOADED] = True
        return out


class PublicForward:
    """The outermost call of the model or a part of it."""

    def __init__(self, backward: Backward, given: Any) -> None:
        self._backward = backward
        for tensor in nested_tensors(given):
            if _is_private(tensor):
                raise StepError(f"the model is given a batch of a poisson_loader, or what was made of one, {_WITHIN}")

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
        if self._backward.of_private_loss:
            raise StepError(f"a loss is computed with a batch of a poisson_loader (its labels, perhaps) {_WITHIN}")
