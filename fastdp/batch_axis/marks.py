"""`mark_rows`: the user's statement of which sample each row of a tensor belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BatchLayoutError
from . import tensor_notes
from .layout import Layout, tag, tag_of


class Mark(NamedTuple):
    """owner: sample of each row, int64 [rows], or None: of no sample; samples: in the batch, where that was said.

    said: by the user, and not by offsets.
    """

    owner: Tensor | None
    samples: int | None
    said: bool = True


_marked: dict[int, weakref.ref[Tensor]] = {}  # every marked tensor that is alive, by id, in the order of marking


def mark_rows(tensor: Tensor, sample_of_row: Tensor | Sequence[int] | None, samples: int | None = None) -> Tensor:
    """Say which sample each row of a packed input belongs to, such as patches of images or nodes of graphs.

    Mark the tensor that the model is called with, and mark it after every `.to(...)`, which returns a new tensor
    without the mark. A sample may have any number of rows, including none. fastdp follows functions of one sample's
    rows (attention over chunks, joined patches, messages along edges). Tables that meet the rows by position must be
    made for each sample's rows separately.

    Args:
        tensor: the input, with packed rows along dimension 0.
        sample_of_row: the sample that each row belongs to, as numbers from 0 on, [rows]. None: the tensor belongs to no
            sample (a table).
        samples: the number of samples in this batch. It is needed if no input has one row per sample (graphs packed
            into one, lists of samples), unless `fastdp.poisson_loader` hands out the batch. Pass it for every marked
            tensor.

    Returns:
        The same tensor.

    Raises:
        ValueError: if the number of entries differs from the number of rows, or an entry is not the number of a sample.

    >>> patches = mark_rows(torch.zeros(5, 12), [0, 0, 1, 1, 1])  # two of the first sample, three of the second
    >>> edges = mark_rows(torch.tensor([[0, 2], [1, 3]]), None)  # numbers of nodes: of no sample
    """
    owner = None
    if sample_of_row is not None:
        owner = torch.as_tensor(sample_of_row, dtype=torch.long)
        if tensor.dim() == 0 or owner.shape != tensor.shape[:1]:
            raise ValueError(f"sample_of_row of shape {tuple(owner.shape)} for a tensor of shape {tuple(tensor.shape)}")
        if owner.numel() and (int(owner.min()) < 0 or samples is not None and int(owner.max()) >= samples):
            raise ValueError(f"rows of samples {int(owner.min())} to {int(owner.max())}, where samples={samples}")
    tag(tensor, None)  # what a forward before took it for
    tensor.__dict__[tensor_notes.ROWS] = Mark(owner, samples)
    for number in [n for n, kept in _marked.items() if kept() is None or kept() is tensor]:
        del _marked[number]
    _marked[id(tensor)] = weakref.ref(tensor)
    return tensor


def mark_bags(arguments: Sequence[Tensor], with_last: bool) -> None:
    """Mark the texts, one after another, that a model with an nn.EmbeddingBag takes with their offsets.

    arguments: the model's; with_last: the offsets have one more at the end (`include_last_offset`).
    """
    flat = [t for t in arguments if t.dim() == 1 and t.numel() and t.dtype in (torch.int64, torch.int32)]
    for words, offsets in zip(flat, flat[1:], strict=False):
        starts = offsets[:-1] if with_last else offsets
        known = mark_of(words)
        if (
            not starts.numel()
            or len(words) == len(starts)
            or mark_of(offsets) is not None
            or (known is not None and known.said)
        ):
            continue
        if int(starts[0]) == 0 and bool((starts.diff() >= 0).all()) and int(offsets[-1]) <= len(words):
            places = torch.arange(len(words), device=starts.device)
            mark_rows(words, torch.searchsorted(starts.long(), places, right=True) - 1, samples=len(starts))
            words.__dict__[tensor_notes.ROWS] = mark_of(words)._replace(said=False)  # type: ignore[union-attr]


def mark_of(tensor: Tensor) -> Mark | None:
    """What mark_rows said of this tensor."""
    found: Mark | None = tensor.__dict__.get(tensor_notes.ROWS)
    return found


def samples_said(arguments: Sequence[Tensor]) -> int | None:
    """The number of samples that the marks on these tensors say, or, if there are none, the latest mark on any."""
    said = {mark.samples for t in arguments if (mark := mark_of(t)) is not None and mark.samples is not None}
    if len(said) > 1:
        raise BatchLayoutError(f"mark_rows said samples={sorted(said)} of tensors of one call")
    if said:
        return said.pop()
    if any(mark_of(t) is None for t in arguments):
        return None
    alive = (mark for kept in reversed(_marked.values()) if (t := kept()) is not None and (mark := mark_of(t)))
    return next((mark.samples for mark in alive if mark.owner is not None), None)


def layout_said(mark: Mark, tensor: Tensor, batch: int) -> Layout | None:
    """Layout of a marked tensor; None: of no sample. Raises BatchLayoutError where the batch has fewer samples."""
    if mark.owner is None:
        return None
    if mark.owner.numel() and int(mark.owner.max()) >= batch:
        raise BatchLayoutError(
            f"mark_rows gave rows to samples {int(mark.owner.min())} to {int(mark.owner.max())}; the batch has {batch} "
            "samples (if it has more, say so: mark_rows(..., samples=))"
        )
    if batch <= 1:
        return Layout(batch)
    owner = mark.owner.to(tensor.device)
    return Layout(batch, owner=owner).taken(0, torch.arange(len(owner), device=owner.device))


def layouts_marked(batch: int, device: torch.device) -> list[Layout]:
    """The layouts of the tensors that are marked, the latest first."""
    owners = [mark.owner for kept in reversed(_marked.values()) if (t := kept()) is not None and (mark := mark_of(t))]
    fitting = [owner.to(device) for owner in owners if owner is not None and (owner < batch).all()]
    return [Layout(batch, owner=owner).taken(0, torch.arange(len(owner), device=device)) for owner in fitting]


def tag_marked(batch: int) -> None:
    """Tag marked tensors that reach the model within other objects than its arguments' containers."""
    for kept in _marked.values():
        tensor = kept()
        mark = None if tensor is None else mark_of(tensor)
        if tensor is None or mark is None or tag_of(tensor, batch) is not None:
            continue
        try:
            tag(tensor, layout_said(mark, tensor, batch))
        except BatchLayoutError as problem:  # of another batch, perhaps: it matters only if it is used
            tag(tensor, Layout(batch, mixed=str(problem)))
