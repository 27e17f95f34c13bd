"""Nests: tuples, lists and dicts of arguments and results, walked in one way everywhere.

`nested_tensors` (batch_axis/inputs.py) also looks into the mappings and dataclasses that models take and return.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_in(nest: Any) -> Sequence[Tensor]:
    """Tensors in nested tuples, lists and dicts. (Asked for many times in every call: no generators.)"""
    if isinstance(nest, Tensor):
        return (nest,)
    if not isinstance(nest, tuple | list | dict):
        return ()
    found: list[Tensor] = []
    for item in nest.values() if isinstance(nest, dict) else nest:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, tuple | list | dict):
            found += tensors_in(item)
    return found


def tensors_of(nest: Any) -> list[Tensor]:
    """Tensors in whatever torch takes for a nest, also in classes that were registered as one."""
    return [nest] if isinstance(nest, Tensor) else [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def map_leaves(nest: Any, function: Callable[[Any], Any]) -> Any:
    """The same nest with every leaf replaced. (A module's function: a closure that calls itself would hold what it
    holds until Python's garbage collection.)"""
    if isinstance(nest, tuple):
        items = [map_leaves(item, function) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)  # also sizes, torch.return_types
    if isinstance(nest, list):
        return [map_leaves(item, function) for item in nest]
    if isinstance(nest, dict):
        return {key: map_leaves(item, function) for key, item in nest.items()}
    return function(nest)


def map_tensors(nest: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same nest with every tensor replaced."""
    return map_leaves(nest, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def signature(nest: Any, leaf: Callable[[Any], Any]) -> Any:
    """What tells one nest from another: kinds of its tuples and lists, keys of its dicts, and what `leaf` says of every
    leaf."""
    if isinstance(nest, tuple | list):
        return (type(nest), *[signature(item, leaf) for item in nest])
    if isinstance(nest, dict):
        return tuple((name, signature(item, leaf)) for name, item in nest.items())
    return leaf(nest)


def copy_of_mapping(mapping: Any) -> Any:
    """A shallow copy of a mutable mapping, of its own kind."""
    try:
        return copy.copy(mapping)
    except KeyError:  # its attributes are its keys, of which Python 3.10 asks for __getstate__
        other = type(mapping)()
        other.update(mapping)
        return other
