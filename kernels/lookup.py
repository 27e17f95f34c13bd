"""Norms and clipped sums of a table's gradient, on a GPU without nvcc: rows of the same id are added first.

Ids are sorted, so that equal ones lie one after the other; sums have one order, and the same bits each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdp.ops.checks import check_table_sum, rows_of
from fastdp.ops.common import norm_type, sum_type

from .common import extent, kernel

RUN = 64  # sorted positions that one program begins with


@kernel
def lookup_norm_kernel(p_ids, p_order, p_g, p_out, K, D, padding, n, stride_gb, stride_gk, BLOCK: tl.constexpr):
    """Of one sample and a block of columns: the squares of the sums over each id, in float64."""
    pid = tl.program_id(0)
    i_b, o = (pid // n).to(tl.int64), (pid % n) * BLOCK + tl.arange(0, BLOCK)
    total, run = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    before = tl.cast(-1, tl.int64)
    for k in range(K):
        word = tl.load(p_ids + i_b * K + k)
        row = p_g + i_b * stride_gb + tl.load(p_order + i_b * K + k) * stride_gk
        g = tl.load(row + o, mask=o < tl.where(word != padding, D, 0), other=0.0).to(tl.float64)
        fresh = (word != before) | (k == 0)
        total += tl.where(fresh, run * run, 0.0)
        run = tl.where(fresh, g, run + g)
        before = word
    tl.store(p_out + pid, tl.sum(total + run * run, 0))


@kernel
def lookup_sum_kernel(p_ids, p_order, p_g, p_c, p_table, N, K, D, V, padding, stride_gb, stride_gk,
                      RUN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The rows of the ids whose first position is among RUN sorted ones, of a block of columns."""
    k, o = tl.program_id(0).to(tl.int64) * RUN, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stop = tl.minimum(k + RUN, tl.cast(N, tl.int64))
    before = tl.load(p_ids + k - 1, mask=k > 0, other=-1)
    word = tl.load(p_ids + k)
    while (k < stop) & (word == before):  # begun by a program before
        k += 1
        word = tl.load(p_ids + k, mask=k < stop, other=-1)
    run = tl.zeros([BLOCK], p_table.dtype.element_ty)
    going = k < stop
    while going:
        place = tl.load(p_order + k)
        c = tl.load(p_c + place // K)
        row = p_g + (place // K) * stride_gb + (place % K) * stride_gk
        read = tl.where((word != padding) & (c != 0), D, 0)
        run += c * tl.load(row + o, mask=o < read, other=0.0).to(run.dtype)
        k += 1
        after = tl.load(p_ids + k, mask=k < N, other=-1)
        last = (after != word) | (k >= N)
        write = tl.where(last & (word >= 0) & (word < V), D, 0)
        into = p_table + word * D + o
        tl.store(into, tl.load(into, mask=o < write, other=0.0) + run, mask=o < write)
        run = tl.where(last, tl.zeros_like(run), run)
        going = (k < stop) | (last == 0)  # an id that goes on is gone through to its end
        word = after


# ---------------------------------------------------------------------- launchers


def embedding_norm_sq(
    ids: Tensor, g: Tensor, padding_idx: int | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """As `fastdp.ops.embedding_norm_sq` says."""
    kind = norm_type(g, dtype)
    ids, g = rows_of(ids, g, padding_idx)
    batch, k, d = g.shape
    if not g.numel():
        return torch.zeros(batch, dtype=kind, device=g.device)
    ordered, order = ids.sort(dim=1, stable=True)
    block = extent(d, 256)
    n = triton.cdiv(d, block)
    partial = torch.empty((batch, n), dtype=torch.float64, device=g.device)
    with torch.cuda.device_of(g):
        lookup_norm_kernel[(batch * n,)](
            ordered, order, g, partial, k, d, -1 if padding_idx is None else padding_idx, n, *g.stride()[:2],
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return partial.sum(1).to(kind)


def _sum_into(ids: Tensor, g: Tensor, c: Tensor, table: Tensor, padding_idx: int | None) -> None:
    ordered, order = ids.flatten().sort(stable=True)
    (_, k, d), count, block = g.shape, ids.numel(), extent(g.size(2), 256)
    with torch.cuda.device_of(g):
        lookup_sum_kernel[(triton.cdiv(count, RUN), triton.cdiv(d, block))](
            ordered, order, g, c.contiguous(), table, count, k, d, len(table),
            -1 if padding_idx is None else padding_idx, *g.stride()[:2], RUN=RUN, BLOCK=block, num_warps=4,
        )  # fmt: skip


def embedding_clipped_sum(
    ids: Tensor, g: Tensor, c: Tensor, num_embeddings: int, padding_idx: int | None = None, out: Tensor | None = None
) -> Tensor:
    """As `fastdp.ops.embedding_clipped_sum` says; added to `out` if given."""
    ids, g = rows_of(ids, g, padding_idx)
    kind = sum_type(g)
    check_table_sum(g, c, num_embeddings, out)
    direct = out is not None and out.dtype == kind and out.is_contiguous()
    table = out if out is not None and direct else torch.zeros(num_embeddings, g.size(-1), dtype=kind, device=g.device)
    if g.numel():
        _sum_into(ids, g, c.to(kind), table, padding_idx)
        torch.autograd.graph.increment_version(table)
    return table if out is None or direct else out.add_(table)


def add_embedding_clipped_sum(
    ids: Tensor, g: Tensor, c: Tensor, num_embeddings: int, padding_idx: int | None = None, *, out: Tensor
) -> None:
    """The same with its result in `out`."""
    embedding_clipped_sum(ids, g, c, num_embeddings, padding_idx, out)
