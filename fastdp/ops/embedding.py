"""Gradients of table look-ups per sample: G_b[v] = sum of g_t over the positions t with id v.

The cross term of a table that is also the output head: design of fastdp, exact without G_b.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import accumulate, chunks, scaled, square_sum


def _two(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    if ids.shape != g.shape[:-1] or ids.dim() == 0:
        raise ValueError(f"expected ids [B,...] and g [B,...,d]; got {tuple(ids.shape)} and {tuple(g.shape)}")
    return ids.reshape(ids.size(0), -1), accumulate(g.reshape(ids.size(0), -1, g.size(-1)))


def _without_padding(ids: Tensor, g: Tensor, padding_idx: int | None) -> Tensor:
    if padding_idx is None:
        return g
    return torch.where((ids == padding_idx).unsqueeze(-1), torch.zeros((), dtype=g.dtype, device=g.device), g)


def embedding_norm_sq(ids: Tensor, g: Tensor, padding_idx: int | None = None) -> Tensor:
    """Squared norm of each sample's table gradient. ids [B,...] int, g [B,...,d] -> [B] float32.

    Rows of one sample with equal ids are added first; rows of `padding_idx` (not negative) have no gradient.
    """
    ids, g = _two(ids, g)
    g = _without_padding(ids, g, padding_idx)
    batch, k, d = g.shape
    if k <= 1 or batch == 0:
        return square_sum(g)
    if g.device.type == "cpu":
        ordered, order = ids.sort(dim=1, stable=True)
        fresh = torch.ones_like(ids)
        fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        segment = torch.empty_like(ids).scatter_(1, order, fresh.cumsum(1) - 1)  # of each position
        segment += torch.arange(batch).unsqueeze(1) * k
        sums = g.new_zeros(batch * k, d).index_add_(0, segment.flatten(), g.reshape(-1, d))
        return square_sum(sums.view(batch, k, d))
    out = g.new_empty(batch, dtype=torch.float64)  # equal ids by comparison: a fixed order of summation, no atomics
    for low, high in chunks(batch, 2 * k * k * g.element_size()):
        same = ids[low:high, :, None] == ids[low:high, None, :]
        sums = torch.bmm(same.to(g.dtype), g[low:high])  # for each position the sum over its id
        out[low:high] = (sums * g[low:high]).sum((1, 2), dtype=torch.float64)
    return out


def embedding_per_sample(ids: Tensor, g: Tensor, num_embeddings: int, padding_idx: int | None = None) -> Tensor:
    """The table gradient of each sample, [B, num_embeddings, d]."""
    ids, g = _two(ids, g)
    batch, _, d = g.shape
    flat = ids + torch.arange(batch, device=ids.device).unsqueeze(1) * num_embeddings
    g = _without_padding(ids, g, padding_idx).reshape(-1, d)
    return g.new_zeros(batch * num_embeddings, d).index_add_(0, flat.flatten(), g).view(batch, num_embeddings, d)


def embedding_clipped_sum(
    ids: Tensor,
    g: Tensor,
    c: Tensor,
    num_embeddings: int,
    padding_idx: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """sum_b c_b (table gradient of sample b), [num_embeddings, d] float32; added to `out` if given."""
    ids, g = _two(ids, g)
    g = scaled(_without_padding(ids, g, padding_idx), c)
    if out is None:
        out = g.new_zeros(num_embeddings, g.size(-1))
    return out.index_add_(0, ids.flatten(), g.reshape(-1, g.size(-1)).to(out.dtype))


def tied_cross_term(ids: Tensor, g_embedding: Tensor, h_head: Tensor, g_head: Tensor) -> Tensor:
    """<G_embedding, G_head> of each sample, for one table used to look up and as the head's weight.

    ids [B,K], g_embedding [B,K,d] of the look-up; h_head [B,T,d], g_head [B,T,V] of the head -> [B]:
    sum_{k,t} g_head[t, ids_k] (g_embedding_k . h_head_t).
    """
    ids, e = _two(ids, g_embedding)
    h, g = accumulate(h_head), accumulate(g_head)
    out = e.new_empty(ids.size(0))
    for low, high in chunks(ids.size(0), 2 * ids.size(1) * h.size(1) * e.element_size()):
        dots = torch.bmm(h[low:high], e[low:high].mT)  # [b, T, K]
        picked = g[low:high].gather(2, ids[low:high, None, :].expand(-1, h.size(1), -1))
        out[low:high] = (dots * picked).sum((1, 2))
    return out
