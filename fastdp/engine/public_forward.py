"""Forwards within `optimizer.public()`: ordinary forwards of public batches, which nothing of a private one is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..batch_axis.generations import LOADERS
from ..batch_axis.inputs import nested_tensors
from ..batch_axis.operator_table import SHAPED, TAKING_A_PATTERN, function_name, is_in_place
from ..batch_axis.tensor_notes import LOADED, MOMENT, PRESUMED, storage_of
from ..errors import StepError
from ..utils.autograd_graph import graph_nodes, on_gradient
from ..utils.pytree import tensors_in
from .backward import Backward
from .call_cache import inquires

_SHAPED = SHAPED | {"new_tensor", "randint_like"}  # of the first tensor, only its shape and type
_OVERWRITING = frozenset("zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_".split())
_DIFFERENTIATING = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_WITHIN = "within public(), where nothing is clipped or noised: train on it outside of public()."

_MADE = "_fastdp_made_of_records"  # within `public()`, on tensors and storages: of which of these
_OF_RECORDS, _OF_THEIR_SHAPE = 2, 1  # the second: or of their numbers, before the block


def _private(tensor: Tensor) -> int:
    """What a tensor has of a batch of private records: 0 if nothing."""
    notes, storage, moment = tensor.__dict__, storage_of(tensor), tensor.__dict__.get(MOMENT)
    made = max(notes.get(_MADE, 0), getattr(storage, _MADE, 0))
    if LOADED in notes or made == _OF_RECORDS:
        return _OF_RECORDS
    followed = moment is not None and (moment.owner is LOADERS or bool(moment.before)) and PRESUMED not in notes
    return max(made, _OF_THEIR_SHAPE if followed else 0)


def _note_memory(tensor: Tensor, private: int) -> None:
    for holder in (tensor, storage_of(tensor)):
        if holder is not None:  # (of sparse tensors)
            setattr(holder, _MADE, private)


class PublicBlock(TorchFunctionMode):
    """On within `public()`: notes what is made there of batches that loaders of private records handed out, and refuses
    to train on it."""

    def __init__(self, backward: Backward) -> None:
        super().__init__()
        self._backward = backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, name = tensors_in((args, kwargs)), function_name(func)
        if inquires(func) or not given:
            return func(*args, **kwargs)
        anew = name in _OVERWRITING and not given[0]._is_view()
        taken = given[1:] if anew or name in _SHAPED else given[:1] if name in TAKING_A_PATTERN else given
        private = max(map(_private, taken), default=0)
        target = given[0] if is_in_place(name) or (name == "data" and len(given) > 1) else None
        if private == _OF_RECORDS:
            self._refuse(func, tensors_in(args[:1]), target)
        out = func(*args, **kwargs)
        if private:
            for tensor in tensors_in(out):
                tensor.__dict__[_MADE] = max(private, tensor.__dict__.get(_MADE, 0))
            for tensor in tensors_in(kwargs.get("out")) if target is None else (target,):
                _note_memory(tensor, private)
        elif anew:
            _note_memory(given[0], 0)
        return out

    def _refuse(self, func: Any, roots: Sequence[Tensor], target: Tensor | None) -> None:
        """Raises StepError where records would move the model's parameters."""
        mine = {id(p): p for p in self._backward.tracked.named().values()}
        if func in _DIFFERENTIATING:
            leaves = (getattr(node, "variable", None) for node in graph_nodes(root.grad_fn for root in roots))
            if any(id(leaf) in mine for leaf in leaves):
                raise StepError(f"a loss is computed with a batch of a poisson_loader (its labels, perhaps) {_WITHIN}")
        elif target is not None and any(target is p or target is p.grad for p in mine.values()):
            raise StepError(f"a parameter, or its .grad, is written to with a batch of a poisson_loader {_WITHIN}")


class PublicForward:
    """The outermost call of the model or a part of it."""

    def __init__(self, backward: Backward, given: Any) -> None:
        self._backward = backward
        for tensor in nested_tensors(given):
            if _private(tensor):
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
