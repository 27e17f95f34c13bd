"""Cross-entropy of a head without its logits: losses, their gradients and per-sample norms, some logits at a time.

With h_t the hidden state of a token, z_t = scale (W h_t + b) its logits (softcap: s = cap tanh(z / cap)) and g_t the
gradient of its loss by W h_t + b, the gradients are sum_v g_tv W_v, g_t h_t^T and g_t. g_t follows from h_t, W and the
log-sum-exp of the token alone, so nothing of the size of the vocabulary is kept: logits are computed for a few samples
(`evaluate`), or of a slice of the vocabulary (the rest), used, and overwritten. They are float32 at least, also of
16-bit numbers: what is computed again differs from what it was by the rounding of float32.

Sources: the forward without logits is the idea of Wijmans et al. 2024, "Cut your losses in large-vocabulary language
models" (arXiv 2411.09009), the gradient within the forward that of Liger (Hsu et al. 2024, arXiv 2410.10989).
|sum_t g_t h_t^T|^2 by either route adds up over slices of the vocabulary; the rest is fastdp's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .bounds import added, enlarged
from .common import accumulate, chunks, exactly, full_float32, sum_type
from .head import Head, Terms, kernels_for, words
from .head_sums import norm_sq
from .linear import norm_sq_and_bound

LIMIT = 128 * 2**20  # bytes of whole samples' logits at once, for norms; one with more is taken by slices of words
PART = 64 * 2**20  # bytes of logits at once otherwise; a sample with more is taken a few tokens at a time
CACHED = 2**20  # bytes of logits for each thread, which several passes go over while they are in its cache


class Found(NamedTuple):
    """Of each sample's own loss: losses [B], log-sum-exps [B,T], gradients of hidden [B,T,d] and bias [B,V], and of the
    weight the gradients of the first samples [stored,V,d], of the others squared norms [B - stored] float64 with what
    sums may be off, [B - stored]. None for what was not wanted."""

    losses: Tensor
    lse: Tensor
    hidden: Tensor | None
    bias: Tensor | None
    norm_sq: Tensor | None
    bound: Tensor | None
    weight: Tensor | None = None


class Wanted(NamedTuple):
    """Which gradients are. weight: those of the first `stored` samples, squared norms of the others."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    stored: int = 0


def kept(labels: Tensor, terms: Terms) -> Tensor:
    """Which tokens have a loss, [B,T] bool."""
    return labels != terms.ignore_index


def check_labels(labels: Tensor, keep: Tensor, vocabulary: int) -> None:
    """Raises IndexError on a label that is no word. (On a device, an assertion of its own.)"""
    bad = keep & ((labels < 0) | (labels >= vocabulary))
    if labels.device.type == "cpu":
        if bool(bad.any()):
            raise IndexError(f"label {int(labels[bad][0])} is outside the vocabulary of {vocabulary} words")
    elif labels.device.type == "cuda":
        torch._assert_async(~bad.any())


def evaluate(hidden: Tensor, labels: Tensor, head: Head, wanted: Wanted) -> Found:
    """The losses of samples, and what is wanted of their gradients; hidden [B,T,d], labels [B,T].

    A sample's loss is the mean over its tokens that have one, 0 if there are none.
    """
    batch, length, width = hidden.shape
    kind = sum_type(hidden)
    keep = kept(labels, head.terms)
    check_labels(labels, keep, head.vocabulary)
    inverse = 1 / keep.sum(1).clamp(min=1).to(kind)  # [B]
    losses = hidden.new_zeros(batch, dtype=kind)
    lse = hidden.new_zeros((batch, length), dtype=kind)
    dh = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wanted.hidden else None
    db = hidden.new_zeros((batch, head.vocabulary), dtype=kind) if wanted.bias else None
    stored = min(wanted.stored, batch) if wanted.weight else 0
    normed = wanted.weight and stored < batch
    squares, bound = (hidden.new_zeros(batch - stored, dtype=torch.float64) if normed else None for _ in range(2))
    dw = hidden.new_empty((stored, *head.weight.shape), dtype=kind) if stored else None
    bytes_of_row = hidden.new_empty((), dtype=kind).element_size() * head.vocabulary
    buffer: list[Tensor] = []
    with torch.no_grad(), exactly():
        for low, high, known in _parts(batch, stored, length * bytes_of_row, normed):
            if known and not low:
                buffer.clear()  # logits of whole samples make room for the gradients
            places, own = _in_front(keep[low:high])  # tokens that have a loss, first
            count = places.size(1)
            into = dw[low:high] if known and dw is not None else None
            if not count or not width:
                if into is not None:
                    into.zero_()
                continue
            h = hidden[low:high].gather(1, places.unsqueeze(-1).expand(-1, -1, width))
            y = torch.where(own, labels[low:high].gather(1, places), 0)
            of_token = own.to(kind) * inverse[low:high, None]  # [b, T']
            found = _some(head, h, y, of_token, buffer, wanted, into)
            losses[low:high] = torch.where(own, found.losses * of_token, 0).sum(1)
            lse[low:high].scatter_(1, places, torch.where(own, found.lse, 0))
            if dh is not None and found.hidden is not None:
                dh[low:high].scatter_(1, places.unsqueeze(-1).expand(-1, -1, width), found.hidden.to(dh.dtype))
            if db is not None and found.bias is not None:
                db[low:high] = found.bias
            if squares is not None and bound is not None and not known:
                assert found.norm_sq is not None and found.bound is not None
                squares[low - stored : high - stored], bound[low - stored : high - stored] = found.norm_sq, found.bound
    return Found(losses, lse, dh, db, squares, bound, dw)


def _some(
    head: Head, h: Tensor, labels: Tensor, weights: Tensor, buffer: list[Tensor], wanted: Wanted, into: Tensor | None
) -> Found:
    """Of tokens [b,T,d], whose weights [b,T] are: by whole logits at once, or as many as fit. into: the memory of
    their gradients of the weight, if these are stored."""
    normed, row = wanted.weight and into is None, weights.element_size() * head.vocabulary
    if weights.numel() * row <= (LIMIT if normed else PART):
        return _by_tokens(head, h, labels, weights, buffer, wanted, into, h.size(1))
    if normed:
        return _sliced(head, h, labels, weights, wanted)
    return _by_tokens(head, h, labels, weights, buffer, wanted, into, tokens_at_once(h.size(1), row))


def tokens_at_once(length: int, bytes_of_row: int) -> int:
    """How many tokens of a sample are taken at once where its gradient is stored: in parts of equal sizes."""
    count = max(1, PART // bytes_of_row)
    return -(-length // max(1, -(-length // count)))


def _parts(batch: int, stored: int, size: int, normed: bool) -> Iterator[tuple[int, int, bool]]:
    """Samples to take at once, of so many bytes of logits each, and whether their gradients are stored: those last,
    which stay, so that they and the logits of whole samples are not there together."""
    for low, high in chunks(batch - stored, size, LIMIT if normed else PART):
        yield stored + low, stored + high, False
    for low, high in chunks(stored, size, PART):
        yield low, high, True


def _in_front(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Places [b,T'] of the tokens of each sample, those that are kept first, and which of these are; T' is as many as
    any sample keeps, on the CPU, where that is known."""
    if keep.device.type != "cpu" or bool(keep.all()):
        return torch.arange(keep.size(1), device=keep.device).expand(keep.shape), keep
    places = torch.argsort(~keep, dim=1, stable=True)[:, : int(keep.sum(1).max())]
    return places, keep.gather(1, places)


def _by_tokens(
    head: Head, h: Tensor, labels: Tensor, weights: Tensor, buffer: list[Tensor], wanted: Wanted, into: Tensor | None,
    count: int,
) -> Found:  # fmt: skip
    """Tokens [b,T,d], `count` of each sample at a time with all of their logits; norms take all at once. Losses and lse
    are each token's own, gradients of their sums by weights [b,T]."""
    batch, length, width = h.shape
    lse, losses = (torch.empty_like(weights) for _ in range(2))
    dh = h.new_empty(h.shape, dtype=sum_type(h)) if wanted.hidden else None
    db = h.new_zeros((batch, head.vocabulary), dtype=sum_type(h)) if wanted.bias else None
    a = g = h
    for low in range(0, length, count):
        part = slice(low, low + count)
        rows, w = h[:, part].flatten(0, 1), weights[:, part]
        z, own_lse, own_losses, r = _of_logits(head, rows, labels[:, part].flatten(), w.flatten(), buffer, wanted)
        lse[:, part], losses[:, part] = own_lse.view(w.shape), own_losses.view(w.shape)
        g = z.view(*w.shape, head.vocabulary)
        if dh is not None:
            dh[:, part] = torch.where(r != 0, head.times_weight(z) * r, 0).view(*w.shape, width)
        if db is not None:
            db += torch.bmm(r.view(w.shape).unsqueeze(1), g).squeeze(1)
        if wanted.weight:
            a = torch.where(w.unsqueeze(2) != 0, accumulate(rows).view(*w.shape, width) * r.view(*w.shape, 1), 0)
        if into is not None:
            with full_float32(into):
                for sum_of, g_of, a_of in zip(into, g, a, strict=True):
                    sum_of.addmm_(g_of.t(), a_of, beta=1.0 if low else 0.0)
    squares = bound = None
    if wanted.weight and into is None:
        squares, bound = norm_sq_and_bound(a, g)
        doubt = head.doubt(h, weights, lse)
        squares, bound = enlarged(squares, doubt), added(bound, doubt)
    return Found(losses, lse, dh, db, squares, bound)


def _of_logits(
    head: Head, rows: Tensor, y: Tensor, w: Tensor, buffer: list[Tensor], wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of tokens [N,d], turned into gradients, with what `_turned` gives: z [N,V], lse and losses [N],
    r [N,1]."""
    size = rows.size(0) * head.vocabulary
    if not buffer or buffer[0].numel() < size:
        buffer[:] = [rows.new_empty(size, dtype=sum_type(rows))]
    z = head.logits(rows, out=buffer[0][:size].view(rows.size(0), head.vocabulary))
    lse, losses, r = _turned(head, z, y, w, any(wanted))
    if any(wanted) and z.device.type == "cpu" and not bool(w.all()):  # a token without a loss may hold anything
        z.masked_fill_((w == 0).unsqueeze(1), 0)
    return z, lse, losses, r


def _turned(head: Head, z: Tensor, y: Tensor, w: Tensor, wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits [N,V] of labels [N] into gradients, if these are wanted, but for a factor of each token: it times its
    weight w [N] is what products take on their smaller side. Returns log-sum-exps and losses [N], and that, [N,1]."""
    smooth = bool(head.terms.label_smoothing)
    if (kernels := kernels_for(z)) is not None:
        lse, at_label, mean = kernels.gradient_(z, y, 0, head.vocabulary, *head.numbers(), write=wanted)
        return lse, head.token_losses(lse, at_label, mean if smooth else None), w.unsqueeze(1)
    row = z.size(1) * z.element_size()
    if z.device.type == "cpu" and z.size(0) * row > CACHED * torch.get_num_threads():
        some = chunks(z.size(0), row, CACHED * torch.get_num_threads())
        found = [_turned_rows(head, z[low:high], y[low:high], w[low:high], wanted) for low, high in some]
        lse, losses, r = map(torch.cat, zip(*found, strict=True))
        return lse, losses, r
    return _turned_rows(head, z, y, w, wanted)


def _turned_rows(head: Head, z: Tensor, y: Tensor, w: Tensor, wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`_turned` by torch's functions, one pass after the other."""
    smooth = bool(head.terms.label_smoothing)
    slope = head.scores(z)
    at_label = z.gather(1, y.unsqueeze(1)).squeeze(1)
    mean = z.mean(1) if smooth else None
    top = z.amax(1)
    total = z.sub_(top.unsqueeze(1)).exp_().sum(1)
    lse = top + total.log()
    losses = head.token_losses(lse, at_label, mean)
    if not wanted:
        return lse, losses, w.unsqueeze(1)
    hit: Tensor | None = total
    if head.terms.z_loss:  # may make the factor 0, by which nothing can be divided
        z.mul_(((1 + 2 * head.terms.z_loss * lse) / total).unsqueeze(1))
        hit = None
    head.finish(z, y, 0, hit, slope)
    return lse, losses, (w if hit is None else torch.where(w != 0, w / total, 0)).unsqueeze(1)


def _sliced(head: Head, h: Tensor, labels: Tensor, weights: Tensor, wanted: Wanted) -> Found:
    """`_by_tokens` by slices of the vocabulary, for norms: logits are computed twice."""
    rows, y, w = h.flatten(0, 1), labels.flatten(), weights.flatten()
    kind = sum_type(h)
    top = rows.new_full((rows.size(0),), -torch.inf, dtype=kind)
    total, at_label, added_up = (torch.zeros_like(top) for _ in range(3))
    every = list(words(rows.size(0), head.vocabulary, torch.finfo(kind).bits // 8))
    for low, high in every:
        z = head.logits(rows, low, high)
        head.scores(z)
        inside = (y >= low) & (y < high)
        picked = z.gather(1, torch.where(inside, y - low, 0).unsqueeze(1)).squeeze(1)
        at_label = torch.where(inside, picked, at_label)
        if head.terms.label_smoothing:
            added_up += z.sum(1)
        higher = torch.maximum(top, z.amax(1))
        shift = torch.where(higher == -torch.inf, 0, higher)
        total = total * (top - shift).exp() + z.sub_(shift.unsqueeze(1)).exp_().sum(1)
        top = higher
    lse = top + total.log()
    mean = added_up / head.vocabulary if head.terms.label_smoothing else None
    losses, lse_by_sample = head.token_losses(lse, at_label, mean).view(weights.shape), lse.view(weights.shape)
    dh = torch.zeros_like(rows, dtype=kind) if wanted.hidden else None
    db = h.new_zeros((h.size(0), head.vocabulary), dtype=kind) if wanted.bias else None
    if wanted.hidden or wanted.bias:
        for low, high in every:
            g = head.gradient(rows, y, lse, low, high)
            if dh is not None:
                dh += head.times_weight(g, low)
            if db is not None:
                db[:, low:high] = torch.bmm(weights.unsqueeze(1), g.view(*h.shape[:2], high - low)).squeeze(1)
            del g
    squares, bound = norm_sq(head, h, labels, lse_by_sample, weights)
    if dh is not None:
        dh = torch.where(w.unsqueeze(1) != 0, dh * w.unsqueeze(1), 0).view(h.shape)
    return Found(losses, lse_by_sample, dh, db, squares, bound)
