"""`ParameterUse`: what one use of a parameter stores to give per-sample norms and a clipped sum.

Uses can be taken together in four ways, each of which a kind of use answers by a use of its own kind if it can:
`concat` (of the same samples), `stack` (of other samples), `regroup` (samples that belong together as one) and
`abreast` (of other parameters: small uses of equal shape cost a call each otherwise).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.row_groups import Groups
from ..ops.bounds import added, enlarged, roundings, unit
from ..ops.common import accumulate, chunks, sum_type
from ..ops.registry import is_watched
from ..ops.rows import square_sum, weighted_sum
from ..utils.pytree import tensors_in
from .cost_model import Clock, Segments, Shape
from .grouped_kernels import StoredGroupedKernels, stored_alike
from .planner import Planner, versions


class ParameterUse:
    """A recorded use of `operand` (a parameter, or a tensor derived from parameters) by one batch.

    Subclasses give the gradients with respect to the operand; all of a use's numbers are float32 or float64.
    """

    route = "materialise"
    overwrites = False  # whether clipped_sum can write into memory it is given
    shared = False  # whether a parameter of it has other uses
    shape: Shape | None = None  # as a matrix product, where it is one
    clock: Clock | None = None  # measures norm_sq and clipped_sum, where profiling is on

    def __init__(self, operand: Tensor, batch: int, name: str) -> None:
        self.operand, self.batch, self.name = operand, batch, name

    @property
    def is_small(self) -> bool:
        """Whether a call of its own would cost more than what it computes."""
        return False

    def plan(self, planner: Planner) -> None:
        """Take the route that the planner chooses."""

    def per_sample(self, low: int, high: int) -> Tensor:
        """Gradients of samples [low, high): [high - low, *operand.shape]."""
        raise NotImplementedError

    def chunks(self) -> Iterable[tuple[int, int]]:
        return chunks(self.batch, 4 * self.operand.numel())

    def norm_sq(self) -> Tensor:
        """Squared norms [B], enlarged where terms cancel, for the sums to stay within them."""
        parts = [square_sum(self.per_sample(low, high)) for low, high in self.chunks()]
        return enlarged(torch.cat(parts), self.rounding())

    def rounding(self) -> Tensor | None:
        """How far `clipped_sum` may be off a sample's gradient times its factor, for each factor: [B] float64. None: it
        is a sum of the very numbers that `per_sample` gives."""
        return None

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        """sum_b factors_b gradient_b, of the operand's shape; samples with factors_b = 0 are not read as numbers. into:
        float32 memory of that shape on the CPU which the result may take, contents lost."""
        parts = (weighted_sum(self.per_sample(low, high), factors[low:high]) for low, high in self.chunks())
        return functools.reduce(Tensor.add_, parts)

    def data(self) -> tuple[Tensor, ...]:
        """The tensors that the use holds until the end of backward."""
        return tuple(v for v in vars(self).values() if isinstance(v, Tensor) and v is not self.operand)

    def holds(self) -> tuple[Tensor, ...]:
        """These, and what functions hold that the use is to call."""
        return self.data()

    def versions(self) -> int:
        """Grows with every write in place to what the use holds."""
        return versions(self.holds())

    @property
    def short(self) -> bool:
        """Whether it holds 16-bit numbers."""
        return any(t.dtype in (torch.bfloat16, torch.float16) for t in self.data())

    def segments(self) -> Segments | None:
        """Of routed rows: for the table, without the rows."""
        return None

    # ------------------------------------------------------------------ taken together

    @property
    def kind(self) -> Any:
        """Uses of one kind can be taken together, perhaps."""
        return type(self)

    @property
    def records(self) -> int:
        """The number of samples that this use is in a stack: its own, or one for each position."""
        return self.batch

    def transposed(self, operand: Tensor) -> ParameterUse | None:
        """The same use, of the transposed operand."""
        return None

    def concat(self, others: Sequence[Any], name: str) -> ParameterUse | None:
        """This use and others of its operand and kind, by the same samples, as one use."""
        return None

    def stack(self, others: Sequence[Any]) -> ParameterUse:
        """This use and others of its operand and kind, by other samples, as a use by all of their `records`."""
        return Stack([self, *others]) if others else self

    def regroup(self, groups: Groups) -> ParameterUse:
        """The use by groups of its samples: the gradient of a group is the sum of those of its samples."""
        return Regrouped(self, groups)

    def alike(self) -> Any:
        """What uses must have in common to be taken `abreast`; None: nothing will do, or its own call costs nothing."""
        return None

    def abreast(self, others: Sequence[Any]) -> Any:
        """This use and others that are `alike`, as one use by all of their samples, one use after the other."""
        raise NotImplementedError

    def sums_abreast(self, count: int, factors: Tensor) -> Tensor:
        """Of uses taken `abreast`: the clipped sum of each, [count, *operand.shape]. factors: [B], or [count * B]."""
        raise NotImplementedError


class Positioned(ParameterUse):
    """A use whose data are two tensors [B,K,*] by sample and position; the gradient is a sum over positions."""

    abreast_limit = 0  # numbers of data and operand up to which equal uses are worth the copy that joins them
    geometry: Any = None  # what else equal uses have in common

    def sides(self) -> tuple[Tensor, Tensor]:
        """The data."""
        raise NotImplementedError

    def of(self, first: Tensor, second: Tensor, name: str) -> Positioned:
        """The same use with other data."""
        raise NotImplementedError

    def is_like(self, other: Any) -> bool:
        """Whether the positions of both can lie side by side."""
        return True

    def data(self) -> tuple[Tensor, ...]:
        return self.sides()

    @property
    def records(self) -> int:
        return self.batch * self.sides()[0].size(1)

    def concat(self, others: Sequence[Any], name: str) -> ParameterUse | None:
        uses = [self, *others]
        if not all(map(self.is_like, others)):
            return None
        first, second = (torch.cat([use.sides()[side] for use in uses], 1) for side in (0, 1))
        return self.of(first, second, name)

    @property
    def is_small(self) -> bool:
        first, second = self.sides()
        return first.numel() + second.numel() + self.operand.numel() <= self.abreast_limit

    def alike(self) -> Any:
        first, second = self.sides()
        if not self.is_small or not first.numel() or not second.numel():
            return None
        if not {first.dtype, second.dtype, self.operand.dtype} <= _WORTH_A_COPY:
            return None
        kinds = (first.dtype, second.dtype, first.device)
        return type(self), first.shape, second.shape, kinds, self.geometry, self.route

    def abreast(self, others: Sequence[Any]) -> Positioned:
        return self.joined(*(torch.cat([use.sides()[side] for use in (self, *others)]) for side in (0, 1)))

    def joined(self, first: Tensor, second: Tensor) -> Positioned:
        """Uses that are `alike`, whose data these are, one use after the other."""
        one = self.of(first, second, self.name)
        one.route = self.route
        return one

    def stack(self, others: Sequence[Any]) -> ParameterUse:
        uses = [self, *others]
        if not all(map(self.is_like, others)):
            return Stack([use.stack([]) for use in uses])
        # [B,K,*] -> [B * K, 1, *]: each position as a sample
        first, second = (torch.cat([use.sides()[side].flatten(0, 1).unsqueeze(1) for use in uses]) for side in (0, 1))
        return self.of(first, second, self.name)

    def regroup(self, groups: Groups) -> ParameterUse:
        first, second = map(groups.join, self.sides())
        return self.of(first, second, self.name)


_FEW = 1 << 14  # numbers whose memory is not worth counting
_WORTH_A_COPY = {torch.float32, torch.bfloat16, torch.float16}


class Stored(ParameterUse):
    """Per-sample gradients that are small enough to keep: biases, norm layers, broadcast parameters."""

    route = "kept"

    def __init__(self, operand: Tensor, grads: Tensor, name: str, shape: Shape | None = None) -> None:
        super().__init__(operand, grads.size(0), name)
        self.grads = accumulate(grads)  # [B, *operand.shape]
        if shape is not None:  # of a product that the planner chose to materialise
            self.shape, self.route = shape, "materialise"
        assert grads.shape[1:] == operand.shape, (name, grads.shape, operand.shape)

    @property
    def is_small(self) -> bool:
        return self.grads.numel() <= _FEW

    def data(self) -> tuple[Tensor, ...]:
        return (self.grads,)

    def per_sample(self, low: int, high: int) -> Tensor:
        return self.grads[low:high]

    def norm_sq(self) -> Tensor:
        return square_sum(self.grads)

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        return weighted_sum(self.grads, factors)

    def last_sum(self, factors: Tensor) -> Tensor:
        """`clipped_sum`, after which nothing is asked of the use: the gradient of an only sample becomes the sum."""
        if self.shape is None or self.batch != 1 or self.grads.device.type != "cpu" or is_watched():
            return self.clipped_sum(factors)
        factor = float(factors[0])  # MEASURED: 11 ms for 270 MB, where new memory for the sum takes 88 ms
        return self.grads[0].mul_(factor) if factor else self.grads[0].zero_()

    def alike(self) -> Any:
        return stored_alike(self.grads)

    def abreast(self, others: Sequence[Any]) -> StoredGroupedKernels:
        return StoredGroupedKernels(self.operand, [use.grads for use in (self, *others)], self.route)

    def transposed(self, operand: Tensor) -> ParameterUse:
        return Stored(operand, self.grads.mT, self.name)

    def concat(self, others: Sequence[Any], name: str) -> ParameterUse:
        return Stored(self.operand, sum((use.grads for use in others), self.grads), name)

    def stack(self, others: Sequence[Any]) -> ParameterUse:
        return Stored(self.operand, torch.cat([self.grads, *(use.grads for use in others)], 0), self.name)

    def regroup(self, groups: Groups) -> ParameterUse:
        shape = None if self.shape is None else self.shape.by_group(groups)
        return Stored(self.operand, groups.sum(self.grads), self.name, shape)


class Lazy(ParameterUse):
    """Per-sample gradients computed when asked for, in chunks of samples."""

    def __init__(self, operand: Tensor, batch: int, name: str, compute: Callable[[int, int], Tensor]) -> None:
        super().__init__(operand, batch, name)
        self.compute = compute

    def holds(self) -> tuple[Tensor, ...]:
        cells = [cell.cell_contents for cell in getattr(self.compute, "__closure__", None) or ()]
        return tuple(t for t in tensors_in([*cells, *getattr(self.compute, "args", ())]) if t is not self.operand)

    def per_sample(self, low: int, high: int) -> Tensor:
        return accumulate(self.compute(low, high))


class Stack(ParameterUse):
    """Uses of one operand by samples of their own, one after the other: of kinds that have no such form."""

    def __init__(self, uses: Sequence[ParameterUse]) -> None:
        super().__init__(uses[0].operand, sum(use.batch for use in uses), uses[0].name)
        self.uses = uses

    def _samples(self, low: int, high: int) -> Iterator[tuple[ParameterUse, int, int]]:
        """The uses of which samples [low, high) are, and which of their samples these are."""
        start = 0
        for use in self.uses:
            if low < start + use.batch and high > start:
                yield use, max(low - start, 0), min(high - start, use.batch)
            start += use.batch

    def data(self) -> tuple[Tensor, ...]:
        return tuple(tensor for use in self.uses for tensor in use.data())

    def holds(self) -> tuple[Tensor, ...]:
        return tuple(tensor for use in self.uses for tensor in use.holds())

    def norm_sq(self) -> Tensor:
        return torch.cat([use.norm_sq().double() for use in self.uses])

    def rounding(self) -> Tensor | None:
        each = [use.rounding() for use in self.uses]
        known = next((bound for bound in each if bound is not None), None)
        if known is None:
            return None
        return torch.cat(
            [known.new_zeros(use.batch) if own is None else own for use, own in zip(self.uses, each, strict=True)]
        )

    def per_sample(self, low: int, high: int) -> Tensor:
        parts = [use.per_sample(start, stop) for use, start, stop in self._samples(low, high)]
        return torch.cat(parts, 0) if parts else self.uses[0].per_sample(0, 0)

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        each = zip(self.uses, factors.split([use.batch for use in self.uses]), strict=True)
        parts = [use.clipped_sum(own.contiguous()) for use, own in each]
        return sum(parts[1:], parts[0])


class Regrouped(ParameterUse):
    """A use by groups of the samples of another: gradients added up a few groups at a time, if a group has several;
    the clipped sum is the other use's own."""

    def __init__(self, inner: ParameterUse, groups: Groups) -> None:
        super().__init__(inner.operand, groups.count, inner.name)
        assert inner.batch == groups.records, (inner.name, inner.batch, groups.records)
        self.inner, self.groups = inner, groups
        if inner.shape is not None:
            self.shape = inner.shape.by_group(groups)

    @property
    def kind(self) -> Any:
        return Regrouped, type(self.inner)

    def data(self) -> tuple[Tensor, ...]:
        return self.inner.data()

    def holds(self) -> tuple[Tensor, ...]:
        return self.inner.holds()

    def norm_sq(self) -> Tensor:
        return self._spread(self.inner.norm_sq().double()) if self.groups.most <= 1 else super().norm_sq()

    def _spread(self, own: Tensor) -> Tensor:
        """Numbers of samples, each a group of its own, among zeros for the other groups: [groups]."""
        return own.new_zeros(self.batch).index_copy(0, self.groups.owner(own.device), own)

    def rounding(self) -> Tensor | None:
        own = self.inner.rounding()
        if self.groups.most <= 1:
            return None if own is None else self._spread(own)
        sizes = self.inner.norm_sq().double().sqrt() * roundings(self.groups.most, blocks=False) * unit(self.operand)
        bound = added(sizes, own)
        assert bound is not None
        return self.groups.sum(bound)

    def per_sample(self, low: int, high: int) -> Tensor:
        total = None
        owners = self.groups.owner(torch.device("cpu"))
        for start, stop in self._runs(low, high):
            part = accumulate(self.inner.per_sample(start, stop))
            if total is None:
                total = part.new_zeros((high - low, *part.shape[1:]))
            for row, group in enumerate(owners[start:stop].tolist()):
                total[group - low] += part[row]
        if total is not None:
            return total
        shape = (high - low, *self.operand.shape)
        return torch.zeros(shape, dtype=sum_type(self.operand), device=self.operand.device)

    def _runs(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Ranges of samples of these groups: consecutive ones, as many as fit."""
        starts = self.groups.starts
        samples = self.groups.order[int(starts[low]) : int(starts[high])]
        breaks = (torch.nonzero(samples.diff() != 1).flatten() + 1).tolist()
        for first, last in zip([0, *breaks], [*breaks, len(samples)], strict=True):
            begin = int(samples[first]) if first < last else 0
            for a, b in chunks(last - first, 4 * self.operand.numel()):
                yield begin + a, begin + b

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        return self.inner.clipped_sum(factors[self.groups.owner(factors.device)], into)

    def concat(self, others: Sequence[Any], name: str) -> ParameterUse:
        uses = [self, *others]
        owners = [use.groups.own.repeat_interleave(use.inner.records // use.inner.batch) for use in uses]
        found = self.inner.stack([use.inner for use in uses[1:]]).regroup(Groups(torch.cat(owners), self.batch))
        found.name = name
        return found

    def regroup(self, groups: Groups) -> ParameterUse:
        return Regrouped(self.inner, Groups(groups.owner(self.groups.own.device)[self.groups.own], groups.count))
