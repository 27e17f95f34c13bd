"""Weight gradients of a stack of matrices used by routed rows (experts), per sample: G_be = sum of g_t a_t^T over the
rows t of sample b that went to matrix e.

Gradients of different matrices share no element, so |G_b|^2 = sum_e |G_be|^2, each of a product with few rows: S rows
sorted by (matrix, sample) fall into segments, and a segment of n rows costs n^2 (I + O) by the gram route. On a device
the host knows no n: there `segments` takes the sums of g_t a_t^T themselves.
Source: ghost norm, Li et al. 2022, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import bounds, extension, segments
from .common import accumulate, norm_type, sum_type
from .linear import (
    GRAM_TOLERANCE,
    ROUNDING_COMPILED,
    UNDERFLOW,
    compiled_gram_is_cheaper,
    reference_norm_sq,
    write_clipped_sum,
)
from .registry import cpp, define


def order_of(ids: Tensor, owner: Tensor, experts: int, batch: int) -> tuple[Tensor, Tensor | None]:
    """Segment of each row, sorted, and the order that sorts them; None where they are in order.

    ids, owner: int64 [S]. Rows of no matrix (ids outside [0, experts)) are behind all others, in segment
    experts * batch. On the CPU the look costs nothing; on a device it would stop the stream.
    """
    outside = (ids < 0) | (ids >= experts)
    keys = torch.where(outside, experts * batch, ids * batch + owner)
    if keys.device.type == "cpu" and not bool((keys[1:] < keys[:-1]).any()):
        return keys, None
    return torch.sort(keys, stable=True)


def _check(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor) -> None:
    rows = a.shape[:1]
    if a.dim() != 2 or g.dim() != 2 or not rows == g.shape[:1] == ids.shape == owner.shape:
        raise ValueError(
            f"expected a [S,I], g [S,O], ids [S] and owner [S]; got {tuple(a.shape)}, {tuple(g.shape)}, "
            f"{tuple(ids.shape)} and {tuple(owner.shape)}"
        )
    if any(t.is_floating_point() or t.is_complex() or t.dtype == torch.bool for t in (ids, owner)):
        raise TypeError(f"ids and owner must be integers, not {ids.dtype} and {owner.dtype}")


def _in_order(
    a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows and their owners by segment, and where segments start: int64 [experts * batch + 1]."""
    _check(a, g, ids, owner)
    if owner.device.type == "cpu":
        routed = (ids >= 0) & (ids < experts)
        if bool((((owner < 0) | (owner >= batch)) & routed).any()):
            raise IndexError(f"owner must be the sample of each row, in [0, {batch}): {owner[routed].aminmax()}")
    keys, order = order_of(ids, owner, experts, batch)
    if order is not None:
        a, g, owner = a[order], g[order], owner[order]
    return a, g, owner, torch.searchsorted(keys, torch.arange(experts * batch + 1, device=keys.device))


def _by_tiles(a: Tensor, g: Tensor, batch: int) -> bool:
    """Whether segments are cut into tiles, as on a device, where a look at their lengths would stop the stream."""
    return a.device.type != "cpu" and batch > 0 and a.numel() > 0 and g.numel() > 0


def _matrices(starts: Tensor, batch: int) -> Iterator[tuple[int, slice]]:
    """Each matrix and its rows, which may be none."""
    ends = starts[:: max(batch, 1)].tolist()
    for expert, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        yield expert, slice(start, stop)


def padded(rows: Tensor, counts: Tensor) -> Tensor:
    """Rows [n, *] in the order of their samples, counts [B] of each -> [B, largest count, *], zeros behind."""
    owner = torch.repeat_interleave(counts)
    slot = torch.arange(owner.numel(), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    out = rows.new_zeros(counts.numel(), int(counts.max()), *rows.shape[1:])
    out[owner, slot] = rows
    return out


# ---------------------------------------------------------------------- reference


def _norm_sq(
    a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    kind = norm_type(a, dtype)
    a, g, _, starts = _in_order(a, g, ids, owner, experts, batch)
    if _by_tiles(a, g, batch):
        return segments.norm_sq(a, g, starts).view(experts, batch).sum(0).to(kind)
    total = torch.zeros(batch, dtype=torch.float64, device=a.device)
    for expert, rows in _matrices(starts, batch) if batch else ():
        if rows.start < rows.stop:
            counts = starts[expert * batch : (expert + 1) * batch + 1].diff()
            total += reference_norm_sq(padded(a[rows], counts), padded(g[rows], counts), dtype=torch.float64)
    return total.to(kind)


def _per_sample(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int) -> Tensor:
    a, g, _, starts = _in_order(a, g, ids, owner, experts, batch)
    if _by_tiles(a, g, batch):
        out = a.new_empty(experts * batch, g.size(1), a.size(1), dtype=sum_type(a))
        return segments.overwrite_sums(a, g, starts, out).unflatten(0, (experts, batch)).transpose(0, 1).contiguous()
    out = a.new_zeros(batch, experts, g.size(1), a.size(1), dtype=sum_type(a))
    ends = starts.tolist()
    for segment, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        if start < stop:
            into = out[segment % batch, segment // batch]
            torch.mm(accumulate(g[start:stop]).mT, accumulate(a[start:stop]), out=into)
    return out


def overwrite_routed_sum(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, c: Tensor, into: Tensor) -> Tensor:
    """`routed_clipped_sum` into memory [E,O,I] whose contents do not matter."""
    batch = c.numel()
    a, g, owner, starts = _in_order(a, g, ids, owner, into.size(0), batch)
    if _by_tiles(a, g, batch):
        return segments.overwrite_sums(a, g, starts[::batch].contiguous(), into, c[owner])
    for expert, rows in _matrices(starts, batch) if batch else ():
        if rows.start == rows.stop:
            into[expert].zero_()
            continue
        write_clipped_sum(a[rows], g[rows], c[owner[rows]], into[expert])
    return into if batch else into.zero_()


def _clipped_sum(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, c: Tensor, experts: int) -> Tensor:
    into = a.new_empty(experts, g.size(1), a.size(1), dtype=sum_type(a))
    return overwrite_routed_sum(a, g, ids, owner, c, into)


def rounding(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int) -> Tensor | None:
    """How far rounding may have a sample's part of the clipped sum off, [batch] float64; None: there are no rows."""
    if not batch or a.numel() == 0 or g.numel() == 0:
        return None
    a, g, _, starts = _in_order(a, g, ids, owner, experts, batch)
    return bounds.of_segments(a, g, starts, batch)


# ---------------------------------------------------------------------- C++


def longest_gram(i: int, o: int) -> int:
    """The most rows of a segment that the gram route takes: `compiled_gram_is_cheaper`, solved for them."""
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if compiled_gram_is_cheaper(middle, i, o) else (low, middle - 1)
    return low


def _norm_sq_cpu(
    a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """One call for all segments; float64 is left to the reference."""
    if not extension.takes(a, g) or a.numel() == 0 or g.numel() == 0 or not batch:
        return _norm_sq(a, g, ids, owner, experts, batch, dtype=dtype)
    kind = norm_type(a, dtype)
    a, g, _, starts = _in_order(a, g, ids, owner, experts, batch)
    kernels, threads, count = extension.module(), torch.get_num_threads(), experts * batch
    inputs, outputs = a.size(1), g.size(1)
    longest = longest_gram(inputs, outputs)
    first = torch.empty(count + 1, dtype=torch.int64)
    jobs = kernels.routed_jobs(starts.data_ptr(), count, longest, inputs, outputs, first.data_ptr())
    out, parts = extension.doubles(count), extension.doubles(4 * jobs)
    memory = extension.scratch(threads * kernels.routed_scratch())
    kernels.routed_norm(
        extension.matrix(a.unsqueeze(0)), extension.matrix(g.unsqueeze(0)), starts.data_ptr(), count, longest,
        first.data_ptr(), ROUNDING_COMPILED, GRAM_TOLERANCE, UNDERFLOW, out.data_ptr(), parts.data_ptr(),
        memory.data_ptr(), threads,
    )  # fmt: skip
    return out.view(experts, batch).sum(0).to(kind)


# ---------------------------------------------------------------------- operators

_norm_sq_op = define(
    "routed_norm_sq(Tensor a, Tensor g, Tensor ids, Tensor owner, SymInt experts, SymInt batch, *, "
    "ScalarType? dtype=None) -> Tensor",
    _norm_sq,
    lambda a, g, ids, owner, experts, batch, *, dtype=None: a.new_empty(batch, dtype=norm_type(a, dtype)),
    CPU=cpp(_norm_sq_cpu),
)
_per_sample_op = define(
    "routed_per_sample(Tensor a, Tensor g, Tensor ids, Tensor owner, SymInt experts, SymInt batch) -> Tensor",
    _per_sample,
    lambda a, g, ids, owner, experts, batch: a.new_empty(batch, experts, g.size(1), a.size(1), dtype=sum_type(a)),
)
_clipped_sum_op = define(
    "routed_clipped_sum(Tensor a, Tensor g, Tensor ids, Tensor owner, Tensor c, SymInt experts) -> Tensor",
    _clipped_sum,
    lambda a, g, ids, owner, c, experts: a.new_empty(experts, g.size(1), a.size(1), dtype=sum_type(a)),
)


def routed_norm_sq(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int, *,
                   dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """The squared norm of each sample's gradient of a stack of matrices [E,O,I]: [batch].

    Args:
        a: inputs of the routed rows [S,I], in any order; the order of (ids, owner) is the fastest.
        g: output gradients of the routed rows [S,O].
        ids: the matrix of each row, int64 [S]. Rows with an id outside [0, experts) have no gradient.
        owner: the sample of each row, int64 [S], in [0, batch).
        experts: E, the number of matrices.
        batch: the number of samples.
        dtype: the type of the result (default: float32, or float64 for float64 inputs).

    Raises:
        ValueError: if a shape is wrong.
    """
    return _norm_sq_op(a, g, ids, owner, experts, batch, dtype=dtype)  # type: ignore[no-any-return]


def routed_per_sample(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int) -> Tensor:
    """The gradient of each sample, materialised: [B,E,O,I], float32 (float64 for float64 inputs).

    The arguments and errors are those of `routed_norm_sq`.
    """
    return _per_sample_op(a, g, ids, owner, experts, batch)  # type: ignore[no-any-return]


def routed_clipped_sum(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, c: Tensor, experts: int) -> Tensor:
    """sum_b c_b (gradient of sample b): [E,O,I] float32.

    Samples with c_b = 0 contribute nothing, even if their numbers are NaN or infinite. c are the factors [B]; the other
    arguments are those of `routed_norm_sq`. Raises ValueError if a shape is wrong.
    """
    return _clipped_sum_op(a, g, ids, owner, c, experts)  # type: ignore[no-any-return]
