"""The records that `verify` looks at: whose they are, batches made of them, and which are drawn."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ..batch_axis.inputs import mark_of, mark_rows, may_be_packed, nested_tensors, samples_said
from ..data.batched_datasets import fetches_batches
from ..data.empty_batches import CollateWithEmpty
from ..data.streams import StreamRecords
from ..utils.pytree import copy_of_mapping

FETCHED = 4  # times as many samples as are looked at are taken out of a data set, to draw different ones


@dataclass(frozen=True)
class Records:
    """A batch, and the number of the sample that each of its records belongs to.

    names: of the samples, the same in every batch that is made of them; rows: records that make one sample of the
    engine's by its rows_per_sample or batch_size; makes: a batch of records by their places in `items`, where batches
    are not rows of this one; double: in float64.
    """

    batch: Any
    numbers: list[int]
    names: list[int]
    grouped: bool = False
    rows: int = 1
    makes: Callable[[Sequence[int]], Any] | None = None
    items: tuple[int, ...] = ()
    double: bool = False

    @property
    def samples(self) -> int:
        return len(self.names)

    @property
    def units(self) -> int:
        """What the loss is a mean over: records, or samples of several rows."""
        return len(self.numbers) // self.rows

    def of(self, samples: Iterable[int]) -> Records:
        """The batch made of these samples, one after the other; one may stand in it several times."""
        chosen = list(samples)
        by_sample: dict[int, list[int]] = {}
        for record, number in enumerate(self.numbers):
            by_sample.setdefault(number, []).append(record)
        own = [by_sample[sample] for sample in chosen]
        numbers = [number for number, records in enumerate(own) for _ in records]
        rows = [record for records in own for record in records]
        items = tuple(self.items[row] for row in rows) if self.items else ()
        names = [self.names[sample] for sample in chosen]
        return replace(self, batch=self.batch_of(rows), numbers=numbers, names=names, items=items)

    def batch_of(self, rows: Sequence[int]) -> Any:
        """A batch of these records."""
        if self.makes is None:
            return rows_of(self.batch, rows, len(self.numbers))
        batch = self.makes([self.items[row] for row in rows])
        return doubled(batch) if self.double else batch

    def made_by(self, makes: Callable[[Sequence[int]], Any] | None) -> Records:
        """The same records, where this makes batches of them; None: batches are rows of the one that there is."""
        return replace(self, makes=makes, items=() if makes is None else tuple(range(len(self.numbers))))

    def doubled(self) -> Records:
        """In float64."""
        return replace(self, batch=doubled(self.batch), double=True)

    def in_order(self) -> Records:
        """The records of a sample one after the other."""
        return self if self.numbers == sorted(self.numbers) else self.of(range(self.samples))

    def folded(self, rows: int) -> Records:
        """So many consecutive records are one sample."""
        numbers = [record // rows for record in range(len(self.numbers))]
        return replace(self, numbers=numbers, names=list(range(numbers[-1] + 1)), rows=rows)


def records_of(batch: Any, numbers: list[int] | None, grouped: bool) -> Records:
    """All records of a batch."""
    size = size_of(batch)
    numbers = list(range(size)) if numbers is None else numbers
    if len(numbers) != size:
        raise ValueError(f"group_by gives {len(numbers)} keys for a batch of {size} records")
    return Records(batch, numbers, list(range(max(numbers, default=-1) + 1)), grouped)


class Fetched(NamedTuple):
    """Records out of a data set, what collates them, their numbers, and how many there were to draw from."""

    items: list[Any]
    collate: Callable[[list[Any]], Any]
    numbers: list[int] | None
    total: int


def fetched(
    source: Any, collate: Callable[[list[Any]], Any] | None, samples: int, numbers: list[int] | None, seed: int
) -> Fetched | None:
    """Records drawn out of a data set or loader: FETCHED times as many samples as are looked at. None: it is neither.

    Of a list, the longest and the shortest are among them.
    """
    if isinstance(source, DataLoader):
        source, collate = source.dataset, collate or source.collate_fn
    if isinstance(source, StreamRecords):
        source = source.stream  # from its beginning: what is drawn by index would read it again and again
    if not isinstance(source, Dataset) and collate is None:
        return None
    collate = collate or default_collate
    collate = collate.collate if isinstance(collate, CollateWithEmpty) else collate
    if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
        first = list(islice(iter(source), FETCHED * samples))
        return Fetched(first, collate, None if numbers is None else numbers[: len(first)], len(first))
    total = len(source)
    if numbers is not None and len(numbers) != total:
        raise ValueError(f"group_by gives {len(numbers)} keys for {total} records")
    whose = range(total) if numbers is None else numbers
    drawn = torch.randperm(max(whose, default=-1) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    if isinstance(source, list | tuple) and numbers is None:
        drawn = list(dict.fromkeys([*_extremes(list(map(_length, source))), *drawn]))
    place = {number: new for new, number in enumerate(drawn[: FETCHED * samples])}
    kept = [record for record in range(total) if whose[record] in place]
    if numbers is None:
        kept = list(place)
    numbers = None if numbers is None else [place[whose[record]] for record in kept]
    if fetches_batches(source):
        return Fetched(kept, lambda records: collate(source.__getitems__(records)), numbers, total)
    return Fetched([source[record] for record in kept], collate, numbers, total)


def _extremes(values: list[Any]) -> list[int]:
    """Places of the largest and of the smallest."""
    return [values.index(max(values)), values.index(min(values))] if values else []


def _length(item: Any) -> int:
    """How many numbers a record holds."""
    if isinstance(item, Tensor | str | bytes):
        return item.numel() if isinstance(item, Tensor) else len(item)
    if isinstance(item, tuple | list):
        return sum(map(_length, item))
    if hasattr(item, "items"):
        return sum(map(_length, item.values()))
    size = getattr(item, "size", 1)  # of an array
    return size if isinstance(size, int) else 1


def drawn_of(pool: Records, samples: int, seed: int) -> list[int]:
    """Samples to look at, drawn such that they differ: of every label, and of the smallest and largest numbers."""
    if pool.samples <= samples:
        return list(range(pool.samples))
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(pool.samples, generator=random).tolist()
    labels, extremes = list[int](), list[int]()
    if isinstance(items := getattr(pool.makes, "items", None), list) and not pool.grouped and pool.rows == 1:
        extremes += _extremes(list(map(_length, items)))
    for leaf in _leaves(pool):
        value = torch.zeros(pool.samples, dtype=torch.float64)
        rows = leaf.detach().reshape(len(leaf), -1).double().cpu().nan_to_num().sum(1)
        value.index_add_(0, torch.tensor(pool.numbers), rows)
        if leaf.dim() == 1 and not leaf.is_floating_point():
            first = {float(value[sample]): sample for sample in reversed(order)}
            labels += list(first.values()) if len(first) <= max(samples // 2, 2) else []
        extremes += _extremes(value.tolist())
    chosen = list(dict.fromkeys([*labels, *extremes[: samples // 2], *order]))[:samples]
    return [chosen[i] for i in torch.randperm(len(chosen), generator=random).tolist()]


def alike(records: Records) -> list[str]:
    """The parts of a batch that are the same in all of its records, by their names or places."""
    batch = records.batch
    batch = vars(batch) if dataclasses.is_dataclass(batch) else batch
    parts = batch.items() if hasattr(batch, "items") else enumerate(batch) if isinstance(batch, tuple | list) else []
    found = [(f"batch[{key!r}]", leaf) for key, part in parts for leaf in nested_tensors(part)]
    leaves = {id(leaf) for leaf in _leaves(records) if len(leaf) > 1 and bool((leaf == leaf[:1]).all())}
    return [name for name, leaf in found or [("batch", leaf) for leaf in nested_tensors(batch)] if id(leaf) in leaves]


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on a device."""
    return mapped(batch, lambda leaf: leaf.to(device))


def size_of(batch: Any) -> int:
    """How many records a batch holds."""
    tensors = [t for t in nested_tensors(batch) if t.dim()]
    if not tensors:
        raise ValueError(
            f"no tensor with a batch dimension in the batch, a {type(batch).__name__}: give its tensors, or the "
            "records (a data set or list) and the collate_fn= that makes such batches of them"
        )
    said = samples_said(tensors)
    return next((t for t in tensors if mark_of(t) is None), tensors[0]).size(0) if said is None else said


def rows_of(batch: Any, rows: Sequence[int], size: int) -> Any:
    """The batch made of these records."""
    index = torch.as_tensor(list(rows), dtype=torch.long)
    return mapped(batch, lambda leaf: _taken(leaf, index, size))


def _taken(tensor: Tensor, index: Tensor, size: int) -> Tensor:
    """These samples' rows of a tensor: those marked as theirs, or their k consecutive ones; tables as they are."""
    mark, rows = mark_of(tensor), tensor.detach()
    if mark is not None and mark.owner is not None:
        places = [(mark.owner == number).nonzero().flatten() for number in index.tolist()]
        owner = torch.arange(len(index)).repeat_interleave(torch.tensor([len(place) for place in places]))
        taken = rows[torch.cat(places).to(tensor.device)].requires_grad_(tensor.requires_grad)
        return mark_rows(taken, owner, len(index))
    if mark is not None or not tensor.dim():
        return tensor
    if tensor.size(0) == size:
        return rows[index.to(tensor.device)].requires_grad_(tensor.requires_grad)
    if may_be_packed(tensor, size, 0):
        return rows.unflatten(0, (size, -1))[index.to(tensor.device)].flatten(0, 1)
    return tensor


def doubled(batch: Any) -> Any:
    """The batch with its float32 tensors as float64."""
    return mapped(batch, lambda leaf: leaf.double() if leaf.dtype == torch.float32 else leaf)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The batch with this done to each of its tensors: of the same kind, as a loss may ask for attributes of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item, function) for item in value])
    if isinstance(value, tuple | list):
        return type(value)(mapped(item, function) for item in value)
    if hasattr(value, "items"):
        other = copy_of_mapping(value) if isinstance(value, MutableMapping) else dict(value.items())
        for key, item in value.items():
            other[key] = mapped(item, function)
        return other
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)  # type: ignore[arg-type]
        for field in dataclasses.fields(value):
            object.__setattr__(other, field.name, mapped(getattr(value, field.name), function))
        return other
    return value


def _leaves(records: Records) -> list[Tensor]:
    """The tensors of a batch that have a row for each record."""
    found = nested_tensors(records.batch)
    return [
        leaf for leaf in found
        if leaf.dim() and leaf.size(0) == len(records.numbers) and mark_of(leaf) is None
        and not leaf.is_nested and not leaf.is_complex()
    ]  # fmt: skip
