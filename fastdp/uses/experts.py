"""Experts: a stack of matrices, each used by the rows routed to it; rows of many samples in any order.

With e_t the matrix of row t, the gradient of sample b with respect to matrix e is the sum of g_t a_t^T over its rows
with e_t = e. Gradients of different matrices share no element, so the squared norm is a sum over matrices of the
norms of ordinary matrix products with few rows; no gradient is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..errors import SampleMixingError
from ..layouts.calls import Call, bind
from ..layouts.chosen import spread
from ..layouts.layout import Layout, tag, tag_of
from ..layouts.propagate import propagate, spellings
from ..links import link_of
from ..ops.common import accumulate
from ..recorder import Recorder
from .base import Captured, Operand, Use, capture, cut, rule, sample_layout


class Routed(Use):
    """Rows a [S,I] with output gradients g [S,O] used matrix ids[s] of the operand [E,O,I], on behalf of owner[s].

    Rows without a matrix (id out of range) are dropped. Kept in the order of the matrices.
    """

    route = "by expert"

    def __init__(
        self, operand: Tensor, a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, batch: int, name: str
    ) -> None:
        super().__init__(operand, batch, name)
        if ids.numel() > 1 and bool((ids[1:] < ids[:-1]).any()):
            order = torch.argsort(ids, stable=True)
            a, g, ids, owner = a[order], g[order], ids[order], owner[order]
        self.a, self.g, self.ids, self.owner = a, g, ids, owner

    @staticmethod
    def joined(group: Sequence[Routed], name: str) -> Routed:
        """Uses of one operand as one."""
        a, g = (
            torch.cat([accumulate(part) for part in parts]) for parts in ([u.a for u in group], [u.g for u in group])
        )
        ids, owner = torch.cat([u.ids for u in group]), torch.cat([u.owner for u in group])
        return Routed(group[0].operand, a, g, ids, owner, group[0].batch, name)

    def _matrices(self) -> Iterator[tuple[int, slice]]:
        """The matrices that were used, and their rows."""
        numbers = torch.arange(self.operand.size(0) + 1, device=self.ids.device)
        ends = torch.searchsorted(self.ids, numbers).tolist()
        for expert, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
            if start < stop:
                yield expert, slice(start, stop)

    def _by_sample(self, rows: slice) -> tuple[Tensor, Tensor]:
        """a and g of these rows, [B, n, *], padded with zeros to the largest number of rows of a sample."""
        layout = Layout(self.batch, 0, owner=self.owner[rows])
        return cut(self.a[rows], layout), cut(self.g[rows], layout)

    def norm_sq(self) -> Tensor:
        total = torch.zeros(self.batch, dtype=torch.float64, device=self.a.device)
        for _, rows in self._matrices():
            total += ops.linear_norm_sq(*self._by_sample(rows), "auto", dtype=torch.float64)
        return total

    def per_sample(self, low: int, high: int) -> Tensor:
        kind = torch.float64 if self.a.dtype == torch.float64 else torch.float32
        found = torch.zeros((high - low, *self.operand.shape), dtype=kind, device=self.a.device)
        for expert, rows in self._matrices():
            a, g = self._by_sample(rows)
            found[:, expert] = ops.linear_per_sample(a[low:high], g[low:high])
        return found

    def clipped_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        kind = torch.float64 if self.a.dtype == torch.float64 else torch.float32
        total = torch.zeros(self.operand.shape, dtype=kind, device=self.a.device)
        for expert, rows in self._matrices():  # a row is a sample of one position here: nothing is padded
            a, g = self.a[rows].unsqueeze(1), self.g[rows].unsqueeze(1)
            total[expert] = ops.linear_clipped_sum(a, g, c[self.owner[rows]].contiguous())
        return total


def record_routed(recorder: Recorder, operand: Tensor, a: Tensor, g: Tensor, ids: Tensor, owner: Tensor,
                  name: str) -> None:  # fmt: skip
    """Record a use of the stack `operand` [E,I,O] by rows a [S,I] with output gradients g [S,O]."""
    link = link_of(operand)
    if link is not None and link.isometric and len(link.leaves) == 1:
        leaf = link.leaves[0]
        swapped = operand.mT
        same = leaf.data_ptr() == operand.data_ptr() and leaf.dtype == operand.dtype and leaf.shape == swapped.shape
        if same and leaf.stride() == swapped.stride():
            recorder.record(Routed(leaf, a, g, ids, owner, recorder.batch, name))
            return
    recorder.record(Routed(operand, g, a, ids, owner, recorder.batch, name))


class _GroupedProduct(Captured):
    """Rows x [S,I] times the matrices of a stack [E,I,O]; group e ends before row ends[e]."""

    def __init__(self, recorder: Recorder, func: Any, stack: Tensor, ends: Tensor, options: dict[str, Any],
                 layout: Layout) -> None:  # fmt: skip
        super().__init__(recorder, "grouped_mm", recorder.path)
        self.func, self.stack, self.ends, self.options, self.layout = func, Operand.of(stack), ends, options, layout

    def run(self, *data: Tensor) -> Tensor:
        return self.func(data[0], self.stack.value, offs=self.ends, **self.options)  # type: ignore[no-any-return]

    def back(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        x, g = saved[0], grads[0]
        rows = torch.arange(x.size(0), device=x.device)
        ids = torch.searchsorted(self.ends.long(), rows, right=True)
        record_routed(self.recorder, self.stack.tensor, x, g, ids, owners_of(self.layout, x), self.name)


def owners_of(layout: Layout, rows: Tensor) -> Tensor:
    """Sample of each row, also in a batch of one."""
    if layout.batch == 1:
        return torch.zeros(rows.size(0), dtype=torch.long, device=rows.device)
    return layout.owners(rows.device)


@rule(*spellings("grouped_mm", "_grouped_mm"))
def capture_grouped_mm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of data [S,I], in groups, times a stack of operands [E,I,O]."""
    x, stack, ends = bind(args, {**kwargs, "offs": kwargs.get("offs")}, "input", "mat2", "offs")
    options = {name: value for name, value in kwargs.items() if name in ("out_dtype",) and value is not None}
    if x is None or stack is None or ends is None or kwargs.get("bias") is not None or len(args) > 3:
        return NotImplemented
    if recorder.is_parameter(x) or not recorder.is_parameter(stack) or x.dim() != 2 or stack.dim() != 3:
        return NotImplemented
    layout = sample_layout(recorder, x, "grouped_mm")
    if layout.batch > 1:
        _check_groups(recorder, layout, ends)
    return capture(_GroupedProduct(recorder, func, stack, ends, options, layout), x, layout=layout)


def _check_groups(recorder: Recorder, layout: Layout, ends: Tensor) -> None:
    """Rows in dimension 0; ends that depend on the batch must be those of the groups in which the rows came."""
    problem = "sums over the batch" if layout.dim != 0 else ""
    found = tag_of(ends, recorder.batch)
    if not problem and found is not None:
        inside = ends[(ends > 0) & (ends < layout.rows)].long()
        if layout.order is None or bool((layout.order[inside] == layout.order[inside - 1]).any()):
            problem = "divides rows into groups by what other samples hold"
    if problem:
        place = recorder.place("grouped_mm")
        raise SampleMixingError(
            f"{place}: {problem}. Sort the rows by the number of their own expert.", f"{place} {problem}"
        )


# --------------------------------------------------------------------------- matrices gathered for each token


class Gathered(NamedTuple):
    """Note on a result of `operand[ids]`: the rows of a stack of matrices, one for each token."""

    operand: Tensor
    ids: Tensor
    version: int  # of the result: another says that it was written to


_GATHERED = "_fastdp_gathered"


def note_gathered(result: Tensor, operand: Tensor, ids: Tensor) -> None:
    """Let products with the result know what it is made of."""
    if operand.dim() == 3:
        result.__dict__[_GATHERED] = Gathered(operand, ids, result._version)


def gathered_of(tensor: Any) -> tuple[Gathered, bool] | None:
    """What a tensor was gathered from, and whether its matrices are transposed."""
    if not isinstance(tensor, Tensor):
        return None
    note = tensor.__dict__.get(_GATHERED)
    if note is not None:
        return (note, False) if note.version == tensor._version else None
    base = tensor._base if tensor._is_view() else None
    note = None if base is None else base.__dict__.get(_GATHERED)
    if base is None or note is None or note.version != tensor._version:
        return None
    flipped = base.mT
    same = flipped.shape == tensor.shape and flipped.stride() == tensor.stride()
    return (note, True) if same and tensor.storage_offset() == base.storage_offset() else None


class _GatheredProduct(Captured):
    """M @ X or X @ M with M [..., P, Q] gathered: the matrix of token n gets sum_r of its rows' products."""

    def __init__(
        self, recorder: Recorder, func: Any, matrices: Tensor, note: Gathered, flipped: bool, left: bool
    ) -> None:
        super().__init__(recorder, func.__name__, recorder.path)
        self.func, self.matrices, self.operand = func, matrices.detach(), Operand.of(note.operand)
        self.flipped, self.left = flipped, left
        self.layout = Layout(recorder.batch)

    def run(self, *data: Tensor) -> Tensor:
        pair = (self.matrices, data[0]) if self.left else (data[0], self.matrices)
        return torch.matmul(*pair)

    def back(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        (x, ids), g = saved, grads[0]
        outer = g.shape[:-2]
        rows, outs = (x.mT, g.mT) if self.left else (g, x)  # [..., R, Q] and [..., R, P]
        rows = rows.expand(*outer, *rows.shape[-2:])
        outs = outs.expand(*outer, *outs.shape[-2:])
        each = rows.size(-2)
        owner = torch.zeros(outer, dtype=torch.long, device=g.device)
        if self.batch > 1:
            owner = spread(self.layout.owners(g.device), self.layout.dim, outer)
        stack = self.operand.value.size(0)
        ids = torch.where(ids < 0, ids + stack, ids).expand(outer)
        rows, outs = (t.reshape(-1, t.size(-1)) for t in (rows, outs))
        a, o = (outs, rows) if self.flipped else (rows, outs)
        ids, owner = (t.reshape(-1).repeat_interleave(each) for t in (ids, owner))
        self.recorder.record(Routed(self.operand.tensor, a, o, ids, owner, self.batch, self.name))


def capture_gathered(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product with gathered matrices: the rows are kept, and no matrix for each token."""
    pair = args[::-1] if func is torch.Tensor.__rmatmul__ else args
    if kwargs or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        return NotImplemented
    notes = [gathered_of(tensor) for tensor in pair]
    side = 0 if notes[0] is not None else 1
    found, x = notes[side], pair[1 - side]
    if found is None or notes[1 - side] is not None or x.dim() != pair[side].dim() or not recorder.is_data(x):
        return NotImplemented
    note, flipped = found
    call = _GatheredProduct(recorder, func, pair[side], note, flipped, side == 0)
    with torch.no_grad():
        probe = call.run(x)
    probe.requires_grad_()
    shadow = pair[side].detach()
    tag(shadow, tag_of(pair[side], recorder.batch))
    propagate(Call(torch.matmul, (shadow, x) if side == 0 else (x, shadow), {}, probe, recorder.batch, recorder.path))
    layout = sample_layout(recorder, probe, func.__name__)
    if layout.batch > 1 and layout.dim >= probe.dim() - 2:
        return NotImplemented
    call.layout = layout
    return capture(call, x, note.ids, layout=layout)


PRODUCTS = {
    function: capture_gathered
    for function in (torch.bmm, torch.Tensor.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
                     torch.Tensor.__rmatmul__)
}  # fmt: skip
