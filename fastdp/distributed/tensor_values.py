"""Converts DTensors to local tensors and back, with explicit gradient placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .private_names import lies_here


def settled(tensor: Tensor) -> Tensor:
    """The numbers, where a collective that makes them may still be on its way."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()  # type: ignore[no-any-return]


class _Local(torch.autograd.Function):
    """What lies here; its gradient becomes a DTensor with these placements."""

    @staticmethod
    def forward(node: Any, whole: Any, placements: Any) -> Tensor:
        node.mesh, node.placements, node.shape = whole.device_mesh, placements, whole.shape
        found = settled(lies_here(whole))
        return found.view_as(found)

    @staticmethod
    def backward(node: Any, *grads: Tensor) -> Any:
        return _placed(settled(grads[0]), node.mesh, node.placements, node.shape), None


class _Whole(torch.autograd.Function):
    """A DTensor of what lies here; its gradient is laid out as it is, and copied where it is a part of a sum."""

    @staticmethod
    def forward(node: Any, local: Tensor, mesh: Any, placement: Any, shape: Any) -> Any:
        from torch.distributed.tensor import Replicate

        node.mesh, node.placements = mesh, (Replicate(),) if placement.is_partial() else (placement,)
        return _placed(local.view_as(local), mesh, (placement,), shape)

    @staticmethod
    def backward(node: Any, *grads: Any) -> Any:
        found = grads[0]
        if tuple(found.placements) != node.placements:
            found = found.redistribute(node.mesh, node.placements)
        return settled(lies_here(found)), None, None, None


class _Settled(torch.autograd.Function):
    """The same, with no collective on its way, in the forward and the backward."""

    @staticmethod
    def forward(node: Any, tensor: Tensor) -> Tensor:
        found = settled(tensor)
        return found.view_as(found)

    @staticmethod
    def backward(node: Any, *grads: Any) -> Any:
        return settled(grads[0])


def _placed(local: Tensor, mesh: Any, placements: Any, shape: Sequence[int]) -> Any:
    from torch.distributed.tensor import DTensor

    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(reversed(strides))
    )


def local_of(whole: Any, gradient: Sequence[Any]) -> Tensor:
    """What lies here of a DTensor. gradient: the placements of what comes back."""
    with torch._C.DisableTorchFunction():
        return _Local.apply(whole, tuple(gradient))  # type: ignore[no-any-return, no-untyped-call]


def as_whole(local: Tensor, mesh: Any, placement: Any, shape: Sequence[int]) -> Any:
    """The DTensor of this shape, of which this lies here."""
    with torch._C.DisableTorchFunction():
        return _Whole.apply(local, mesh, placement, torch.Size(shape))  # type: ignore[no-untyped-call]


def settled_for_autograd(tensor: Tensor) -> Tensor:
    """A plain tensor whose numbers, and whose gradient's, are there."""
    return _Settled.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
