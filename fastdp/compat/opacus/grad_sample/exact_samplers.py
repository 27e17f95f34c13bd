"""Per-sample gradients of one layer, called as Opacus's functions in GRAD_SAMPLERS are: each sample alone, by autograd.

The engine does not call them. Scripts and tests that look one up and call it get what is right by definition, also
where Opacus's own functions are not (channels_last inputs, padding_mode, ids that stand twice in a bag). They are slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn

LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear, RNNLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.EmbeddingBag, nn.GroupNorm, nn.LayerNorm,
    nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, SequenceBias,
)  # fmt: skip
WITH_NORMS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding)
Gradients = dict[Tensor, Tensor]


def layer_grad_sample(layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor) -> Gradients:
    """{parameter that requires grad: its gradients [n, *shape]} of a layer's input and output gradients.

    Args: activations: the layer's arguments, samples first (of an `nn.EmbeddingBag` ids and offsets, perhaps weights);
    backprops: gradients with respect to its output, samples first.
    """
    trained = [p for p in layer.parameters(recurse=False) if p.requires_grad]
    buffers = [(b, b.clone()) for b in layer.buffers(recurse=False)]
    rows: list[list[Tensor]] = []
    try:
        with torch.autocast(backprops.device.type, enabled=False):
            for number, inputs in enumerate(_samples(layer, activations, len(backprops))):
                rows.append(_alone(layer, trained, inputs, backprops[number : number + 1]))
    finally:
        with torch.no_grad():
            for buffer, before in buffers:  # statistics of norms
                buffer.copy_(before)
    if not rows:
        return {p: p.new_zeros(0, *p.shape) for p in trained}
    return {p: torch.stack([row[n] for row in rows]) for n, p in enumerate(trained)}


def layer_norm_sample(layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor) -> Gradients:
    """{parameter: norms [n] of its gradients}; arguments of `layer_grad_sample`."""
    return {p: g.flatten(1).norm(dim=1) for p, g in layer_grad_sample(layer, activations, backprops).items()}


def _alone(layer: nn.Module, trained: list[nn.Parameter], inputs: Sequence[Any], backprop: Tensor) -> list[Tensor]:
    """The gradients of one sample."""
    with torch.enable_grad():
        kind = next((p.dtype for p in trained), backprop.dtype)
        wide = [x.detach().to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
        if isinstance(layer, SequenceBias) and not layer.batch_first:
            out = layer.forward(wide[0].transpose(0, 1)).transpose(0, 1)
        else:
            out = layer.forward(*wide)  # past the hooks, an engine's among them
        found = torch.autograd.grad(out, trained, backprop.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.detach() for p, g in zip(trained, found, strict=True)]


def _samples(layer: nn.Module, activations: Sequence[Tensor], count: int) -> list[tuple[Any, ...]]:
    """The layer's arguments of each sample."""
    offsets = activations[1] if len(activations) > 1 else None
    if not isinstance(layer, nn.EmbeddingBag) or offsets is None:
        return [tuple(x[n : n + 1] for x in activations if x is not None) for n in range(count)]
    ids, weights = activations[0], activations[2] if len(activations) > 2 else None
    edges = [*offsets.tolist()[:count], offsets.tolist()[count] if layer.include_last_offset else len(ids)]
    zero = offsets.new_zeros(1)
    found = []
    for low, high in zip(edges, edges[1:], strict=False):
        ends = torch.stack([zero[0], zero[0] + high - low]) if layer.include_last_offset else zero
        found.append((ids[low:high], ends, None if weights is None else weights[low:high]))
    return found
