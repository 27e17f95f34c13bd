"""Links from derived tensors to the parameters that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy

from ..batch_axis import tensor_notes


class Link(NamedTuple):
    """How a tensor was derived from parameters alone; autograd holds the graph.

    isometric: the whole chain only moves, casts or drops elements, so norms are those of the gradient here.
    kind "cast" only changes the type of the one leaf;
    kind "broadcast" (of `parent`) and "lookup" (rows `ids` of `parent`) have gradients in closed form.
    """

    leaves: tuple[Tensor, ...]
    parent: Tensor
    kind: str
    isometric: bool
    ids: Tensor | None = None
    again: tuple[Callable[..., Any], ...] = ()  # what checkpointing runs again to pull gradients back: `regions`
    version: int = 0  # of the derived tensor: another one says that it was written to through a view


def link_of(tensor: Tensor) -> Link | None:
    """The link of a derived tensor; None for a parameter and for data."""
    return tensor.__dict__.get(tensor_notes.LINK)


def set_link(tensor: Tensor, link: Link | None) -> None:
    if link is None:
        tensor.__dict__.pop(tensor_notes.LINK, None)
    else:
        tensor.__dict__[tensor_notes.LINK] = link


def leaves_of(operand: Tensor) -> tuple[Tensor, ...]:
    """The parameters that an operand is made of."""
    link = link_of(operand)
    return (operand,) if link is None else link.leaves


def span_of(operand: Tensor, leaf: Tensor) -> tuple[int, int]:
    """The first and last element of the leaf that the operand is made of: a slice's own, else all."""
    if is_lazy(leaf):
        return (0, 0)
    link = link_of(operand)
    whole = (0, max(leaf.numel() - 1, 0))
    if link is None or not link.isometric or len(link.leaves) != 1 or not leaf.is_contiguous():
        return whole
    if operand.dtype != leaf.dtype or operand.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
        return whole
    start = int(operand.storage_offset() - leaf.storage_offset())
    return start, start + sum((n - 1) * step for n, step in zip(operand.shape, operand.stride(), strict=True))


class Unwritten:
    """Tensors that must stay as they are while a forward runs."""

    def __init__(self) -> None:
        self._versions: dict[tuple[int, int], Tensor] = {}  # by identity and version; kept, so that no other has it

    def add(self, tensor: Tensor) -> None:
        """As it is now."""
        self._versions[id(tensor), tensor._version] = tensor

    def renew(self, value: object) -> None:
        """What was written into it, if it is one of these, is accounted for."""
        for key, tensor in list(self._versions.items()):
            if tensor is value:
                del self._versions[key]
                self.add(tensor)

    def written(self) -> bool:
        """Whether one was written to since."""
        return any(tensor._version != version for (_, version), tensor in self._versions.items())
