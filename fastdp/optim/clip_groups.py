"""The parameters of each clipping group, and the factors of groups that are clipped within backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.layerwise import Taken
from ..errors import StepError

if TYPE_CHECKING:
    from ..data.loader_batch import LoaderBatch
    from .clipping import Clipping


class ClipGroups:
    """What an engine's `clip_by_group` asks.

    now: gives the clipping as it is now, and the trained parameters by name if groups may be clipped apart.
    loader_batch: while a record stands in for a batch, nothing is clipped within backward, which would count it.
    """

    def __init__(self, now: Callable[[], tuple[Clipping, dict[str, Tensor]]], loader_batch: LoaderBatch) -> None:
        self._now, self._loader_batch = now, loader_batch
        self._key: Any = None
        self._lists: list[list[Tensor]] = []
        self._clipping: Clipping | None = None

    def all(self, clipping: Clipping, named: dict[str, Tensor]) -> list[list[Tensor]]:
        """The parameters of each group; the same lists as long as nothing changes."""
        key = (clipping, [*named], [*map(id, named.values())])
        if key != self._key:
            self._lists = [[named[n] for n in group.parameters if n in named] for group in clipping.groups]
            self._key, self._clipping = key, clipping
        return self._lists

    def check(self, taken: dict[int, Taken]) -> None:
        """Raises StepError if what was taken within backward is not of the groups as they are at its end."""
        if any(each.parameters is not self._lists[number] for number, each in taken.items()):
            raise StepError("the trained parameters, or their clipping, changed within backward: it is dropped")

    def groups(self) -> Sequence[Sequence[Tensor]]:
        """See `engine.layerwise.ByGroup`."""
        clipping, named = self._now()
        return self.all(clipping, named) if clipping.apart and not self._loader_batch.stands_in else []

    def factors(self, numbers: Sequence[int], norm_sq: Tensor) -> Tensor:
        """See `engine.layerwise.ByGroup`."""
        assert self._clipping is not None
        groups = [self._clipping.groups[number] for number in numbers]
        return torch.stack(self._clipping.factors([*norm_sq], groups))
