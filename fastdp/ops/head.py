"""A head and the loss behind it: logits of some tokens, for some words, and what makes them the loss's gradients.

Everything here is float32 at least, also of 16-bit numbers, so that logits that are computed again differ from what
they were by the rounding of float32 only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bounds import roundings, unit
from .common import accumulate, chunks, full_float32, sum_type
from .registry import triton_module
from .rows import square_sum

SLICE = 64 * 2**20  # bytes of a slice of the logits
# What logits computed again, by products of other shapes, may be off. MEASURED, in units of |h| |W_v| in the last
# place: 2.3 at most for numbers of both signs, 12 for positive ones, 72 for equal ones, which are all rounded alike
# (1.4 times what `bounds.roundings` says of as many terms); then the logits come near to |h| |W_v|.
AGAIN, STEADY = 4.0, 1.5


class Terms(NamedTuple):
    """What makes a token's loss of its logits; `fastdp.losses.linear_cross_entropy` says what each is."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0


def kernels_for(z: Tensor) -> Any:
    """The module of the Triton kernel that takes such logits, or None."""
    if z.device.type != "cuda" or z.dtype != torch.float32:
        return None
    found = triton_module("head_loss")
    return None if isinstance(found, str) else found


def _sizes(h: Tensor) -> Tensor:
    """The size of each token's hidden state, h [B,T,d]: [B,T] float64, without a copy of h."""
    return square_sum(h.flatten(0, 1)).sqrt().view(h.shape[:2])


class Head:
    """A head and its loss: weight [V,d], bias [V] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None, terms: Terms) -> None:
        self.weight, self.bias, self.terms = weight, bias, terms
        self.vocabulary = weight.size(0)
        self._largest: Tensor | None = None  # |W_v|, once asked for

    def logits(self, h: Tensor, low: int = 0, high: int | None = None, out: Tensor | None = None) -> Tensor:
        """W h + b of tokens [N,d] for words [low, high): [N, high - low], in float32 at least."""
        high = self.vocabulary if high is None else high
        if out is None:
            out = h.new_empty((h.size(0), high - low), dtype=sum_type(h))
        for start, stop in self.slices(h, low, high):
            part, weight = out[:, start - low : stop - low], self.weight[start:stop]
            if h.is_cuda and h.dtype == weight.dtype and h.dtype in (torch.bfloat16, torch.float16):
                part.copy_(torch.mm(h, weight.t(), out_dtype=torch.float32))  # type: ignore[call-overload]
                continue
            with full_float32(out):
                torch.mm(accumulate(h).to(out.dtype), weight.to(out.dtype).t(), out=part)
        if self.bias is not None:
            out += self.bias[low:high].to(out.dtype)
        return out

    def slices(self, h: Tensor, low: int, high: int) -> Iterator[tuple[int, int]]:
        """All words at once, or as many whose weights need not be cast to float32 all at once."""
        if self.weight.dtype == sum_type(h):
            yield low, high
            return
        for start, stop in chunks(high - low, 4 * self.weight.size(1), SLICE):
            yield low + start, low + stop

    def scores(self, z: Tensor) -> Tensor | None:
        """Scale and cap logits in place; returns the slope of what became of them, None where it is logit_scale."""
        scale, cap = self.terms.logit_scale, self.terms.softcap
        if scale != 1.0:
            z.mul_(scale)
        if cap is None:
            return None
        z.div_(cap).tanh_()
        slope = z.square().neg_().add_(1.0)
        z.mul_(cap)
        return slope

    def finish(self, g: Tensor, labels: Tensor, low: int, hit: Tensor | None, slope: Tensor | None) -> None:
        """Turn p (times what z_loss makes of it) into the gradient by W h + b, in place. hit: what is taken off the
        label's entry and, in smoothing's share, off all: [N], or 1."""
        smoothing = self.terms.label_smoothing
        if smoothing:
            even = smoothing / self.vocabulary
            g.sub_(even if hit is None else hit.unsqueeze(1) * even)
        rows = torch.arange(g.size(0), device=g.device)
        off = labels.new_full(labels.shape, 1 - smoothing, dtype=g.dtype) if hit is None else hit * (1 - smoothing)
        inside = (labels >= low) & (labels < low + g.size(1))
        at = torch.where(inside, labels - low, 0)
        g.index_put_((rows, at), torch.where(inside, -off, 0.0), accumulate=True)
        if slope is not None:
            g.mul_(slope)
        if self.terms.logit_scale != 1.0:
            g.mul_(self.terms.logit_scale)

    def gradient(self, h: Tensor, labels: Tensor, lse: Tensor, low: int, high: int) -> Tensor:
        """The gradient of each token's loss by the logits of words [low, high), [N, high - low]; labels and lse [N]."""
        g = self.logits(h, low, high)
        if (kernels := kernels_for(g)) is not None:
            kernels.gradient_(g, labels, low, self.vocabulary, *self.numbers(), lse=lse)
            return g
        slope = self.scores(g)
        g.sub_(lse.unsqueeze(1)).exp_()
        if self.terms.z_loss:
            g.mul_((1 + 2 * self.terms.z_loss * lse).unsqueeze(1))
        self.finish(g, labels, low, None, slope)
        return g

    def numbers(self) -> tuple[float, float | None, float, float]:
        """Scale, soft cap, smoothing and share of the z-loss, as the kernel takes them."""
        terms = self.terms
        return terms.logit_scale, terms.softcap, terms.label_smoothing, terms.z_loss

    def token_losses(self, lse: Tensor, at_label: Tensor, mean: Tensor | None) -> Tensor:
        """The loss of each token from its log-sum-exp, the score of its label and the mean of all scores."""
        losses = lse - at_label
        if mean is not None:
            smoothing = self.terms.label_smoothing
            losses = (1 - smoothing) * losses + smoothing * (lse - mean)
        return losses + self.terms.z_loss * lse.square() if self.terms.z_loss else losses

    def entries(self, h: Tensor, labels: Tensor, lse: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the tokens' losses by the logits of some words, and their probabilities: [B,T,K] each.

        h: [B,T,d]. labels, lse: [B,T,1]. ids: of the words, [B,K].
        """
        z = torch.bmm(h, self.weight[ids].to(h.dtype).mT)
        if self.bias is not None:
            z += self.bias[ids].to(z.dtype).unsqueeze(1)
        slope = self.scores(z)
        p = z.sub_(lse).exp_()
        g = p * (1 + 2 * self.terms.z_loss * lse) if self.terms.z_loss else p.clone()
        if self.terms.label_smoothing:
            g -= self.terms.label_smoothing / self.vocabulary
        g -= (labels == ids.unsqueeze(1)).to(g.dtype) * (1 - self.terms.label_smoothing)
        if slope is not None:
            g *= slope
        return g * self.terms.logit_scale, p

    def again(self, h: Tensor, lse: Tensor) -> Tensor:
        """How far the gradient of each token may be off where its logits are computed again, as a share of its
        probabilities: [B,T] float64, of h [B,T,d] and lse [B,T]."""
        largest = self._largest = self._largest_row() if self._largest is None else self._largest
        scale, size = abs(self.terms.logit_scale), lse.abs().double()
        reach = _sizes(h) * largest * scale  # |h| |W_v|
        steady = (size - math.log(self.vocabulary) - reach / 4).clamp(min=0)
        units = AGAIN * reach + STEADY * roundings(h.size(2)) * steady
        return units * (unit(h) * scale * (1 + 2 * abs(self.terms.z_loss) * (1 + size)))

    def _largest_row(self) -> Tensor:
        """The largest |W_v|, float64."""
        largest = self.weight.new_zeros((), dtype=torch.float64)
        for start, stop in chunks(self.vocabulary, 4 * self.weight.size(1), SLICE):
            own = torch.linalg.vector_norm(accumulate(self.weight[start:stop]), dim=1)
            largest = torch.maximum(largest, own.amax().double())
        return largest

    def doubt(self, h: Tensor, weights: Tensor, lse: Tensor) -> Tensor:
        """What that does to sums of weight_t g_t h_t^T: [B] float64; weights [B,T]."""
        return torch.where(weights != 0, self.again(h, lse) * _sizes(h) * weights.abs(), 0).sum(1)

    def times_weight(self, g: Tensor, low: int = 0) -> Tensor:
        """sum_v g_tv W_v over the words of a slice that begins with `low`: [N,d]."""
        high, total = low + g.size(1), None
        for start, stop in self.slices(g, low, high):
            weight, part = self.weight[start:stop], g[:, start - low : stop - low]
            if g.is_cuda and weight.dtype != g.dtype:  # as an ordinary backward: in the type of the weights
                found = torch.mm(part.to(weight.dtype), weight).to(g.dtype)
            else:
                with full_float32(g):
                    found = torch.mm(part, weight.to(g.dtype))
            total = found if total is None else total.add_(found)
        assert total is not None
        return total


def words(count: int, vocabulary: int, size: int) -> Iterator[tuple[int, int]]:
    """Slices of the vocabulary, as wide as logits of so many tokens allow."""
    return chunks(vocabulary, max(count, 1) * size, SLICE)
