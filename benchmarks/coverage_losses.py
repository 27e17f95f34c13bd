"""A loss for each sample from what a model returns, whatever the order of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .coverage_inputs import Make
from .coverage_truth import Losses, NotBuilt, Sizes, default_dtype, from_batch_norm, take

NOT_A_LOSS = ("loss", "past_key_values", "attentions", "hidden_states", "cross_attentions")


def outputs(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that come out and need a gradient, by name; lists by name and place."""
    out = model(**{k: v for k, v in batch.items() if k != "seed"})
    items = out.items() if hasattr(out, "items") else enumerate(out if isinstance(out, list | tuple) else [out])
    found: dict[str, Tensor] = {}
    for name, value in items:
        if name in NOT_A_LOSS:
            continue
        many = value if isinstance(value, list | tuple) else [value]
        for i, tensor in enumerate(many):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.requires_grad:
                found[f"{name}.{i}"] = tensor
    return found


def losses_for(model: nn.Module, make: Make) -> Losses:
    """Losses of the outputs whose rows can be given to samples; raises where there is none."""
    _one_alone(model, make)
    shapes = [
        {n: t.shape for n, t in outputs(model, make(Sizes(b, 8))).items() if t.dim() and t.numel()} for b in (3, 2)
    ]
    orders = {n: order_of(model, make, n, shapes[0][n], shapes[1][n]) for n in shapes[0] if n in shapes[1]}
    found = {n: order for n, order in orders.items() if order is not None}
    if not found:
        raise NotBuilt(f"no output whose rows are those of samples alone among {sorted(orders)}")
    heads = [n for n in found if "logits" in n or n.startswith("pred_")] or list(found)

    def losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        out, seeds = outputs(model, batch), batch["seed"]
        mask = batch.get("attention_mask")
        return torch.stack([row_losses(found[n](out[n], len(seeds)), seeds, mask) for n in heads if n in out]).sum(0)

    return losses


# ---------------------------------------------------------------------- which rows are which sample's

Order = Callable[[Tensor, int], Tensor]  # (output, samples) -> the same with a sample's rows together, samples first


def batch_major(out: Tensor, size: int) -> Tensor:
    return out


def batch_minor(out: Tensor, size: int) -> Tensor:
    """Of rows [k * B], such as frames of videos one after the other."""
    return out.view(-1, size, *out.shape[1:]).transpose(0, 1).flatten(0, 1)


def batch_second(out: Tensor, size: int) -> Tensor:
    return out.transpose(0, 1)


def order_of(model: nn.Module, make: Make, name: str, three: torch.Size, two: torch.Size) -> Order | None:
    """How the rows of an output are the samples'. One row a sample is the order everywhere; any other is accepted only
    if each sample alone gives the batch's rows, for a wrong order would make a loss that couples samples."""
    if (three[0], two[0]) == (3, 2):
        return batch_major
    orders = []
    if three[0] * 2 == two[0] * 3:
        orders = [batch_major, batch_minor]
    elif len(three) > 1 and (three[1], two[1]) == (3, 2):
        orders = [batch_second]
    if not orders:
        return None
    batch = make(Sizes(2, 8))
    together = outputs(model, batch)[name]
    alone = torch.cat([order(outputs(model, take(batch, [i], 2))[name], 1) for order in orders[:1] for i in (0, 1)])
    close = lambda order: torch.allclose(order(together, 2), alone, rtol=1e-3, atol=1e-3)
    return next((order for order in orders if order(together, 2).shape == alone.shape and close(order)), None)


def _one_alone(model: nn.Module, make: Make) -> None:
    """Raises where one sample alone does not run, unless by BatchNorm, which is a property of the model."""
    try:
        outputs(model, make(Sizes(1, 8)))
    except ValueError as problem:
        if not from_batch_norm(problem):
            raise


# ---------------------------------------------------------------------- the losses


def row_losses(out: Tensor, seeds: Tensor, mask: Tensor | None = None) -> Tensor:
    """[B]: cross entropy of [B, V] and [B, T, V], mean over the sample's own tokens; mean of squares of the rest.
    Positions that the mask [B, T] calls padding count for nothing."""
    out = out.reshape(len(seeds), -1, *out.shape[1:]) if out.size(0) != len(seeds) else out
    if out.dim() in (2, 3) and 1 < out.size(-1) <= 256:
        flat = out.reshape(len(seeds), -1, out.size(-1))
        place = torch.arange(flat.size(1)) * 7
        labels = (seeds[:, None] * 5 + place[None]) % flat.size(-1)
        each = F.cross_entropy(flat.transpose(1, 2).clamp(-1e4, 1e4), labels, reduction="none")
        if mask is None or mask.shape != each.shape:
            return each.mean(1)
        return torch.where(mask > 0, each, 0.0).sum(1) / mask.sum(1)
    flat = out.reshape(len(seeds), -1).clamp(-1e4, 1e4)
    with default_dtype(torch.float32):
        weights = torch.linspace(0.5, 1.5, flat.size(1)).to(flat.dtype)
    return ((flat + 0.05 * seeds[:, None].to(flat.dtype)) * weights).square().mean(1)
