"""The fused head and cross-entropy (`linear_cross_entropy`), whose logits are never stored.

The function is seen by captures as torch's own are. Its use of the weight holds hidden states, labels, log-sum-exps and
the weights of the tokens' losses, and computes logits again for the clipped sum (`ops.head_sums`); the norms come of
the forward's own logits (`ops.head_loss`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ..batch_axis.batch_positions import WHY, by_place
from ..batch_axis.calls import Call, Tags, layout_rule
from ..batch_axis.layout import Layout
from ..batch_axis.tensor_notes import OUTSIDE
from ..errors import GraphError, SampleMixingError
from ..ops import head_sums
from ..ops.head import Head, Terms
from ..ops.head_loss import Wanted, evaluate, kept, tokens_at_once
from ..ops.registry import is_watched
from .captured_call import Captured, Context, capture
from .forward_pass import ForwardPass
from .head_samples import HeadGradients, HeadParts
from .linear import as_autocast, autocast_dtype, computed
from .parameter_use import ParameterUse, Positioned, Stored
from .rules import made_of_data, sample_layout, use_rule

SHARE = 0.5  # of the logits' bytes, which stored gradients of samples may take


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0,
    shift: bool = False, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of tokens by a linear head, one loss for each sample, without storing the logits [B, T, V].

    It equals `token_loss` (with shift=True `causal_lm_loss`) of hidden @ weight.T + bias with reduction="none": the
    mean over each sample's own labelled tokens, in float32 or better; 0 for a sample without labels. For private
    training, call it within the forward of the module that owns the weight, or of one around it.

    Args:
        hidden: [B, T, d], floats: what the head takes.
        weight: [V, d], the head's; it may be tied to an embedding.
        labels: [B, T], whole numbers below V, or ignore_index.
        bias: [V], or None.
        ignore_index: the label of tokens that are left out.
        label_smoothing: in [0, 1], as for torch's cross_entropy.
        softcap: a bound c of the logits, which become c tanh(logits / c); None: no bound. It comes after logit_scale.
        logit_scale: a constant by which logits are multiplied.
        z_loss: how much of the squared log-sum-exp of the logits is added to the loss of a token.
        shift: whether labels are not shifted yet: position t is to predict labels[:, t + 1].
        mask: [B, T] of 0 and 1 (or bool), like the labels. Labels are also left out where it is 0.

    Returns:
        Losses [B], float32 (float64 for float64).

    Raises:
        ValueError: if a shape, a type or an option is wrong.
        IndexError: if a label is no word (on the CPU).

    >>> hidden, weight = torch.zeros(2, 3, 5), torch.zeros(4, 5)
    >>> linear_cross_entropy(hidden, weight, torch.tensor([[1, 2, 3], [1, -100, -100]]))
    tensor([1.3863, 1.3863])
    """
    tensors = tuple(t for t in (hidden, weight, labels, bias, mask) if t is not None)
    options: dict[str, Any] = dict(
        ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale,
        z_loss=z_loss, shift=shift, mask=mask,
    )  # fmt: skip
    if has_torch_function(tensors):
        return handle_torch_function(linear_cross_entropy, tensors, hidden, weight, labels, bias, **options)  # type: ignore[no-any-return]
    terms, target = _checked(hidden, weight, labels, bias, **options)
    to = autocast_dtype(hidden)
    if to is not None:
        hidden, weight, bias = hidden.to(to), weight.to(to), None if bias is None else bias.to(to)
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, terms)  # type: ignore[no-any-return, no-untyped-call]


def _terms(terms: dict[str, Any]) -> Terms:
    """The numbers of the loss. Raises ValueError if one is none, or out of range."""
    for name in ("label_smoothing", "logit_scale", "z_loss", "softcap"):
        number: Any = terms.get(name)
        if name == "softcap" and number is None:
            continue
        if not isinstance(number, int | float) or not math.isfinite(number):
            what = number if isinstance(number, float) else type(number).__name__
            raise ValueError(
                f"{name} is a finite number, not {what}: it is never learned; multiply hidden states by what is"
            )
    found = Terms(**terms)
    if not 0 <= found.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], not {found.label_smoothing!r}")
    if found.softcap is not None and not found.softcap > 0:
        raise ValueError(f"softcap must be positive, or None, not {found.softcap!r}")
    return found


def _checked(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *, shift: bool = False,
             mask: Tensor | None = None, **terms: Any) -> tuple[Terms, Tensor]:  # fmt: skip
    """The terms of the loss, and the labels as the loss takes them. Raises ValueError; GraphError in a recording."""
    if is_watched():
        raise GraphError(
            "linear_cross_entropy computes norms of gradients within the forward, which cannot be replayed: store "
            "logits (causal_lm_loss), or take no graphed step"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise GraphError(
            "linear_cross_entropy does not run within torch.func's transforms (grad, vmap, jvp): take the loss of "
            "stored logits there (causal_lm_loss, token_loss)"
        )
    for name, value in {"hidden": hidden, "weight": weight, "labels": labels}.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a tensor, not {type(value).__name__}")
    if hidden.dim() != 3 or labels.shape != hidden.shape[:2]:
        raise ValueError(f"hidden [B, T, d] and labels [B, T], not {tuple(hidden.shape)} and {tuple(labels.shape)}")
    if weight.dim() != 2 or weight.size(1) != hidden.size(2) or not weight.size(0):
        turned = weight.dim() == 2 and weight.size(0) == hidden.size(2)
        raise ValueError(
            f"weight [V, {hidden.size(2)}] for hidden {tuple(hidden.shape)}, not {tuple(weight.shape)}"
            f"{': give its transpose, weight.t()' if turned else ''}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias [{weight.size(0)}], not {tuple(bias.shape)}")
    operands = [weight] if bias is None else [weight, bias]
    cast = autocast_dtype(hidden) is not None
    if not hidden.is_floating_point() or not all(cast or t.dtype == hidden.dtype for t in operands):
        kinds = " and ".join(str(t.dtype) for t in (hidden, *operands))
        raise ValueError(f"hidden, weight and bias are floats of one type, not {kinds}")
    if any(t.device != hidden.device for t in operands):
        raise ValueError(f"weight and bias on the device of hidden, {hidden.device}, not {weight.device}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are whole numbers, not {labels.dtype}")
    found = _terms(terms)
    target = labels.to(hidden.device, torch.long)
    if mask is not None:
        if mask.shape != labels.shape:
            raise ValueError(f"a mask of the shape {tuple(labels.shape)}, not {tuple(mask.shape)}")
        if mask.device.type == "cpu" and mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError("a mask holds 0 and 1 (or bool); an additive mask of attention is none")
        target = target.masked_fill(mask.to(target.device) == 0, found.ignore_index)
    if shift:  # the last position has nothing to predict
        target = torch.cat([target[:, 1:], target.new_full((len(target), 1), found.ignore_index)], 1)
        target = target[:, : hidden.size(1)]
    return found, target


def _weights(labels: Tensor, terms: Terms, grad: Tensor) -> Tensor:
    """By how much each token's loss counts, [B,T], with this gradient of the samples' losses [B]."""
    keep = kept(labels, terms)
    return torch.where(keep, (grad / keep.sum(1).clamp(min=1)).unsqueeze(1), 0)


class _LinearCrossEntropy(torch.autograd.Function):
    """Without an engine: autograd's gradients of hidden, weight and bias."""

    @staticmethod
    def forward(node: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: Terms) -> Tensor:
        wanted = node.needs_input_grad
        found = evaluate(hidden, labels, Head(weight, bias, terms), Wanted(wanted[0], False, wanted[2]))
        node.terms = terms
        node.save_for_backward(hidden if wanted[1] else None, weight, bias, labels, found.lse, found.hidden, found.bias)
        return found.losses

    @staticmethod
    @once_differentiable
    def backward(node: Any, grad: Tensor) -> Any:
        hidden, weight, bias, labels, lse, dh, db = node.saved_tensors
        for operand in (weight, bias):  # if an engine is there it did not see this, and says so
            if operand is not None and operand.is_leaf:
                setattr(operand, OUTSIDE, True)
        of_weight = None
        if hidden is not None:
            head, weights = Head(weight, bias, node.terms), _weights(labels, node.terms, torch.ones_like(grad))
            of_weight = head_sums.clipped_sum(head, hidden, labels, lse, weights, grad).to(weight.dtype)
        of_hidden = None if dh is None else (dh * grad[:, None, None]).to(dh.dtype)
        of_bias = None if db is None else torch.mv(db.t(), grad).to(bias.dtype)
        return of_hidden, of_weight, of_bias, None, None


def outside(parameter: Tensor) -> str:
    """Where a parameter was used that got a gradient which no rule saw, and what to do, if that is known."""
    where = "outside of the model's forward, in the loss perhaps"
    if not vars(parameter).pop(OUTSIDE, False):
        return where
    return (
        "in linear_cross_entropy, outside of the model's forward: call it within the forward of the module that owns "
        "the weight, or of one around it, and let that return the losses"
    )


class HeadLoss(Positioned):
    """The operand [V,d] is a head behind which the cross-entropy of tokens stands.

    hidden: [B,T,d]. tokens: [B,T,3] float64: of each token its label, the log-sum-exp of its logits, and how much its
    loss counts in the batch's (0: it has none). known: squared norms and their bounds [B], if they are known already.
    """

    route = "recomputed"
    overwrites = True

    def __init__(
        self, operand: Tensor, hidden: Tensor, tokens: Tensor, head: Head, name: str,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(operand, hidden.size(0), name)
        self.hidden, self.tokens, self.head, self.known = hidden, tokens, head, known
        self.bound: Tensor | None = None if known is None else known[1]

    def sides(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.tokens

    def of(self, first: Tensor, second: Tensor, name: str) -> HeadLoss:
        return HeadLoss(self.operand, first, second, self.head, name)

    def is_like(self, other: Any) -> bool:
        return (
            self.head.terms == other.head.terms
            and self.head.weight.data_ptr() == other.head.weight.data_ptr()
            and (self.head.bias is other.head.bias or _same(self.head.bias, other.head.bias))
        )

    def holds(self) -> tuple[Tensor, ...]:
        return (*self.sides(), self.head.weight, *(() if self.head.bias is None else (self.head.bias,)))

    def _rows(self, low: int = 0, high: int | None = None) -> tuple[Head, Tensor, Tensor, Tensor, Tensor]:
        """The head, hidden, labels, log-sum-exps and weights of samples [low, high)."""
        labels, lse, weights = self.tokens[low:high].unbind(2)
        hidden = self.hidden[low:high]
        kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return self.head, hidden, labels.long(), lse.to(kind), weights.to(kind)

    def norm_sq(self) -> Tensor:
        if self.known is None:
            self.known = head_sums.norm_sq(*self._rows())
            self.bound = self.known[1]
        return self.known[0]

    def rounding(self) -> Tensor | None:
        if self.bound is None:
            self.norm_sq()
        return self.bound

    def per_sample(self, low: int, high: int) -> Tensor:
        return head_sums.per_sample(*self._rows(low, high))

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        takes = into is not None and into.is_contiguous() and self.hidden.dtype != torch.float64
        return head_sums.clipped_sum(*self._rows(), factors, into if takes else None)

    def cross_term_and_spread(self, ids: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """The inner product with a look-up of the same table, as `ops.embedding.cross_term_and_spread`."""
        return head_sums.cross_term_and_spread(*self._rows(), ids, e)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.data_ptr() == b.data_ptr()


class _HeadLoss(Captured):
    """The loss with its head detached; the gradients of each sample's own loss are computed with it.

    Made by the forward, beside the losses: labels as the loss takes them and log-sum-exps [B,T], and of what is wanted
    the gradients of hidden [B,T,d] and bias [B,V], and of the weight those of some samples [stored,V,d] and of the
    others squared norms with their bounds.
    """

    def __init__(self, forward_pass: ForwardPass, layout: Layout, labels: Tensor, terms: Terms) -> None:
        super().__init__(forward_pass, linear_cross_entropy.__name__, layout)
        self.labels, self.terms = labels, terms

    def forward(self, ctx: Context, *data: Tensor) -> Tensor:
        hidden = as_autocast(ctx, data[0])
        ctx.keep(*ctx.values)
        weight, bias = ctx.values
        ctx.stored = self._stored(ctx, hidden, weight) if ctx.learned[0] else 0
        wanted = Wanted(ctx.wanted[0], ctx.learned[0], ctx.learned[1], ctx.stored)
        found = evaluate(hidden, self.labels, Head(weight, bias, self.terms), wanted)
        parts = (found.hidden, found.bias, found.weight, found.norm_sq, found.bound)
        ctx.made = (self.labels, found.lse, *[part for part in parts if part is not None])
        return found.losses

    def _stored(self, ctx: Context, hidden: Tensor, weight: Tensor) -> int:
        """Of how many samples to store the gradients, whose logits are then not computed again: of all, if they take
        SHARE of the bytes of all logits; else as many as do with the logits that are there at once; or as a budget of
        memory has room for."""
        planner, (batch, length, width) = ctx.forward_pass.planner, hidden.shape
        size = 8 if hidden.dtype == torch.float64 else 4
        if planner.memory_budget is None:
            if width <= length * SHARE:
                return batch
            rows = batch * length * SHARE - tokens_at_once(length, weight.size(0) * size)
            return max(0, min(batch, int(rows / max(width, 1))))
        return max(0, min(batch, (planner.memory_budget - planner.held) // max(weight.numel() * size, 1)))

    def saved(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        return (computed(data[0]),) if ctx.learned[0] else ()

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        (weight, bias), grad, made = ctx.operands, grads[0].reshape(-1), iter(saved)
        hidden = next(made) if ctx.learned[0] else None
        labels, lse = next(made), next(made)
        if ctx.wanted[0]:
            next(made)
        if ctx.learned[1]:
            ctx.forward_pass.record(Stored(bias, next(made) * grad.unsqueeze(1), self.name))
        if hidden is None:
            return
        count, uses = ctx.stored, list[ParameterUse]()
        if count:
            uses.append(HeadGradients(weight, next(made), grad[:count], self.name))
        if count < len(hidden):
            weights = _weights(labels, self.terms, grad)
            tokens = torch.stack([torch.where(weights != 0, labels, 0).double(), lse.double(), weights.double()], 2)
            rest, scale = slice(count, None), grad[count:].double()
            known = next(made) * scale.square(), next(made) * scale.abs()
            head = Head(ctx.values[0], ctx.values[1], self.terms)
            uses.append(HeadLoss(weight, hidden[rest], tokens[rest], head, self.name, known))
        ctx.forward_pass.record(uses[0] if len(uses) == 1 else HeadParts(uses))

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if not ctx.wanted[0]:
            return []
        own = saved[int(ctx.learned[0]) + 2]
        return [(own * grads[0].view(-1, 1, 1)).to(own.dtype)]


def _place_of_labels(name: str, batch: int, layout: Layout | None, labels: Tensor, of: Layout | None,
                     constant: bool) -> str:  # fmt: skip
    """Why labels do not belong to the samples of hidden states that lie so; empty if they do."""
    if layout is None or batch <= 1 or layout.mixed:
        return ""
    if not layout.plain or layout.dim:
        return f"{name}() takes samples along the first dimension, one row each: hidden [B, T, d]"
    if of is None:
        return WHY if constant and by_place(labels, 0, layout) else ""
    if of.mixed or of.is_row_index:
        return f"{name}() takes labels made of several samples: {of.mixed}"
    return "" if of.plain and not of.dim else f"{name}() takes labels [B, T] of the samples in their order"


@layout_rule(linear_cross_entropy, by_value=True)
def _layout(call: Call) -> Tags:
    """The losses lie as the samples of hidden do."""
    names = ("hidden", "weight", "labels", "bias")
    hidden, weight, labels, bias = (call.argument(place, name) for place, name in enumerate(names))
    layout = call.layout(hidden)
    if any(isinstance(t, Tensor) and call.layout(t) is not None for t in (weight, bias)):
        return call.all_combined("takes a head made of the samples")
    if layout is None or layout.mixed or call.batch <= 1:
        return [(call.out, layout)] if layout is not None else [(call.out, call.layout(labels))]
    beside = [labels] + [mask for mask in (call.kwargs.get("mask"),) if mask is not None]
    for tensor in beside:
        why = _place_of_labels(call.name, call.batch, layout, tensor, call.layout(tensor), call.is_constant(tensor))
        if why:
            return call.all_combined(why)
    return [(call.out, Layout(call.batch))]


@use_rule(linear_cross_entropy)
def capture_head_loss(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """hidden by sample, labels beside it; a head that is learned, in part perhaps."""
    hidden, weight, labels, bias = args
    place = forward_pass.place(func.__name__)
    mask = kwargs.get("mask")
    if not made_of_data(forward_pass, hidden):
        raise SampleMixingError(f"{place}: hidden states are no data of the samples: each sample's must be its own.")
    if made_of_data(forward_pass, weight, bias):
        raise SampleMixingError(f"{place}: takes a head made of the samples.", f"{place} takes such a head")
    layout = sample_layout(forward_pass, hidden, func.__name__)
    call = Call(func, args, kwargs, forward_pass.batch)
    for tensor in (labels, *(() if mask is None else (mask,))):
        why = _place_of_labels(func.__name__, forward_pass.batch, layout, tensor, call.layout(tensor),
                               call.is_constant(tensor))  # fmt: skip
        if why:
            raise SampleMixingError(f"{place}: {why}.", f"{place}: {why}")
    terms, target = _checked(hidden, weight, labels, bias, **kwargs)
    one = _HeadLoss(forward_pass, layout, target, terms)
    return capture(one, Context(forward_pass, weight, bias), hidden)
