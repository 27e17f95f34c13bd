"""Records of a batch, copied for collate_fn; also of datasets that return whole batches (`__getitems__`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from ..errors import StepError
from ..utils.pytree import copy_of_mapping
from ..utils.random_generators import RandomNumbers, kept_by


def fetches_batches(dataset: Any) -> bool:
    """Whether the dataset makes a batch of the records it is asked for, by __getitems__, in place of a list of them."""
    getter = _getter(dataset)
    if getter is None:
        return False
    before = RandomNumbers(set(), kept_by(getattr(getter, "__self__", None)))
    several, one = getter([0, 0, 0]), getter([0])
    before.put_back()
    return not (isinstance(several, list) and isinstance(one, list) and (len(several), len(one)) == (3, 1))


def nothing(items: Any) -> bool:
    """Whether this is a list of no records."""
    return isinstance(items, list) and not items


def is_one_batch(items: Any, dataset: Any) -> bool:
    """Whether a dataset has made one batch of the records it was asked for: no list, or one of a batch's tensors."""
    if not isinstance(items, list):
        return True
    tensors = all(isinstance(item, Tensor | np.ndarray) and item.ndim for item in items)
    return tensors and _getter(dataset) is not None and fetches_batches(dataset)


def _getter(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, "__getitems__", None)


def _arrays(value: Any) -> list[Tensor | np.ndarray[Any, Any]]:
    """The tensors and arrays with a dimension within a structure."""
    if isinstance(value, Tensor | np.ndarray):
        return [value] if value.ndim else []
    return [array for part in parts_of(value) for array in _arrays(part)]


def _is_mapping(value: Any) -> bool:
    return hasattr(value, "keys") and hasattr(value, "items")


def parts_of(value: Any) -> list[Any]:
    """What a tuple, list, mapping or dataclass holds, in its order; nothing of other values."""
    if isinstance(value, tuple | list):
        return list(value)
    if _is_mapping(value):
        return [part for _, part in value.items()]
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with changed parts; a value without parts as it is."""
    if isinstance(value, tuple | list):
        parts = [change(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if _is_mapping(value):
        other = copy_of_mapping(value)
        for key, part in value.items():
            other[key] = change(part)
        return other
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: change(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def rows_of(value: Any, places: list[int], count: int) -> Any:
    """The same structure with these rows of each tensor, array, and list of other things.

    count: the rows that there are. An empty batch (no places) keeps nothing of any list of other things.
    """
    if isinstance(value, Tensor):
        return value[torch.tensor(places, dtype=torch.int64, device=value.device)] if value.dim() else value.clone()
    if isinstance(value, np.ndarray):
        return value[places] if value.ndim else value.copy()
    if isinstance(value, nn.utils.rnn.PackedSequence):
        raise StepError("an empty batch cannot be packed: collate padded tensors, and pack in the model")
    a_row_each = isinstance(value, list) if not places else isinstance(value, tuple | list) and len(value) == count
    if a_row_each and not _arrays(value):
        return type(value)([value[place] for place in places])
    return _changed(value, lambda part: rows_of(part, places, count))


def without_rows(one: Any, two: Any) -> Any:
    """The structure of an empty batch, by batches of one record and of two: a list with an item for each record is
    empty, and tensors and arrays have no rows."""
    parts, others = parts_of(one), parts_of(two)
    if isinstance(one, list | tuple) and (len(parts), len(others)) == (1, 2):
        return type(one)()
    if not parts or len(parts) != len(others) or not _arrays(one):
        return rows_of(one, [], 1)
    beside = iter(others)
    return _changed(one, lambda part: without_rows(part, next(beside)))


def shape_of(item: Any) -> Any:
    """What a collate_fn may sort items by."""
    if isinstance(item, Tensor | np.ndarray):
        return tuple(item.shape)
    if isinstance(item, tuple | list) and item and isinstance(item[0], int | float):
        return len(item)
    return [shape_of(part) for part in parts_of(item)]


def copied(item: Any) -> Any:
    """A record that a collate_fn may write into: some take fields out of it."""
    if isinstance(item, Tensor):
        return item.detach().clone().requires_grad_(item.requires_grad) if item.is_leaf else item.clone()
    if isinstance(item, np.ndarray):
        return item.copy()
    if type(item) in (list, tuple, dict) or hasattr(item, "_fields"):
        return _changed(item, copied)
    return item.copy() if hasattr(item, "items") and hasattr(item, "copy") else item
