"""Products of rows by segment where the host must not know how long segments are: it would wait for the device.

Rows of segment k are the rows [starts[k], starts[k + 1]), and what is wanted is sum_t g_t a_t^T over each. Segments are
cut into tiles of as many rows as a segment has on the average, the last of each filled up with zeros. S rows in K
segments of any lengths make at most S / tile + K tiles, so every size follows from the sizes of the arguments. Of the
products [O,I] of the tiles, a few rows are held at a time. Where Triton's kernels serve, they read `starts` themselves,
and there are no tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import extension
from .common import CHUNK_BYTES, accumulate, by_factors, full_float32, sum_type
from .rows import square_sum

_HELD = 4 * CHUNK_BYTES  # of products at a time: fewer and larger ones than on the CPU


class Tiles(NamedTuple):
    """row: place of each row of a tile, int64 [n, tile]; real: whether it is one, bool [n, tile]; segment: int64 [n],
    one behind the last for tiles of no rows."""

    row: Tensor
    real: Tensor
    segment: Tensor


def tiles_of(starts: Tensor, rows: int) -> Tiles:
    """Tiles of `rows` > 0 rows in segments that begin at starts, int64 [K + 1]. Rows behind these are left out."""
    device, segments = starts.device, starts.numel() - 1
    size = -(-rows // max(segments, 1))
    size = size if size <= 8 else -(-size // 8) * 8
    each = (starts.diff() + size - 1) // size  # tiles of each segment
    behind = each.cumsum(0)  # and of all up to it
    number = torch.arange(min(rows, rows // size + segments), device=device)
    segment = torch.searchsorted(behind, number, right=True)
    known = segment.clamp(max=segments - 1)
    first = starts[known] + (number - (behind - each)[known]) * size
    row = first[:, None] + torch.arange(size, device=device)
    real = (row < starts[known + 1][:, None]) & (segment < segments)[:, None]
    return Tiles(row.clamp(0, rows - 1), real, segment)


def products(a: Tensor, g: Tensor, starts: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """sum_t g_t a_t^T over the rows of each segment, a [S,I] and g [S,O]: slices of O, and [K, slice, I] of each."""
    segments, (inputs, outputs) = starts.numel() - 1, (a.size(1), g.size(1))
    tiles = tiles_of(starts, a.size(0))
    zero = torch.zeros((), dtype=sum_type(a), device=a.device)
    x, y = (torch.where(tiles.real[..., None], accumulate(t)[tiles.row], zero) for t in (a, g))  # [n, tile, I], O
    held = (tiles.segment.numel() + segments + 1) * inputs * x.element_size()
    step = max(1, _HELD // max(held, 1))
    for low in range(0, outputs, step):
        part = slice(low, min(outputs, low + step))
        with full_float32(x):
            each = torch.bmm(y[..., part].mT, x)
        out = each.new_zeros(segments + 1, *each.shape[1:])
        # (with `accumulate` in the order of the tiles: the same bits each time, where index_add adds in any order)
        yield part, out.index_put_((tiles.segment,), each, accumulate=True)[:-1]


def norm_sq(a: Tensor, g: Tensor, starts: Tensor) -> Tensor:
    """The squared norm of each segment's sum of g_t a_t^T: [K] float64."""
    if (kernels := extension.on_device("segments", a, g)) is not None and a.dtype == g.dtype:
        return kernels.norm_sq(a, g, starts)  # type: ignore[no-any-return]
    total = torch.zeros(starts.numel() - 1, dtype=torch.float64, device=a.device)
    for _, found in products(a, g, starts):
        total += square_sum(found)
    return total


def overwrite_sums(a: Tensor, g: Tensor, starts: Tensor, into: Tensor, factors: Tensor | None = None) -> Tensor:
    """The sums of g_t a_t^T, times the factor of each row [S], into memory [K,O,I] whose contents do not matter."""
    kernels = extension.on_device("segments", a, g)
    if kernels is not None and a.dtype == g.dtype and into.dtype == torch.float32:
        return kernels.overwrite_sums(a, g, starts, into, factors)  # type: ignore[no-any-return]
    if factors is not None:
        a, g = by_factors(accumulate(a), accumulate(g), factors)
    for part, found in products(a, g, starts):
        into[:, part] = found
    return into
