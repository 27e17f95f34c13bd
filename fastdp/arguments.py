"""The tensors among a model's arguments: how many samples they hold, and along which dimension."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import sampling
from .errors import BatchLayoutError, StepError
from .layouts.layout import ATTRIBUTE, Layout, tag, tag_of


def tag_inputs(
    values: Any, batch: int, dim: int, known: list[Layout | None] | None = None, folded: bool = False
) -> None:
    """Tag the tensors among a model's arguments that hold the samples along `dim`.

    known: their layouts, where the same call was seen before (recomputation); folded: batch * k rows, k
    consecutive ones of each sample, count as well.
    """
    for number, tensor in enumerate(nested_tensors(values)):
        if tag_of(tensor, batch) is not None:
            continue
        layout = None
        if (mark := tensor.__dict__.get(_MARK)) is not None:
            layout = _marked_layout(tensor, mark, batch)
        elif known is not None and number < len(known):
            layout = known[number]
        elif batch <= 1:
            layout = Layout(batch)
        elif tensor.requires_grad and not tensor.is_leaf and list(tensor.shape).count(batch) > 1:
            layout = None  # of unseen origin, and its shape does not tell where the samples lie
        elif tensor.dim() > dim and tensor.size(dim) == batch:
            layout = Layout(batch, dim)
        elif folded and tensor.dim() > dim and tensor.size(dim) and tensor.size(dim) % batch == 0:
            layout = Layout(batch, dim, 1, tensor.size(dim) // batch)
        elif _may_be_packed(tensor, batch, dim):
            layout = Layout(batch, dim, 1, tensor.size(dim) // batch, guessed=True)
        tag(tensor, layout)


_MARK = "_fastdp_rows"  # written on a tensor by the user: sample of each row, or "shared"


def mark_rows(tensor: Tensor, sample_of_row: Tensor | Sequence[int] | None) -> Tensor:
    """Say which sample each row of an input belongs to, where its rows are packed: images' patches, for example.

    Row r (of dimension 0) belongs to sample sample_of_row[r]; None: the tensor belongs to no sample (a table). Mark
    the tensor that the model is called with, after every `.to(...)`, which would give a new tensor without the mark.
    A sample may have any number of rows, also none. Functions of one sample's rows (attention over chunks, patches
    joined) are followed; tables that meet the rows by position must be made for each sample's rows alone.

    Returns the tensor. Raises ValueError if there are not as many numbers as rows.

    >>> patches = mark_rows(torch.zeros(5, 12), [0, 0, 1, 1, 1])  # two of the first sample, three of the second
    """
    if sample_of_row is None:
        tensor.__dict__[_MARK] = "shared"
        return tensor
    owner = torch.as_tensor(sample_of_row, dtype=torch.long)
    if tensor.dim() == 0 or owner.shape != tensor.shape[:1]:
        raise ValueError(f"sample_of_row of shape {tuple(owner.shape)} for a tensor of shape {tuple(tensor.shape)}")
    tensor.__dict__[_MARK] = owner
    return tensor


def _marked_layout(tensor: Tensor, mark: Tensor | str, batch: int) -> Layout | None:
    if isinstance(mark, str):
        return None
    if mark.numel() and not 0 <= int(mark.min()) <= int(mark.max()) < batch:
        raise BatchLayoutError(
            f"mark_rows gave rows to samples {int(mark.min())} to {int(mark.max())}; the batch has {batch} samples"
        )
    if batch <= 1:
        return Layout(batch)
    owner = mark.to(tensor.device)
    return Layout(batch, owner=owner).taken(0, torch.arange(len(owner), device=owner.device))


def _may_be_packed(tensor: Tensor, batch: int, dim: int) -> bool:
    """Whether an input may hold several rows of each sample: data, not a mask of T x T."""
    if dim != 0 or tensor.dim() < 2 or not tensor.is_floating_point() or tensor.requires_grad:
        return False
    rows = tensor.size(0)
    return rows > batch and rows % batch == 0 and rows not in tensor.shape[1:]


def nested_tensors(values: Any) -> list[Tensor]:
    """Tensors in the arguments of a model: also in mappings and dataclasses."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, nn.utils.rnn.PackedSequence):
        return []  # tagged apart, by time
    if isinstance(values, tuple | list):
        return [tensor for item in values for tensor in nested_tensors(item)]
    if hasattr(values, "values") and callable(values.values) and hasattr(values, "keys"):
        return [tensor for item in values.values() for tensor in nested_tensors(item)]
    if hasattr(values, "__dataclass_fields__"):
        return [t for name in values.__dataclass_fields__ for t in nested_tensors(getattr(values, name))]
    return []


def outputs_apart(out: Any, chosen: Callable[[Tensor], bool]) -> Any:
    """A model's result with its chosen tensors as views of themselves, or None where there are none.

    A tensor that the model returns may also be one that it went on with; of a view only the loss knows.
    """
    if not any(chosen(tensor) for tensor in nested_tensors(out)):
        return None

    def view(tensor: Tensor) -> Tensor:
        if not chosen(tensor):
            return tensor
        apart = tensor.view_as(tensor)
        tag(apart, tensor.__dict__.get(ATTRIBUTE))
        return apart

    return _rebuilt(out, view)


def _rebuilt(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is dict:
        return {key: _rebuilt(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_rebuilt(item, function) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    names = getattr(value, "__dataclass_fields__", ())
    whole = copy.copy(value) if names else value
    for name in names:
        item = getattr(value, name)
        if nested_tensors(item):
            setattr(whole, name, _rebuilt(item, function))
    return whole


def tag_packed(values: Any, batch: int) -> None:
    """Tag packed sequences among the arguments."""
    for item in _packed(values):
        order = item.sorted_indices if item.sorted_indices is not None else torch.arange(batch)
        owner = torch.cat([order[: int(size)] for size in item.batch_sizes])
        tag(item.data, Layout(batch, 0, owner=owner))


def _packed(values: Any) -> list[nn.utils.rnn.PackedSequence]:
    if isinstance(values, nn.utils.rnn.PackedSequence):
        return [values]
    if isinstance(values, tuple | list):
        return [found for item in values for found in _packed(item)]
    if isinstance(values, dict):
        return [found for item in values.values() for found in _packed(item)]
    return []


def batch_of(values: Any, dim: int, rows_per_sample: int = 1) -> int:
    """The number of samples in a model's arguments: the size of the first tensor's batch dimension."""
    packed = _packed(values)
    sizes = [
        tensor.size(dim) for tensor in nested_tensors(values) if tensor.dim() > dim and _MARK not in tensor.__dict__
    ]
    current = sampling.current()
    if current is not None and current.size * rows_per_sample in sizes:
        return current.size * rows_per_sample
    if sizes and sizes[0] == 1 and any(size > 1 for size in sizes):
        raise StepError(
            f"the model's first tensor has size 1 in the batch dimension, others {sorted(set(sizes) - {1})}: which is "
            "the number of samples? Give batch_size= to the optimizer, or the batch first."
        )
    if sizes:
        return sizes[0]
    if packed:
        return int(packed[0].batch_sizes[0])
    raise StepError(
        "the model was called without a tensor that has a batch dimension; give batch_size= to the optimizer"
    )
