"""Layers of equal shape in one launch: norms and clipped sums of many matrix products, or of many stored gradients,
which stay where they are.

A kernel finds the numbers of a layer by its address, so nothing is copied together. One launch fills the device where
one layer does not, and its last wave is one of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import clipped, linear, rows
from .common import aligned, float32_is_exact, is_half
from .finish import finish
from .linear import Layers, as_rows

Pair = tuple[Tensor, Tensor]  # a [B,T,I] and g [B,T,O]
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_GONE = (torch.empty(0), torch.empty(0))
MOST = 1 << 28  # bytes of sums of one launch: what they are of is held as long


def addresses(device: torch.device, *columns: Sequence[Tensor]) -> Tensor:
    """Where tensors lie, int64 [columns, length] on the device. The host waits for nothing."""
    table = torch.tensor([[t.data_ptr() for t in column] for column in columns], dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _key(pair: Pair) -> Any:
    """What pairs of one launch have in common. None: it is launched on its own, as copies of it may have to be made."""
    a, g = pair
    if a.dtype != g.dtype or a.data_ptr() % 16 or g.data_ptr() % 16 or 0 in (*a.shape, *g.shape):
        return None
    if is_half(a) and a.size(1) > 1 and not aligned(a, g):
        return None
    return a.dtype, a.device, a.shape, g.shape, a.stride(), g.stride()


def _groups(pairs: Sequence[Pair], most: Callable[[Tensor, Tensor], int]) -> list[list[int]]:
    """The places of pairs that go together, at most so many as `most` says of one of them."""
    groups: dict[Any, list[int]] = {}
    alone = pairs[0][0].is_cuda and torch.cuda.is_current_stream_capturing()  # a graph would read the table anew
    for place, pair in enumerate(pairs):
        key = None if alone else _key(pair)
        groups.setdefault((place,) if key is None else key, []).append(place)
    sizes = [most(*pairs[group[0]]) for group in groups.values()]
    return [group[low : low + size] for group, size in zip(groups.values(), sizes, strict=True)
            for low in range(0, len(group), size)]  # fmt: skip


def _most(a: Tensor, g: Tensor) -> int:
    """How many sums one launch forms."""
    return max(1, MOST // (4 * a.size(-1) * g.size(-1)))


def _layers(pairs: Sequence[Pair], places: list[int], *columns: list[Tensor]) -> tuple[Layers, Tensor]:
    """Their addresses, and a table of those of other columns below."""
    a = pairs[places[0]][0]
    table = addresses(a.device, *zip(*(pairs[place] for place in places), strict=True), *columns)
    return Layers(table[0], table[1], len(places), TYPES[a.dtype]), table[2:]


def linear_norm_sq(pairs: Sequence[Pair], method: str, units: float, tolerance: float) -> Tensor:
    """`linear.linear_norm_sq_and_bound` of each pair, [len(pairs), B] float64 without the bounds."""
    found: list[tuple[list[int], Tensor]] = []
    for places in _groups(pairs, lambda a, g: len(pairs)):
        layers = _layers(pairs, places)[0] if len(places) > 1 else None
        a, g = as_rows(*pairs[places[0]])
        norms, _ = linear._norms(a, g, method, torch.float64, None, (units, tolerance), layers)
        found.append((places, norms.view(len(places), -1)))
    if len(found) == 1:
        return found[0][1]
    rows = [(place, row) for places, norms in found for place, row in zip(places, norms.unbind(), strict=True)]
    return torch.stack([row for _, row in sorted(rows, key=lambda each: each[0])])


def _factors_of(c: Tensor, places: list[int]) -> Tensor:
    """The rows of factors [len(pairs), B] at these places; factors [B] as they are."""
    if c.dim() == 1:
        return c
    first, last = places[0], places[-1]
    return c[first : last + 1] if last - first + 1 == len(places) else torch.stack([c[place] for place in places])


def linear_clipped_sum(pairs: list[Pair], c: Tensor, drop: bool = False) -> list[Tensor]:
    """`clipped.linear_clipped_sum` of each pair, each in memory of its own. c: [B], or [len(pairs), B]. drop: let go of
    pairs that are done."""
    sums: list[Tensor] = [c] * len(pairs)
    for places in _groups(pairs, lambda a, g: 1 if not is_half(a) and float32_is_exact() else _most(a, g)):
        if len(places) == 1:
            sums[places[0]] = clipped.linear_clipped_sum(*pairs[places[0]], c if c.dim() == 1 else c[places[0]])
        else:
            a, g = as_rows(*pairs[places[0]])  # of this group: others may have columns of zeros behind theirs
            outs = [torch.empty((g.size(2), a.size(2)), dtype=torch.float32, device=a.device) for _ in places]
            with torch.cuda.device_of(a):
                layers, table = _layers(pairs, places, outs)
                clipped._launch(a, g, _factors_of(c, places), outs[0], False, None, None, layers, table[0])
            del a, g
            for place, out in zip(places, outs, strict=True):
                sums[place] = out
        for place in places if drop else ():
            pairs[place] = _GONE
    return sums


# ---------------------------------------------------------------------- stored gradients


def _alone(stacks: Sequence[Tensor]) -> bool:
    """Whether they are launched one by one: as they lie otherwise than the kernel takes for granted."""
    first = stacks[0]
    capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
    odd = any(not s.is_contiguous() or s.data_ptr() % 16 or s.shape != first.shape for s in stacks)
    return capturing or odd or len(stacks) == 1 or first.numel() == 0 or first.dtype not in TYPES


def square_sum(stacks: Sequence[Tensor]) -> Tensor:
    """`rows.square_sum` of each [B, ...], of one shape and type: [len(stacks), B] float64."""
    if _alone(stacks):
        return torch.stack([rows.square_sum(stack) for stack in stacks])
    first, layers = stacks[0], len(stacks)
    batch, count = first.size(0), first[0].numel()
    n = triton.cdiv(count, rows.PART)
    partial = torch.empty((layers * batch, n), dtype=torch.float64, device=first.device)
    with torch.cuda.device_of(first):
        rows.square_kernel[(layers * batch * n,)](
            addresses(first.device, stacks)[0], partial, batch, count, n, count, 1, PART=rows.PART, BLOCK=rows.BLOCK,
            TYPE=TYPES[first.dtype], num_warps=4,
        )  # fmt: skip
    return (partial[:, 0] if n == 1 else finish(partial, n, 0.0, torch.float64)[0]).view(layers, batch)


def weighted_sum(stacks: list[Tensor], c: Tensor, drop: bool = False) -> list[Tensor]:
    """`rows.weighted_sum` of each, in memory of its own. c: [B], or [len(stacks), B]. drop: the list is emptied."""
    if _alone(stacks):
        each = [c] * len(stacks) if c.dim() == 1 else c.unbind()
        sums = [rows.weighted_sum(stack, own) for stack, own in zip(stacks, each, strict=True)]
    else:
        first = stacks[0]
        batch, count = first.size(0), first[0].numel()
        sums = [torch.empty(first.shape[1:], dtype=first.dtype, device=first.device) for _ in stacks]
        with torch.cuda.device_of(first):
            table = addresses(first.device, stacks, sums)
            rows.weighted_kernel[(triton.cdiv(count, rows.BLOCK), len(stacks))](
                table[0], c, table[1], batch, count, count, 1, *clipped.factor_strides(c), SUM=tl.float32,
                BLOCK=rows.BLOCK, TYPE=TYPES[first.dtype], num_warps=4,
            )  # fmt: skip
    if drop:
        stacks.clear()
    return sums
