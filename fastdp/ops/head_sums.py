"""Per-sample gradients of a head's weight by its loss, from what is kept of each token: norms, sums, entries.

Kept are hidden states h [B,T,d], labels [B,T], the log-sum-exps of the logits [B,T] and weights of the tokens' losses
[B,T]. The gradient of sample b is sum_t weight_bt g_bt h_bt^T, with g computed again, a slice of the vocabulary at a
time: no slice of it meets another, so squared norms add up over slices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .bounds import added, enlarged, roundings, unit
from .common import accumulate, chunks, exactly, full_float32, sum_type
from .head import Head, words
from .linear import norm_sq_and_bound, write_clipped_sum

TOKENS = 4096  # at once, at least those of a sample: products of so many rows run at full speed
_NOTHING = 1e4  # a log-sum-exp that makes all probabilities of a token 0


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without a graph, autocast, and modes that follow what users compute."""
    with torch.no_grad(), exactly(), torch._C.DisableTorchFunction():
        yield


def _bytes(h: Tensor) -> int:
    return torch.finfo(sum_type(h)).bits // 8


def norm_sq(head: Head, h: Tensor, labels: Tensor, lse: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms [B] float64, enlarged by what rounding may do to the sums, and that bound [B]."""
    batch, length, _ = h.shape
    squares, bound_sq = (h.new_zeros(batch, dtype=torch.float64) for _ in range(2))
    with _alone():
        for low, high in chunks(batch, length, TOKENS):
            rows, y, kept = h[low:high].flatten(0, 1), labels[low:high].flatten(), weights[low:high, :, None]
            a = torch.where(kept != 0, accumulate(h[low:high]) * kept, 0)
            for start, stop in words(rows.size(0), head.vocabulary, _bytes(h)):
                g = head.gradient(rows, y, lse[low:high].flatten(), start, stop)
                found, bound = norm_sq_and_bound(a, g.view(high - low, length, stop - start))
                squares[low:high] += found
                if bound is not None:
                    bound_sq[low:high] += bound.square()
                del g
        doubt = head.doubt(h, weights, lse)
        total = added(bound_sq.sqrt(), doubt)
        assert total is not None
        return enlarged(squares, doubt), total


def clipped_sum(
    head: Head, h: Tensor, labels: Tensor, lse: Tensor, weights: Tensor, c: Tensor, out: Tensor | None = None
) -> Tensor:
    """sum_b c_b gradient_b, [V,d] float32 at least; samples with c_b = 0 contribute nothing, whatever they hold.

    out: float32 memory of that shape which the sum may take, contents lost.
    """
    kind = sum_type(h)
    if out is None:
        out = h.new_empty((head.vocabulary, h.size(2)), dtype=kind)
    keep = (weights != 0) & (c != 0).unsqueeze(1)
    factor = torch.where(keep, weights * c.to(kind).unsqueeze(1), 0).flatten()
    rows, y, own = h.flatten(0, 1), labels.flatten(), lse.flatten()
    if h.device.type == "cpu":  # others are not read
        if not bool(keep.all()):
            chosen = keep.flatten().nonzero().flatten()
            rows, y, own, factor = (t.index_select(0, chosen) for t in (rows, y, own, factor))
    else:
        rows = torch.where(keep.view(-1, 1), rows, 0)
        y, own = torch.where(keep.flatten(), y, 0), torch.where(keep.flatten(), own, _NOTHING)
    if not rows.numel():
        return out.zero_()
    with _alone():
        for start, stop in words(rows.size(0), head.vocabulary, _bytes(h)):
            g = head.gradient(rows, y, own, start, stop)
            write_clipped_sum(rows, g, factor, out[start:stop])
            del g
    return out


def per_sample(head: Head, h: Tensor, labels: Tensor, lse: Tensor, weights: Tensor) -> Tensor:
    """The gradient of each sample, materialised: [B,V,d]."""
    out = h.new_empty((h.size(0), head.vocabulary, h.size(2)), dtype=sum_type(h))
    kept = weights.unsqueeze(-1)
    a = torch.where(kept != 0, accumulate(h) * kept, 0)
    with _alone(), full_float32(out):
        for start, stop in words(h.size(0) * h.size(1), head.vocabulary, _bytes(h)):
            g = head.gradient(h.flatten(0, 1), labels.flatten(), lse.flatten(), start, stop)
            torch.bmm(g.view(*h.shape[:2], stop - start).mT, a, out=out[:, start:stop])
            del g
    return out


def cross_term_and_spread(
    head: Head, h: Tensor, labels: Tensor, lse: Tensor, weights: Tensor, ids: Tensor, e: Tensor
) -> tuple[Tensor, Tensor]:
    """<G_embedding, G_head> of each sample, for a table that is looked up (ids [B,K], output gradients e [B,K,d]) and
    is the head; and what its rounding is to be told from, as of `embedding.cross_term_and_spread`: [B] float64 each.

    It is sum_{k,t} weight_t g_t[ids_k] (e_k . h_t): of the logits, those of the words that were looked up.
    """
    out, spread = (h.new_empty(h.size(0), dtype=torch.float64) for _ in range(2))
    e, wide = accumulate(e), accumulate(h)
    again = head.again(h, lse) / (2 * unit(h) * roundings(h.size(2)))  # in units of the dots' rounding
    with _alone(), full_float32(out.float()):
        for low, high in chunks(h.size(0), 5 * ids.size(1) * h.size(1) * _bytes(h)):
            own, y, kept = ids[low:high], labels[low:high, :, None], weights[low:high, :, None]
            g, p = head.entries(wide[low:high], y, lse[low:high, :, None], own)
            g = torch.where(kept != 0, g * kept, 0)
            sizes = torch.linalg.vector_norm(wide[low:high], dim=2)  # [b, T]
            entries = g.abs() + torch.where(kept != 0, p * kept.abs(), 0) * again[low:high, :, None].to(g.dtype)
            along = torch.bmm(sizes.unsqueeze(1), entries).squeeze(1)  # [b, K]
            spread[low:high] = (along.double() * torch.linalg.vector_norm(e[low:high], dim=2)).sum(1)
            dots = torch.bmm(wide[low:high], e[low:high].to(wide.dtype).mT)
            out[low:high] = (dots * g).sum((1, 2), dtype=torch.float64)
    return out, spread


def cross_term_of_stored(grads: Tensor, ids: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_term_and_spread` where the head's gradients [B,V,d] are stored: the rows that were looked up."""
    cross, spread = (grads.new_empty(grads.size(0), dtype=torch.float64) for _ in range(2))
    for low, high in chunks(grads.size(0), 2 * ids.size(1) * grads.size(2) * grads.element_size()):
        own = ids[low:high].unsqueeze(2).expand(-1, -1, grads.size(2))
        rows, others = grads[low:high].gather(1, own), accumulate(e[low:high])
        cross[low:high] = (rows * others).sum((1, 2), dtype=torch.float64)
        sizes = [torch.linalg.vector_norm(t, dim=2, dtype=torch.float64) for t in (rows, others)]
        spread[low:high] = (sizes[0] * sizes[1]).sum(1)
    return cross, spread
