"""What recordings know of a batch: its parts, which of them have a row for each sample, and batches of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten


class Batch(NamedTuple):
    """How a batch is made: its leaves, of which some have a row for each sample."""

    spec: TreeSpec
    by_sample: tuple[bool, ...]
    size: int

    def tree(self, leaves: Sequence[Any]) -> Any:
        return tree_unflatten(list(leaves), self.spec)

    def changed(self, leaves: Sequence[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
        """The leaves, those with samples changed."""
        return [change(leaf) if by else leaf for leaf, by in zip(leaves, self.by_sample, strict=True)]

    def of_size(self, leaves: Sequence[Any], size: int) -> list[Any]:
        """A batch of so many samples: the first again and again behind the others, which nobody reads."""
        return self.changed(leaves, lambda leaf: resized(leaf, size))


def shape_of(leaves: Sequence[Any], samples: int, fixed: set[int]) -> tuple[Any, ...]:
    """What batches of one recording have in common. fixed: the places of tensors that once had other rows than there
    were samples; more are added."""
    kinds: list[Any] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            rows = leaf.size(0) if leaf.dim() else -1
            if rows != samples:
                fixed.add(place)
            by_sample = place not in fixed
            kinds.append((leaf.dtype, leaf.device, by_sample, leaf.shape[by_sample:]))
        else:
            kinds.append((type(leaf), leaf if odd_leaf([leaf]) == "" else None))
    return tuple(kinds)


def odd_leaf(leaves: Sequence[Any]) -> str:
    """The type of a leaf that no replay takes, "" if there is none."""
    simple = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
    return next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, simple)), "")


def plain(leaf: Tensor) -> Tensor:
    """With its numbers one after the other from the begin of its memory, as they were when the step was recorded."""
    is_plain = leaf.is_contiguous() and leaf.storage_offset() == 0
    return leaf if is_plain else leaf.clone(memory_format=torch.contiguous_format)


def copies(leaves: Sequence[Any]) -> list[Any]:
    """The batch in memory of its own, with nothing that says when it was handed out."""
    copied = torch.contiguous_format
    with torch._C.DisableTorchFunction():
        return [leaf.detach().clone(memory_format=copied) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def resized(leaf: Tensor, size: int) -> Tensor:
    """With so many rows: cut, or with the first again and again behind the others."""
    count = leaf.size(0)
    if count >= size:
        return leaf[:size]
    return torch.cat([leaf, leaf[:1].expand(size - count, *leaf.shape[1:])])


def in_turn(leaf: Tensor) -> Tensor:
    """The same samples in another order."""
    return leaf.roll(1, 0)


def one_twice(leaf: Tensor) -> Tensor:
    """One sample is missing, another there twice: a number beside torch that Python makes of a batch shows by it."""
    if leaf.size(0) > 1:
        return torch.cat([leaf[1:], leaf[-1:]])
    return leaf * 0.5 if leaf.is_floating_point() else leaf
