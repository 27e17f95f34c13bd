"""Follows a Poisson loader's batch between the loader and the forward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis import current_batch, tensor_notes
from ..batch_axis.generations import LOADERS, Generation
from ..batch_axis.inputs import lists_of_numbers, mark_of, nested_tensors
from ..batch_axis.layout import Layout, generation_of, tag, tag_of
from ..batch_axis.own_numbers import OWN_NUMBERS
from ..errors import StepError
from .backward import backwards
from .host_reads import NumbersRead
from .loss_tracking import LossTracking, pause, start
from .state import ENGINES, Engine

_LAST: list[Generation] = []  # of batches that loaders handed out
_FOLLOWED = [(0, 0)]  # the number of the last of them, and its loader's id
_TRAINED = [0]  # backwards of all engines, when the last one was
_ENGINES_OF = weakref.WeakValueDictionary[int, Engine]()  # by a loader's id: whose model took its batches
_GIVEN = [0]  # the number of the moment of the batch that a model was given since; 0 if that is not known


def handed_out(batch: Any, size: int, loader: int) -> None:
    """A loader hands out a batch: what is made of it before the model sees it is followed, too."""
    pause()
    if _LAST and backwards() != _TRAINED[0]:  # (batches may be fetched ahead, or were left behind by an error)
        for moment in [known for known in _LAST if known.number <= _GIVEN[0]] or _LAST[:1]:
            moment.alive = False
        _LAST[:] = [known for known in _LAST if known.alive]
    _TRAINED[0], _GIVEN[0] = backwards(), 0
    for tensor in nested_tensors(batch):
        tensor.__dict__[tensor_notes.LOADED] = size, loader
    engines = list(ENGINES)
    OWN_NUMBERS.loaded(lists_of_numbers(batch, size))
    if not engines or size <= 1:
        return
    moment = Generation(LOADERS)
    _LAST.append(moment)
    _FOLLOWED[0] = moment.number, loader
    engine = _ENGINES_OF.get(loader)
    newest = max(engines, key=lambda each: each.number)  # an older one may be Python's to collect
    start(size, moment, engine if engine in engines else newest, [])
    with torch._C.DisableTorchFunction():
        listed = _listed_one_by_one(batch, size)
        for tensor in nested_tensors(batch):
            told = tensor.is_nested or mark_of(tensor) is not None or id(tensor) in listed
            layout = None if told else _layout_of(tensor, size, engines)
            if id(tensor) in listed:
                tensor.__dict__[tensor_notes.LISTED] = True
            if layout is not None:
                tensor.__dict__[tensor_notes.INPUT] = True
                tag(tensor, layout)


def _listed_one_by_one(values: Any, batch: int) -> set[int]:
    """The ids of tensors that a batch has in lists or tuples with one for each sample (the boxes of images): one that
    has as many rows as there are samples is no other than the rest."""
    found: set[int] = set()
    for item in values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ():
        found |= _listed_one_by_one(item, batch)
        if isinstance(item, tuple | list) and len(item) == batch > 1:
            found.update(map(id, nested_tensors(item)))
    return found


def _layout_of(tensor: Tensor, size: int, engines: Sequence[Any]) -> Layout | None:
    """Where the records of a batch lie in one of its tensors, by what the engines are told; None: it is not certain."""
    dims = {0, *(engine.batching.dim for engine in engines)}
    each = {1, *(engine.batching.rows_per_sample for engine in engines)}  # rows: of augmentations
    found = [
        Layout(size, dim, 1, rows)
        for dim in dims
        for rows in each
        if dim < tensor.dim() and tensor.size(dim) == size * rows
    ]
    return found[0] if len(found) == 1 else None


current_batch.tell_of_batches(handed_out)


def loader_of(tensors: Sequence[Tensor]) -> int:
    """The id of the loader of whose batch a model's inputs are, or are made in sight; 0 if they do not show it."""
    last, its_loader = _FOLLOWED[0]
    for tensor in tensors:
        moment, told = generation_of(tensor), tensor.__dict__.get(tensor_notes.LOADED, (0, 0))[1]
        if told:
            return int(told)
        if moment is not None and moment.owner is LOADERS and moment.number == last:
            return its_loader
    return 0


def given_to_model(engine: Engine, tensors: Sequence[Tensor]) -> None:
    """A forward that may be trained on begins with these: their batch is the one that is over when the next comes."""
    if loader := loader_of(tensors):
        _ENGINES_OF[loader] = engine
    moments = (generation_of(tensor) for tensor in tensors)
    _GIVEN[0] = next((moment.number for moment in moments if moment is not None and moment.owner is LOADERS), 0)


def handed_out_in(found: LossTracking | None, batch: int) -> int:
    """The number of the moment in which a loader handed out the batch of a forward that began while it was followed."""
    if found is None or found.batch != batch:
        return 0
    return found.moment.number if found.moment.owner is LOADERS else found.moment.before


def refuse_rows_apart(batch: int, rows_per_sample: int, tensors: Sequence[Tensor]) -> None:
    """Raises StepError where the rows of a record, made of a loader's batch in sight, do not follow one another."""
    for tensor in tensors if rows_per_sample > 1 else ():
        layout = tag_of(tensor, batch)
        if layout is not None and layout.outer > 1 and layout.rows == batch * rows_per_sample:
            raise StepError(
                f"the model is given the {rows_per_sample} rows of each record {layout.batch * layout.inner} rows "
                "apart (all first views, then all second ones), but augmentations= and rows_per_sample= take rows that "
                "follow one another for those of one record. Make them by torch.stack(views, 1).flatten(0, 1), or by "
                f"x.repeat_interleave({rows_per_sample}, 0); the labels too."
            )


def refuse_more_rows(found: LossTracking | None, batch: int, tensors: Sequence[Tensor]) -> None:
    """Raises StepError for a forward of more rows than a loader handed out records, if they are made of these."""
    for tensor in tensors:
        whole = bool(tensor.dim()) and tensor.size(0) == batch
        records = tensor.__dict__.get(tensor_notes.LOADED, (batch, 0))[0] if whole else batch
        if found is not None and found.moment.owner is LOADERS and found.batch < batch:
            layout = tag_of(tensor, found.batch)
            records = found.batch if layout is not None and layout.rows == batch and not layout.mixed else records
        if 0 < records < batch:  # (rows in place of an empty batch are of no record)
            raise StepError(
                f"the loader handed out {records} records, the model was given a batch of {batch} rows made of them: "
                "each row would be clipped on its own, so one record could move the sum by several times the clipping "
                "norm. One record must be one row. For several views of a record, or rows of one, train with fastdp's "
                "own optimizers, which have augmentations= and rows_per_sample=, or let the model take them as a "
                "further dimension, [records, views, ...]."
            )


def read_in(found: LossTracking | None, batch: int, tensors: Sequence[Tensor]) -> tuple[NumbersRead | None, str]:
    """What has read numbers of the batch since its loader handed it out, and which of these tensors, a model's inputs,
    may be made of them."""
    if found is None or found.batch != batch or found.moment.owner is not LOADERS:
        return None, ""
    return found.numbers, found.numbers.in_inputs(tensors)
