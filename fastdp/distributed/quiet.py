"""The hooks of fully_shard, out of sight of the engine.

They gather and free memory, wrap tensors for autograd, and change types: nothing of that mixes samples, and what they
do to memory must not be seen as calls on data. The samples lie in what comes out of a hook as in what went in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..layouts.inputs import nested_tensors
from ..layouts.layout import layout_on, tag, tag_of
from ..layouts.nests import map_tensors
from ..uses.links import link_of


def quiet(hook: Callable[..., Any], before: bool) -> Callable[..., Any]:
    """The hook, out of sight. before: it runs before a forward, with keyword arguments, else after one."""

    def of_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            found = hook(module, args, kwargs)
            return found if found is None else _carried((args, kwargs), found)

    def of_output(module: nn.Module, args: Any, out: Any) -> Any:
        with torch._C.DisableTorchFunction():
            found = hook(module, args, out)
            return found if found is None else _carried(out, found)

    made: Any = of_inputs if before else of_output
    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, None  # out of compiled code's sight, too
    return made


def _carried(given: Any, found: Any) -> Any:
    """What a hook made of these tensors, with their notes."""
    kept: dict[int, Tensor] = {}
    for old, new in zip(nested_tensors(given), nested_tensors(found), strict=True):
        if new is old:
            continue
        if link_of(old) is not None or isinstance(old, nn.Parameter):
            kept[id(new)] = old  # made of parameters: its gradient is pulled back through autograd's graph
        elif (known := layout_on(old)) is not None and (layout := tag_of(old, known.batch)) is not None:
            tag(new, layout)
    return map_tensors(found, lambda t: kept.get(id(t), t)) if kept else found
