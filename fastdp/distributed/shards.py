"""Which elements of a parameter each process holds, and how sums of the whole are cut."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ParameterError


class Box(NamedTuple):
    """What lies here of a parameter: places [low, high) of each dimension.

    In the whole parameter's order it is `rows` runs of `length` elements, `stride` apart, from `first` on.
    """

    shape: torch.Size  # of the whole
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size(high - low for low, high in zip(self.low, self.high, strict=True))

    @property
    def _cut(self) -> int:
        """The last dimension of which a part is missing."""
        return max((d for d, n in enumerate(self.local_shape) if n != self.shape[d]), default=0)

    @property
    def rows(self) -> int:
        return math.prod(self.local_shape[: self._cut])

    @property
    def length(self) -> int:
        return math.prod(self.local_shape[self._cut :])

    @property
    def stride(self) -> int:
        return math.prod(self.shape[self._cut :])

    @property
    def first(self) -> int:
        return sum(low * math.prod(self.shape[d + 1 :]) for d, low in enumerate(self.low))


class Part(NamedTuple):
    """A part of a parameter, cut along one dimension into `ranks` chunks of equal size, of which the last ones may be
    short or empty; the part is the chunk `rank`."""

    shape: torch.Size  # of the whole
    dim: int
    rank: int
    ranks: int

    @property
    def size(self) -> int:
        """The length of the dimension that is cut."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def chunk(self) -> int:
        """How many of its places a process has, at most."""
        return -(-self.size // self.ranks)

    @property
    def low(self) -> int:
        return min(self.rank * self.chunk, self.size)

    @property
    def high(self) -> int:
        return min(self.low + self.chunk, self.size)

    @property
    def box(self) -> Box:
        """The same of every dimension."""
        low, high = [0] * len(self.shape), list(self.shape)
        if self.shape:
            low[self.dim], high[self.dim] = self.low, self.high
        return Box(self.shape, tuple(low), tuple(high))

    @property
    def _runs(self) -> tuple[int, int]:
        """How many runs of the cut dimension there are, and the elements of one place."""
        return math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 :])

    @property
    def padded(self) -> int:
        """Elements of each process's share in a sum that is cut."""
        return self._runs[0] * self.chunk * self._runs[1]

    @property
    def even(self) -> bool:
        """Whether a contiguous sum of the whole is cut as it lies."""
        return self._runs[0] == 1 and self.chunk * self.ranks == self.size

    def cut(self, total: Tensor, into: Tensor) -> None:
        """Write a sum of the whole into zeros [ranks, padded], each process's share in a row."""
        rows, inner = self._runs
        by_place = total.reshape(rows, self.size, inner)
        shares = into.unflatten(1, (rows, self.chunk, inner))
        full, rest = divmod(self.size, max(self.chunk, 1))  # ranks with a whole chunk, and places of the next one
        whole = by_place[:, : full * self.chunk].unflatten(1, (full, self.chunk))
        shares[:full].copy_(whole.transpose(0, 1))
        if rest:
            shares[full, :, :rest].copy_(by_place[:, full * self.chunk :])

    def own(self, share: Tensor) -> Tensor:
        """Of this process's share [padded]: the part, in its shape."""
        places = share.view(self._runs[0], self.chunk, self._runs[1])
        return places[:, : self.high - self.low].reshape(self.box.local_shape)


def placed_like(local: Tensor, parameter: Any) -> Tensor:
    """A tensor that lies on the processes as the parameter does. local: this process's part."""
    if not hasattr(parameter, "placements"):
        return local
    from torch.distributed.tensor import DTensor  # imports what takes a second

    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def placed_within(outer: Part, inner: Part | None) -> Box:
    """What is left of a part that is itself cut. inner: of the outer part's shape.

    Raises ParameterError where it is not runs of one length and distance in the whole parameter's order.
    """
    found = outer.box
    if inner is None:
        return found
    if len({outer.dim, inner.dim} - {0}) > 1:
        raise ParameterError(
            f"a parameter of shape {tuple(outer.shape)} is cut along dimensions {outer.dim} and {inner.dim}: let "
            "fully_shard cut dimension 0 (leave shard_placement_fn out)"
        )
    low, high = list(found.low), list(found.high)
    base = low[inner.dim]
    low[inner.dim], high[inner.dim] = base + inner.low, base + inner.high
    return Box(outer.shape, tuple(low), tuple(high))
