"""Finds the tensors among a model's arguments, their batch dimension and the number of samples; `mark_rows`, by which
the user states which sample each row of a tensor belongs to."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import BatchLayoutError, StepError
from ..utils.autograd_graph import graph_nodes
from . import current_batch, tensor_notes
from .constant_inputs import ConstantInputs
from .layout import Layout, is_stale, layout_on, tag, tag_of


def tag_inputs(values: Any, batch: int, dim: int, known: list[Layout | None] | None = None, folded: bool = False,
               constants: ConstantInputs | None = None) -> None:  # fmt: skip
    """Tag the tensors among a model's arguments that hold the samples along `dim`.

    known: their layouts, where the same call was seen before (recomputation); folded: batch * k rows, k
    consecutive ones of each sample, count as well; constants: what is known of earlier batches' arguments.
    """
    for number, tensor in enumerate(nested_tensors(values)):
        mark, rows = mark_of(tensor), tensor.size(dim) if tensor.dim() > dim else 0
        if tensor_notes.INPUT in tensor.__dict__ and (is_stale(tensor) or known is not None):
            tag(tensor, None)  # the same input again, in another step
        if mark is None and tag_of(tensor, batch) is not None:
            continue  # made in sight: of this batch, or of an earlier one
        layout = None
        if mark is not None:  # said since an earlier forward, perhaps
            layout = layout_said(mark, tensor, batch)
        elif known is not None and number < len(known):
            layout = known[number]
        elif batch <= 1:
            layout = Layout(batch)
        elif list(tensor.shape).count(batch) > 1 and tensor.requires_grad and _is_of_modules(tensor):
            layout = None  # made out of sight, and its shape does not tell where the samples lie
        elif rows and rows % batch == 0 and constants is not None and constants.has(number, tensor):
            layout = None
        elif rows == batch:
            layout = Layout(batch, dim)
        elif folded and rows and rows % batch == 0:
            layout = Layout(batch, dim, 1, rows // batch)
        elif may_be_packed(tensor, batch, dim):
            layout = Layout(batch, dim, 1, rows // batch, inferred=True)
        elif rows > 1 and constants is not None:
            constants.note(number, tensor)
        tensor.__dict__[tensor_notes.INPUT] = True
        tag(tensor, layout)
        if dim and layout == Layout(batch, dim) and tensor._is_view() and known is None:
            _tag_whole(tensor, tensor._base, layout)  # type: ignore[arg-type]
    tag_marked(batch)


def _is_of_modules(tensor: Tensor) -> bool:
    """Whether parameters or custom functions made it (an input with an adversarial perturbation is the loop's own)."""
    custom, nodes = torch.autograd.function.BackwardCFunction, graph_nodes([tensor.grad_fn])
    return any(isinstance(each, custom) or isinstance(getattr(each, "variable", None), nn.Parameter) for each in nodes)


def lists_of_numbers(values: Any, batch: int) -> list[Sequence[Any]]:
    """The lists and tuples among these that hold Python's numbers of each sample: the lengths of texts, their tags."""
    if isinstance(values, dict):
        return [found for item in values.values() for found in lists_of_numbers(item, batch)]
    if not isinstance(values, tuple | list) or isinstance(values, torch.Size):
        return []
    numbers = (
        type(n) in (int, float) for item in values for n in (item if isinstance(item, tuple | list) else (item,))
    )
    if len(values) == batch > 1 and all(numbers):
        return [values]
    return [found for item in values for found in lists_of_numbers(item, batch)]


def _tag_whole(part: Tensor, whole: Tensor, layout: Layout) -> None:
    """Where an input is a part of a longer sequence (`target[:-1]`), other parts of that have its samples, too."""
    if whole.requires_grad or whole.stride() != part.stride() or whole.size(layout.dim) != layout.rows:
        return
    if mark_of(whole) is None and (tag_of(whole, layout.batch) is None or tensor_notes.INPUT in whole.__dict__):
        whole.__dict__[tensor_notes.INPUT] = True
        tag(whole, layout)


def may_be_packed(tensor: Tensor, batch: int, dim: int) -> bool:
    """Whether an input may hold several rows of each sample: data, not a mask of T x T."""
    if dim != 0 or tensor.dim() < 2 or not tensor.is_floating_point() or tensor.requires_grad:
        return False
    rows = tensor.size(0)
    return rows > batch and rows % batch == 0 and rows not in tensor.shape[1:]


def nested_tensors(values: Any) -> list[Tensor]:
    """Tensors in the arguments of a model: also in mappings, dataclasses, and attributes of other objects."""
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
    if isinstance(values, nn.Module | type) or callable(values):
        return []
    return [item for item in getattr(values, "__dict__", {}).values() if isinstance(item, Tensor)]


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
        tag(apart, layout_on(tensor))
        return apart

    return tree_map_only(Tensor, view, out)


def tag_packed(values: Any, batch: int) -> None:
    """Tag packed sequences among the arguments."""
    for item in packed_sequences(values):
        order = item.sorted_indices if item.sorted_indices is not None else torch.arange(batch)
        owner = torch.cat([order[: int(size)] for size in item.batch_sizes])
        tag(item.data, Layout(batch, 0, owner=owner))


def packed_sequences(values: Any) -> list[nn.utils.rnn.PackedSequence]:
    if isinstance(values, nn.utils.rnn.PackedSequence):
        return [values]
    if isinstance(values, tuple | list):
        return [found for item in values for found in packed_sequences(item)]
    if isinstance(values, dict):
        return [found for item in values.values() for found in packed_sequences(item)]
    return []


def _first_list(values: Any) -> list[Tensor]:
    """The tensors that the first argument is a list of, alike but for their numbers of rows; else none."""
    args, kwargs = values
    first = next(iter((*args, *kwargs.values())), None)
    if not isinstance(first, list) or not all(isinstance(item, Tensor) and item.dim() for item in first):
        return []
    return first if len({item.shape[1:] for item in first}) == 1 else []


def refuse_ragged(tensor: Tensor, what: str) -> None:
    """Raises StepError for a tensor of torch.nested, whose rows of samples no rule here can tell apart."""
    if tensor.is_nested:
        raise StepError(
            f"{what} is a nested tensor (torch.nested), of which fastdp has no per-sample rules. Pad it "
            "(x.to_padded_tensor(0.0), with a mask), pack it (torch.nn.utils.rnn.pack_sequence), or pass its rows, "
            "x.values(), marked by fastdp.mark_rows(rows, sample_of_row)."
        )


def batch_of(values: Any, dim: int, rows_per_sample: int = 1) -> int:
    """The number of samples (of rows, where a sample has several) in a model's arguments: as marks say, or the size of
    the first unmarked tensor's batch dimension."""
    packed, tensors = packed_sequences(values), nested_tensors(values)
    for tensor in tensors:
        refuse_ragged(tensor, "the model's argument")
    said = samples_said(tensors) if tensors or not packed else None  # packed sequences tell themselves
    if said is not None:
        return said * rows_per_sample
    sizes = [tensor.size(dim) for tensor in tensors if tensor.dim() > dim and mark_of(tensor) is None]
    current = current_batch.current()
    if current is not None and (
        current.size * rows_per_sample in sizes or not (sizes or packed) or any(map(mark_of, tensors))
    ):
        return current.size * rows_per_sample
    listed = [tensor for tensor in _first_list(values) if mark_of(tensor) is None]
    marking = f"mark all of them: fastdp.mark_rows(x, [number] * len(x), samples={len(listed)})."
    if len({item.size(0) for item in listed}) > 1 and not dim:
        raise StepError(
            f"the model was called with a list of tensors that have {sorted({len(item) for item in listed})} rows. "
            f"If each tensor is a sample, {marking} If the first has a row for each sample, and the others are of "
            "none, fastdp.mark_rows(other, None) says so."
        )
    if sizes and sizes[0] == 1 and any(size > 1 for size in sizes):
        raise StepError(
            f"the model's first tensor has size 1 in the batch dimension, others {sorted(set(sizes) - {1})}: which is "
            "the number of samples? Give batch_size= to the optimizer, or the batch first."
        )
    if sizes:
        if len(listed) > 1 and len(listed) != sizes[0]:
            warnings.warn(
                f"the model was called with a list of {len(listed)} tensors of one shape: the {sizes[0]} samples are "
                f"taken to lie in dimension {dim} of each. If each tensor is a sample instead, {marking}",
                stacklevel=2,
            )
        return sizes[0]
    if packed:
        return int(packed[0].batch_sizes[0])
    if any(hasattr(value, "__array_interface__") for value in tree_leaves(values)):
        raise StepError("the model was called with arrays, which are not followed: give tensors (torch.from_numpy)")
    raise StepError(
        "the model was called without a tensor that has a batch dimension: call it through its forward, with the data "
        "as tensors; give batch_size= to the optimizer; or say how many samples there are by "
        "fastdp.mark_rows(..., samples=)"
    )


def _check_size(values: Any, dim: int, batch_size: int) -> None:
    """Raises StepError where the optimizer's batch_size= is not that of the batch at hand."""
    tensors = nested_tensors(values)
    sizes = {tensor.size(dim) for tensor in tensors if tensor.dim() > dim}
    if sizes and not packed_sequences(values) and not any(map(mark_of, tensors)) and all(n % batch_size for n in sizes):
        raise StepError(
            f"the optimizer was made for batches of batch_size={batch_size}, and the model is called with tensors of "
            f"size {sorted(sizes)} in the batch dimension. Leave batch_size= out, if batches differ in size: a "
            "poisson_loader tells the size of each, and else the model's first tensor does"
        )


class Batching:
    """Where the samples lie in the model's inputs: see the arguments of `fastdp.PerSampleGradients`."""

    def __init__(self, batch_first: bool = True, batch_size: int | None = None, rows_per_sample: int = 1) -> None:
        for name, value in (("batch_size", batch_size), ("rows_per_sample", rows_per_sample)):
            if isinstance(value, bool) or not (value is None and name == "batch_size" or isinstance(value, int)):
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if batch_size is not None and rows_per_sample != 1:
            raise ValueError(
                f"batch_size={batch_size} and rows_per_sample={rows_per_sample}: the rows of each sample follow from "
                "batch_size, whatever the other says. Give only one of them"
            )
        self.dim, self.size, self.rows_per_sample = (0 if batch_first else 1), batch_size, rows_per_sample
        self.bags: list[nn.EmbeddingBag] = []  # the model's
        self.constants = ConstantInputs()

    @property
    def folded(self) -> bool:
        """Whether inputs may hold several rows of each sample."""
        return self.size is not None or self.rows_per_sample > 1

    def samples(self, args: Any, kwargs: Any) -> int:
        """The number of samples in the model's arguments."""
        if self.bags:
            mark_bags(nested_tensors((args, kwargs)), any(bag.include_last_offset for bag in self.bags))
        if self.size is not None:
            _check_size((args, kwargs), self.dim, self.size)
            return self.size
        rows = batch_of((args, kwargs), self.dim, self.rows_per_sample)
        if rows % self.rows_per_sample:
            raise BatchLayoutError(
                f"the model was given {rows} rows, which is no multiple of {self.rows_per_sample}: by augmentations= "
                f"(or rows_per_sample=), each sample has {self.rows_per_sample} rows, one after the other. Give all of "
                f"them (poisson_loader(augmentations={self.rows_per_sample}), or "
                f"x.repeat_interleave({self.rows_per_sample}, 0) before the random transforms)"
            )
        return rows // self.rows_per_sample


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
        with torch._C.DisableTorchFunction():  # no number of the user's is read
            least, largest = (int(owner.min()), int(owner.max())) if owner.numel() else (0, -1)
        if least < 0 or (samples is not None and largest >= samples):
            raise ValueError(f"rows of samples {least} to {largest}, where samples={samples}")
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
    return tensor.__dict__.get(tensor_notes.ROWS)


def samples_said(arguments: Sequence[Tensor]) -> int | None:
    """The number of samples that the marks on these tensors say, or, if there are none, the latest mark on any."""
    said = {mark.samples for t in arguments if (mark := mark_of(t)) is not None and mark.samples is not None}
    if len(said) > 1:
        raise BatchLayoutError(f"mark_rows said samples={sorted(said)} of tensors of one call")
    if said:
        return said.pop()
    if any(mark_of(t) is None for t in arguments):
        return None
    return next((mark.samples for _, mark in reversed(marked()) if mark.owner is not None), None)


def marked() -> list[tuple[Tensor, Mark]]:
    """Every marked tensor that is alive, in the order of marking."""
    return [(t, mark) for kept in _marked.values() if (t := kept()) is not None and (mark := mark_of(t)) is not None]


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
    owners = (mark.owner for _, mark in reversed(marked()))
    fitting = [owner.to(device) for owner in owners if owner is not None and (owner < batch).all()]
    return [Layout(batch, owner=owner).taken(0, torch.arange(len(owner), device=device)) for owner in fitting]


def tag_marked(batch: int) -> None:
    """Tag marked tensors that reach the model within other objects than its arguments' containers."""
    for tensor, mark in marked():
        if tag_of(tensor, batch) is not None:
            continue
        try:
            tag(tensor, layout_said(mark, tensor, batch))
        except BatchLayoutError as problem:  # of another batch, perhaps: it matters only if it is used
            tag(tensor, Layout(batch, mixed=str(problem)))
