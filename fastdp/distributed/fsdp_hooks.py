"""Runs the hooks of fully_shard without capture.

They gather and free memory, wrap tensors for autograd, and change types: nothing of that mixes samples, and what they
do to memory must not be seen as calls on data. The samples lie in what comes out of a hook as in what went in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..batch_axis.inputs import nested_tensors
from ..batch_axis.layout import layout_on, tag, tag_of
from ..grad_sample.parameter_links import link_of


def quiet(hook: Callable[..., Any], before: bool) -> Callable[..., Any]:
    """The hook, out of sight. before: it runs before a forward, with keyword arguments, else after one."""

    def of_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            given, of_parameters = _without_graphs((args, kwargs))
            found = hook(module, *given)
            if found is None and of_parameters:
                found = given
            return found if found is None else _carried(given, found, of_parameters)

    def of_output(module: nn.Module, args: Any, out: Any) -> Any:
        with torch._C.DisableTorchFunction():
            given, of_parameters = _without_graphs(out)
            found = hook(module, args, given)
            return found if found is None else _carried(given, found, of_parameters)

    made: Any = of_inputs if before else of_output
    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, None  # out of compiled code's sight, too
    return made


def _without_graphs(given: Any) -> tuple[Any, dict[int, Tensor]]:
    """The same without the graphs of tensors that are made of parameters (biases of relative positions that all blocks
    use), which stand under the ids of those in their places: their gradients are pulled back by the engine, later on,
    and fully_shard's function of inputs would send zeros to them in the backward."""
    of_parameters: dict[int, Tensor] = {}

    def without(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or (link_of(tensor) is None and not isinstance(tensor, nn.Parameter)):
            return tensor
        place = tensor.detach()
        of_parameters[id(place)] = tensor
        return place

    return _mapped(given, without), of_parameters


def _carried(given: Any, found: Any, of_parameters: dict[int, Tensor]) -> Any:
    """What a hook made of these tensors, with their notes, and those made of parameters as they were."""
    kept: dict[int, Tensor] = {}
    for old, new in zip(nested_tensors(given), nested_tensors(found), strict=True):
        if id(old) in of_parameters:
            kept[id(new)] = of_parameters[id(old)]
        elif new is old:
            continue
        elif link_of(old) is not None or isinstance(old, nn.Parameter):
            kept[id(new)] = old  # frozen, and cast perhaps
        elif (known := layout_on(old)) is not None and (layout := tag_of(old, known.batch)) is not None:
            tag(new, layout)
    return _mapped(found, lambda t: kept.get(id(t), t)) if kept else found


def _mapped(nest: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The nest with every tensor replaced, in dataclasses too, which fully_shard enters."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        names = () if isinstance(leaf, type) else getattr(leaf, "__dataclass_fields__", ())
        items = {name: getattr(leaf, name) for name in names}
        changed = {
            name: new for name, old in items.items() if nested_tensors(old) and (new := tree_map(of, old)) is not old
        }
        if not changed:
            return leaf
        whole = copy.copy(leaf)
        for name, item in changed.items():
            object.__setattr__(whole, name, item)  # of frozen ones, too
        return whole

    return tree_map(of, nest)
