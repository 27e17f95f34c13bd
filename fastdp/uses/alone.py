"""Parameters used by one sample at a time, in a loop over the samples.

A call on tensors of one sample (`Layout.alone`) is, to its rule, a call on a batch of one. What it records is that
sample's; before norms are taken, the uses of all samples are put side by side as one use by the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SampleMixingError
from ..layouts.calls import function_name, is_in_place
from ..layouts.layout import Layout, tag, tag_of
from ..layouts.nests import tensors_in
from ..layouts.one_sample import owner_of
from ..ops.bounds import added, roundings, unit
from ..ops.common import accumulate
from .conv import Conv
from .embedding import Lookup
from .forward_pass import ForwardPass
from .linear import Matmul
from .routed import Routed
from .use import Stored, Use


class OneSample:
    """A pass for a call on one sample of the batch: a batch of one (`fastdp.uses.forward_pass.ForwardPass`)."""

    batch = 1

    def __init__(self, forward_pass: ForwardPass, layout: Layout) -> None:
        self.forward_pass, self.layout, self.sample = forward_pass, layout, layout.alone
        self.planner = forward_pass.planner
        self.is_parameter, self.is_data, self.is_tracked = (
            forward_pass.is_parameter,
            forward_pass.is_data,
            forward_pass.is_tracked,
        )
        self.place, self.token_for, self.begin_record = (
            forward_pass.place,
            forward_pass.token_for,
            forward_pass.begin_record,
        )
        self.names_of = forward_pass.names_of

    @property
    def compiling(self) -> bool:
        return self.forward_pass.compiling

    @property
    def path(self) -> str:
        return self.forward_pass.path

    def guess_layout(self, tensor: Tensor) -> Layout | None:
        return Layout(1)

    def folded(self, use: Any) -> Any:
        return use  # what is one sample's is one person's

    def record(self, use: Any) -> None:
        self.forward_pass.record(Alone(use, self.sample, self.forward_pass.batch))

    def traced(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.forward_pass.traced(function, *args, **kwargs)

    def tagged(self, out: Any, func: Any, args: tuple[Any, ...]) -> Any:
        """The results of the call, marked as the sample's."""
        written = args[:1] if is_in_place(function_name(func)) else ()
        for tensor in tensors_in((out, written)):
            if not self.is_parameter(tensor):
                tag(tensor, self.layout)
        return out


def one_sample_of(
    forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OneSample | None:
    """A pass for a call whose data is of one sample; None for other data. Raises where samples meet."""
    layouts = [layout for tensor in tensors_in((args, kwargs)) if (layout := tag_of(tensor, forward_pass.batch))]
    if forward_pass.batch <= 1 or all(layout.alone < 0 for layout in layouts):
        return None
    found = {owner_of(layout) for layout in layouts}
    bad = next((layout.mixed for layout in layouts if layout.mixed), "")
    name = function_name(func)
    if len(found) > 1 or -1 in found or bad or any(layout.places for layout in layouts):
        why = bad or f"{forward_pass.place(name)} combines rows of different samples with a parameter"
        raise SampleMixingError(
            f"{forward_pass.place(name)}: its input depends on several samples: {why}. Per-sample gradients do not "
            "exist for such a model; remove the operation, or use one that works on each sample alone.",
            why,
        )
    if is_in_place(name) and args and isinstance(args[0], Tensor) and args[0]._is_view():
        base = args[0]._base
        if base is not None and tag_of(base, forward_pass.batch) != tag_of(args[0], forward_pass.batch):
            why = f"{forward_pass.place(name)} writes into a view of the batch"
            raise SampleMixingError(f"{why}, together with a parameter. Use torch.stack or torch.cat.", why)
    sized, guessed = (
        any(layout.size_from_data or layout.order is not None for layout in layouts),
        any(layout.guessed for layout in layouts),
    )
    return OneSample(forward_pass, Layout(forward_pass.batch, alone=found.pop(), size_from_data=sized, guessed=guessed))


class Alone(Use):
    """A use by one sample, as a use by the batch: the others' gradients are zero. inner: a use by a batch of one."""

    def __init__(self, inner: Use, sample: int, batch: int) -> None:
        super().__init__(inner.operand, batch, inner.name)
        self.inner, self.sample = inner, sample

    def data(self) -> tuple[Tensor, ...]:
        return self.inner.data()

    def holds(self) -> tuple[Tensor, ...]:
        return self.inner.holds()

    def norm_sq(self) -> Tensor:
        return self._spread(self.inner.norm_sq().double())

    def _spread(self, own: Tensor) -> Tensor:
        """A number [1] of the sample among zeros of the others, [B]."""
        return own.new_zeros(self.batch).index_copy(0, torch.tensor([self.sample], device=own.device), own)

    def rounding(self) -> Tensor | None:
        own = self.inner.rounding()
        return None if own is None else self._spread(own)

    def per_sample(self, low: int, high: int) -> Tensor:
        if not low <= self.sample < high:
            kind = torch.float64 if self.operand.dtype == torch.float64 else torch.float32
            return torch.zeros((high - low, *self.operand.shape), dtype=kind, device=self.operand.device)
        own = self.inner.per_sample(0, 1)
        return F.pad(own, (0, 0) * (own.dim() - 1) + (self.sample - low, high - 1 - self.sample))

    def clipped_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        return self.inner.clipped_sum(c[self.sample : self.sample + 1].contiguous())


class Several(Use):
    """Uses by one sample each that cannot be put side by side."""

    def __init__(self, uses: Sequence[Alone]) -> None:
        super().__init__(uses[0].operand, uses[0].batch, f"{uses[0].name} x{len(uses)}")
        self.uses = uses

    def data(self) -> tuple[Tensor, ...]:
        return tuple(tensor for use in self.uses for tensor in use.data())

    def holds(self) -> tuple[Tensor, ...]:
        return tuple(tensor for use in self.uses for tensor in use.holds())

    def norm_sq(self) -> Tensor:
        if len({use.sample for use in self.uses}) < len(self.uses):  # some sample's gradient is a sum
            return super().norm_sq()
        return torch.stack([use.norm_sq() for use in self.uses]).sum(0)

    def rounding(self) -> Tensor | None:
        own = added(*[use.rounding() for use in self.uses])
        if len({use.sample for use in self.uses}) == len(self.uses):
            return own
        sizes = torch.stack([use.norm_sq().sqrt() for use in self.uses]).sum(0)  # of the terms added here
        return added(sizes * roundings(len(self.uses), blocks=False) * unit(self.operand), own)

    def per_sample(self, low: int, high: int) -> Tensor:
        first, *others = [use for use in self.uses if low <= use.sample < high] or self.uses[:1]
        total = first.per_sample(low, high)
        for use in others:
            total[use.sample - low] += use.inner.per_sample(0, 1)[0]
        return total

    def clipped_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        first, *others = self.uses
        total = first.clipped_sum(c)
        for use in others:
            total = total + use.clipped_sum(c)
        return total


def whole_batch(uses: Iterable[Use]) -> list[Use]:
    """The uses, those by single samples put together: one of each operand and kind."""
    found: list[Use] = []
    groups: dict[tuple[int, type], list[Alone]] = {}
    for use in uses:
        if isinstance(use, Alone):
            groups.setdefault((id(use.operand), type(use.inner)), []).append(use)
        else:
            found.append(use)
    return found + [_side_by_side(group) for group in groups.values()]


def _side_by_side(group: list[Alone]) -> Use:
    operand, batch, name = group[0].operand, group[0].batch, f"{group[0].name} x{len(group)}"
    inner = [use.inner for use in group]
    kind = type(inner[0])
    if kind is Matmul:
        a, g = (_rows(group, [getattr(use, side) for use in inner]) for side in ("a", "g"))
        return Matmul(operand, a, g, name)
    if kind is Lookup:
        ids, g = (_rows(group, [getattr(use, side) for use in inner]) for side in ("ids", "g"))
        return Lookup(operand, ids, g, name)
    convs = [use for use in inner if isinstance(use, Conv)]
    if convs and len({(use.x.shape[2:], use.g.shape[2:], use.geometry) for use in convs}) == 1:
        x, g = (_rows(group, [getattr(use, side) for use in convs]) for side in ("x", "g"))
        return Conv(operand, x, g, convs[0].geometry, name)
    if kind is Stored:
        return Stored(operand, _summed(group, [use.grads for use in inner if isinstance(use, Stored)]), name)
    if kind is Routed:
        routed = [use for use in inner if isinstance(use, Routed)]
        a, g, ids = (torch.cat([getattr(use, side) for use in routed]) for side in ("a", "g", "ids"))
        owner = torch.cat([torch.full_like(use.owner, one.sample) for one, use in zip(group, routed, strict=True)])
        return Routed(operand, a, g, ids, owner, batch, name)
    return Several(group)


def _rows(group: list[Alone], parts: list[Tensor]) -> Tensor:
    """[1,t,*] of each use -> [B, largest sum of a sample's t, *], padded with zeros."""
    if len({part.dtype for part in parts}) > 1:
        parts = [accumulate(part) for part in parts]
    own = [[part[0] for use, part in zip(group, parts, strict=True) if use.sample == b] for b in range(group[0].batch)]
    lengths = [sum(len(part) for part in rows) for rows in own]
    total = parts[0].new_zeros((len(own), max(lengths), *parts[0].shape[2:]))
    for b, rows in enumerate(own):
        if rows:
            total[b, : lengths[b]] = torch.cat(rows)
    return total


def _summed(group: list[Alone], parts: list[Tensor]) -> Tensor:
    """[1,*] of each use -> [B,*], those of one sample added."""
    total = accumulate(parts[0]).new_zeros((group[0].batch, *parts[0].shape[1:]))
    for use, part in zip(group, parts, strict=True):
        total[use.sample] += part[0]
    return total
