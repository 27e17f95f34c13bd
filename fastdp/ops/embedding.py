"""Gradients of table look-ups per sample: G_b[v] = sum of g_t over the positions t with id v.

Only rows that were looked up are touched: B K d work, no table per sample. The cross term of a table that is also
the output head: design of fastdp, exact without G_b. Equal ids are added in a fixed order, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import extension
from .checks import check_table_sum
from .common import DTYPES, accumulate, check_padding, chunks, norm_type, scaled, sum_type
from .noise import on_cuda
from .registry import Kernel, cpp, define, native, triton, triton_module
from .rows import square_sum


def _two(ids: Tensor, g: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
    """ids [B,K] and g [B,K,d]."""
    check_padding(padding_idx)
    if ids.shape != g.shape[:-1] or ids.dim() == 0:
        raise ValueError(f"expected ids [B,...] and g [B,...,d]; got {tuple(ids.shape)} and {tuple(g.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, not {ids.dtype}")
    positions = ids.numel() // ids.size(0) if ids.size(0) else 0
    return ids.reshape(ids.size(0), positions), g.reshape(ids.size(0), positions, g.size(-1))


def _without_padding(ids: Tensor, g: Tensor, padding_idx: int | None) -> Tensor:
    if padding_idx is None:
        return g
    return torch.where((ids == padding_idx).unsqueeze(-1), torch.zeros((), dtype=g.dtype, device=g.device), g)


# ---------------------------------------------------------------------- reference


def _norm_sq(ids: Tensor, g: Tensor, padding_idx: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    kind = norm_type(g, dtype)
    ids, g = _two(ids, g, padding_idx)
    g = _without_padding(ids, accumulate(g), padding_idx)
    batch, k, d = g.shape
    if g.numel() == 0:
        return g.new_zeros(batch, dtype=kind)
    if k == 1:
        return square_sum(g).to(kind)
    if g.device.type == "cpu":
        ordered, order = ids.sort(dim=1, stable=True)
        fresh = torch.ones_like(ids)
        fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        segment = torch.empty_like(ids).scatter_(1, order, fresh.cumsum(1).to(ids.dtype) - 1)  # of each position
        segment += torch.arange(batch, dtype=ids.dtype).unsqueeze(1) * k
        sums = g.new_zeros(batch * k, d).index_add_(0, segment.flatten(), g.flatten(0, 1))
        return square_sum(sums.view(batch, k, d)).to(kind)
    out = g.new_empty(batch, dtype=torch.float64)  # equal ids by comparison: a fixed order of summation, no atomics
    for low, high in chunks(batch, 2 * k * k * g.element_size()):
        same = ids[low:high, :, None] == ids[low:high, None, :]
        sums = torch.bmm(same.to(g.dtype), g[low:high])  # for each position the sum over its id
        out[low:high] = (sums * g[low:high]).sum((1, 2), dtype=torch.float64)
    return out.to(kind)


def _outside(value: int, rows: int) -> IndexError:
    return IndexError(f"id {value} is outside the table of {rows} rows")


def _check_ids(ids: Tensor, rows: int) -> None:
    if ids.device.type == "cpu" and ids.numel():  # on a device indexing itself asserts
        bad = (ids < 0) | (ids >= rows)
        if bool(bad.any()):
            raise _outside(int(ids[bad][0]), rows)


def _per_sample(ids: Tensor, g: Tensor, num_embeddings: int, padding_idx: int | None = None) -> Tensor:
    ids, g = _two(ids, g, padding_idx)
    _check_ids(ids, num_embeddings)
    batch, _, d = g.shape
    flat = ids + torch.arange(batch, device=ids.device).unsqueeze(1) * num_embeddings
    g = _without_padding(ids, accumulate(g), padding_idx).flatten(0, 1)
    return g.new_zeros(batch * num_embeddings, d).index_add_(0, flat.flatten(), g).view(batch, num_embeddings, d)


def _clipped_sum(ids: Tensor, g: Tensor, c: Tensor, num_embeddings: int, padding_idx: int | None = None) -> Tensor:
    out = g.new_zeros(num_embeddings, g.size(-1), dtype=sum_type(g))
    _add_clipped_sum(ids, g, c, num_embeddings, padding_idx, out=out)
    return out


def _add_clipped_sum(ids: Tensor, g: Tensor, c: Tensor, num_embeddings: int, padding_idx: int | None = None, *,
                     out: Tensor) -> None:  # fmt: skip
    ids, g = _two(ids, g, padding_idx)
    check_table_sum(g, c, num_embeddings, out)
    _check_ids(ids, num_embeddings)
    g = scaled(_without_padding(ids, accumulate(g), padding_idx), c)
    out.index_add_(0, ids.flatten(), g.flatten(0, 1).to(out.dtype))


def _cross_term(ids: Tensor, g_embedding: Tensor, h_head: Tensor, g_head: Tensor, *,
                dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    kind = norm_type(g_embedding, dtype)
    return cross_term_and_spread(ids, g_embedding, h_head, g_head)[0].to(kind)


def cross_term_and_spread(ids: Tensor, g_embedding: Tensor, h_head: Tensor, g_head: Tensor) -> tuple[Tensor, Tensor]:
    """`tied_cross_term` and what its rounding is to be told from: sum_{k,t} |g_head[t, ids_k]| |g_embedding_k| |h_t|,
    [B] float64 each."""
    ids, e = _two(ids, g_embedding)
    if (kernels := extension.on_device("embedding", e, h_head, g_head)) is not None:
        return kernels.cross_term_and_spread(ids, e, h_head, g_head)  # type: ignore[no-any-return]
    e, h = accumulate(e), accumulate(h_head)
    out, spread = (e.new_empty(ids.size(0), dtype=torch.float64) for _ in range(2))
    for low, high in chunks(ids.size(0), 3 * ids.size(1) * h.size(1) * e.element_size()):
        # of all logits' gradients [b, T, V] only those picked are cast: [b, T, K]
        picked = accumulate(g_head[low:high].gather(2, ids[low:high, None, :].expand(-1, h.size(1), -1)))
        sizes = torch.bmm(torch.linalg.vector_norm(h[low:high], dim=2).unsqueeze(1), picked.abs()).squeeze(1)  # [b, K]
        spread[low:high] = (sizes.double() * torch.linalg.vector_norm(e[low:high], dim=2)).sum(1)
        dots = torch.bmm(h[low:high], e[low:high].mT)
        out[low:high] = (dots * picked).sum((1, 2), dtype=torch.float64)
    return out, spread


# ---------------------------------------------------------------------- C++


def _native_norm_sq(ids: Tensor, g: Tensor, padding_idx: int | None = None, *,
                    dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    kind = norm_type(g, dtype)
    ids, g = _two(ids, g, padding_idx)
    if g.dtype not in DTYPES:
        return _norm_sq(ids, g, padding_idx, dtype=dtype)
    ids, g = ids.long().contiguous(), g.contiguous()
    out = torch.empty(g.size(0), dtype=torch.float64)
    module: Any = native()
    module.embedding_norm_sq(ids.data_ptr(), g.data_ptr(), DTYPES[g.dtype], *g.shape, padding_idx, out.data_ptr(),
                             torch.get_num_threads())  # fmt: skip
    return out.to(kind)


def _native_sum_into(ids: Tensor, g: Tensor, c: Tensor, rows: int, padding_idx: int | None, out: Tensor,
                     add: bool) -> None:  # fmt: skip
    ids, g = _two(ids, g, padding_idx)
    check_table_sum(g, c, rows, out)
    ids, g, c = ids.long().contiguous(), g.contiguous(), c.to(out.dtype).contiguous()
    module: Any = native()
    outside = module.embedding_clipped_sum(
        ids.data_ptr(), g.data_ptr(), DTYPES[g.dtype], c.data_ptr(), *g.shape, rows, padding_idx, out.data_ptr(),
        DTYPES[out.dtype], add, torch.get_num_threads(),
    )  # fmt: skip
    if outside >= 0:
        raise _outside(int(ids.view(-1)[outside]), rows)


def _native_clipped_sum(
    ids: Tensor, g: Tensor, c: Tensor, num_embeddings: int, padding_idx: int | None = None
) -> Tensor:
    if g.dtype not in DTYPES:
        return _clipped_sum(ids, g, c, num_embeddings, padding_idx)
    out = torch.empty(num_embeddings, g.size(-1), dtype=sum_type(g))
    _native_sum_into(ids, g, c, num_embeddings, padding_idx, out, False)
    return out


def _native_add_clipped_sum(ids: Tensor, g: Tensor, c: Tensor, num_embeddings: int, padding_idx: int | None = None, *,
                            out: Tensor) -> None:  # fmt: skip
    if g.dtype not in DTYPES or not out.is_contiguous() or out.dtype != sum_type(g):
        return _add_clipped_sum(ids, g, c, num_embeddings, padding_idx, out=out)
    _native_sum_into(ids, g, c, num_embeddings, padding_idx, out, True)
    torch.autograd.graph.increment_version(out)


# ---------------------------------------------------------------------- operators

_norm_sq_op = define(
    "embedding_norm_sq(Tensor ids, Tensor g, int? padding_idx=None, *, ScalarType? dtype=None) -> Tensor",
    _norm_sq,
    lambda ids, g, padding_idx=None, *, dtype=None: g.new_empty(ids.size(0), dtype=norm_type(g, dtype)),
    CPU=cpp(_native_norm_sq), CUDA=on_cuda("embedding_norm_sq", instead=triton("lookup", "embedding_norm_sq")),
)  # fmt: skip
_per_sample_op = define(
    "embedding_per_sample(Tensor ids, Tensor g, SymInt num_embeddings, int? padding_idx=None) -> Tensor",
    _per_sample,
    lambda ids, g, n, padding_idx=None: g.new_empty(ids.size(0), n, g.size(-1), dtype=sum_type(g)),
)
_clipped_sum_op = define(
    "embedding_clipped_sum(Tensor ids, Tensor g, Tensor c, SymInt num_embeddings, int? padding_idx=None) -> Tensor",
    _clipped_sum,
    lambda ids, g, c, n, padding_idx=None: g.new_empty(n, g.size(-1), dtype=sum_type(g)),
    CPU=cpp(_native_clipped_sum),
    CUDA=on_cuda("embedding_clipped_sum", instead=triton("lookup", "embedding_clipped_sum")),
)  # fmt: skip
_add_clipped_sum_op = define(
    "embedding_clipped_sum.out(Tensor ids, Tensor g, Tensor c, SymInt num_embeddings, int? padding_idx=None, *, "
    "Tensor(a!) out) -> ()",
    _add_clipped_sum,
    lambda ids, g, c, n, padding_idx=None, *, out: None,
    CPU=cpp(_native_add_clipped_sum),
    CUDA=on_cuda("embedding_clipped_sum", False, triton("lookup", "add_embedding_clipped_sum")),
)  # fmt: skip
_cross_term_op = define(
    "tied_cross_term(Tensor ids, Tensor g_embedding, Tensor h_head, Tensor g_head, *, ScalarType? dtype=None) "
    "-> Tensor",
    _cross_term,
    lambda ids, e, h, g, *, dtype=None: e.new_empty(ids.size(0), dtype=norm_type(e, dtype)),
    CUDA=Kernel("Triton", lambda: found if isinstance(found := triton_module("embedding"), str) else _cross_term),
)


def embedding_norm_sq(
    ids: Tensor, g: Tensor, padding_idx: int | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The squared norm of each sample's table gradient, sum_v |sum_{t: ids_t = v} g_t|^2: [B].

    Args:
        ids: whole numbers [B,...].
        g: output gradients [B,...,d].
        padding_idx: the id of positions without a gradient, never negative. For torch.nn.Embedding's padding_idx=-1,
            pass num_embeddings - 1.
        dtype: the type of the result (default: float32, or float64 for float64 g).

    Raises:
        ValueError: if a shape is wrong or padding_idx is negative.
    """
    return _norm_sq_op(ids, g, padding_idx, dtype=dtype)  # type: ignore[no-any-return]


def embedding_per_sample(ids: Tensor, g: Tensor, num_embeddings: int, padding_idx: int | None = None) -> Tensor:
    """The table gradient of each sample, materialised: [B, num_embeddings, d].

    The arguments are those of `embedding_norm_sq`. Raises IndexError if an id is outside the table, and ValueError if a
    shape is wrong or padding_idx is negative.
    """
    return _per_sample_op(ids, g, num_embeddings, padding_idx)  # type: ignore[no-any-return]


def embedding_clipped_sum(
    ids: Tensor,
    g: Tensor,
    c: Tensor,
    num_embeddings: int,
    padding_idx: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """sum_b c_b (table gradient of sample b): [num_embeddings, d] float32; it is added to `out` if given.

    Samples with c = 0 contribute nothing, even if their numbers are NaN or infinite. ids, g and padding_idx are those
    of `embedding_norm_sq`, and c are the factors [B].

    Raises:
        ValueError: if a shape is wrong or padding_idx is negative.
        IndexError: if an id is outside the table (on the CPU; nothing is added then).
    """
    if out is None:
        return _clipped_sum_op(ids, g, c, num_embeddings, padding_idx)  # type: ignore[no-any-return]
    _add_clipped_sum_op(ids, g, c, num_embeddings, padding_idx, out=out)
    return out


def tied_cross_term(ids: Tensor, g_embedding: Tensor, h_head: Tensor, g_head: Tensor, *,
                    dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """<G_embedding, G_head> of each sample, for a table that is both looked up and used as the weight of the head: [B].

    It is sum_{k,t} g_head[t, ids_k] (g_embedding_k . h_head_t).

    Args:
        ids: the ids of the look-up, [B,K].
        g_embedding: the output gradients of the look-up, [B,K,d].
        h_head: the inputs of the head, [B,T,d].
        g_head: the output gradients of the head, [B,T,V].
        dtype: the type of the result (default: float32, or float64 for float64 inputs).
    """
    if not len(ids) == len(h_head) == len(g_head) or h_head.shape[:-1] != g_head.shape[:-1]:
        shapes = [tuple(t.shape) for t in (ids, g_embedding, h_head, g_head)]
        raise ValueError(f"expected ids [B,K], g_embedding [B,K,d], h_head [B,T,d] and g_head [B,T,V]; got {shapes}")
    return _cross_term_op(ids, g_embedding, h_head, g_head, dtype=dtype)  # type: ignore[no-any-return]
