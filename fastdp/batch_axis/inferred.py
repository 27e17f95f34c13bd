"""Layouts inferred from an input's shape alone (k consecutive rows of each sample), and their check.

A guess does no harm where it is confirmed: where the rows enter rows that are known to be the same sample's, that
sample's output depends on no other rows. Where they contradict such rows, and are constants still, they are constants
to that function, as any input of unknown rows is. What reaches the model's output unconfirmed is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..utils.pytree import tensors_in
from .calls import Call, Inputs, Tags
from .operator_table import CONCATENATIONS, UNCHECKED

_NAMES = ("masked_scatter", "index_put", "index_add", "index_copy", "masked_fill", "where", "add", "sub", "mul", "div")


def with_inferred(call: Call, inputs: Inputs, tags: Tags, again: Callable[[Call], Tags]) -> Tags:
    """Layouts of the results, where an argument's layout is a guess: confirmed, dropped, or a guess still."""
    sure = [(tensor, layout) for tensor, layout in inputs if not layout.inferred]
    guesses = [(tensor, layout) for tensor, layout in inputs if layout.inferred]
    mixes = any(layout is not None and layout.mixed for _, layout in tags)
    level = max(layout.inferred for _, layout in guesses)
    if level < 2 and sure and mixes and not any(tensor.requires_grad or layout.mixed for tensor, layout in guesses):
        if call.in_place and any(tensor is call.args[0] for tensor, _ in guesses):
            return tags
        return again(call.supposing({id(tensor): None for tensor, _ in guesses}))
    left = level if mixes or not _confirms(call, sure, tags) else 0
    return [(tensor, layout and layout._replace(inferred=left)) for tensor, layout in tags]


def _confirms(call: Call, sure: Inputs, tags: Tags) -> bool:
    """Whether every row of the result is made of known rows of its sample too."""
    if len(tags) != 1 or not any(not layout.mixed and layout.alone < 0 for _, layout in sure):
        return False
    if call.func in CONCATENATIONS:
        layout = tags[0][1]
        dim = call.argument(1, "dim", 0) % call.out.dim() if isinstance(call.out, Tensor) else 0
        return layout is not None and layout.alone < 0 and dim != layout.dim
    if call.name in ("__setitem__", *_NAMES, *[f"{name}_" for name in _NAMES]) and call.name != "where":
        first = next(iter(tensors_in(call.args)), None)
        writes = call.name.rstrip("_") not in ("add", "sub", "mul", "div")
        return not writes or any(tensor is first for tensor, _ in sure)
    return call.func is F.scaled_dot_product_attention or call.func in UNCHECKED
