"""Detects a collate_fn that mixes samples (mix-up, statistics of the batch) by calling it on changed batches.

What such a function returns is made before fastdp sees a tensor of it, so that no row can be followed through it. It is
tried instead: with one sample in the place of another and the same random numbers, the rows of the others must stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import SampleMixingError
from ..utils.random_generators import RandomNumbers, generators_of, kept_by
from .batched_datasets import copied, is_one_batch, parts_of, shape_of

Collate = Callable[[list[Any]], Any]
FAILS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)
FEW = 8  # samples of a batch that are tried
TRIES = 2  # of them are put in the place of another, and all must change rows of the rest; all, where numbers are drawn
Path = tuple[int, ...]  # where something lies within a batch: its place in each structure around it
Rows = dict[Path, list[bytes]]  # of each tensor, and each list of tensors, with a row for every sample


def refuse_mixing(collate: Collate, items: Any, views: int = 1, dataset: Any = None) -> None:
    """Raises SampleMixingError if the rows that collate makes of some of the items depend on others.

    items: a list of records. (A batch that a dataset's __getitems__ has made of them is not tried.)
    views: so many items in turn are of one sample, and may be mixed with each other.

    Random numbers are put back and items are copied, so that the batch that is trained on is the same. Nothing is
    raised where nothing can be said: collate fails on other items, draws from a generator out of reach or more random
    numbers for some items than for others, or makes no tensor with a row for every item.
    """
    if collate is torch.utils.data.default_collate or is_one_batch(items, dataset) or len(items) < 2 * views:
        return
    trial = _Trial(collate, items, views)
    try:
        found = trial.others_move(trial.count - views) or trial.others_move(0)
    except FAILS:
        return
    finally:
        trial.before.put_back()
    if found:
        name = getattr(collate, "__qualname__", type(collate).__qualname__)
        raise SampleMixingError(
            f"collate_fn ({name}) makes the rows of a sample out of other samples, as mix-up within the batch and "
            "statistics of the batch do: with one sample replaced and the same random numbers, rows of others changed. "
            "One sample then moves the gradients of several, and no epsilon holds. Mix with public records, or "
            "constants, in the dataset (docs/recipes.md, Mix-up)"
        )


class Trials:
    """`refuse_mixing` at the calls 1, 2, 4, 8, ... of a process: a function may mix in some batches only."""

    def __init__(self) -> None:
        self.calls = 0

    def before(self, collate: Collate, items: Any, views: int = 1, dataset: Any = None) -> None:
        """Call this before each batch is made of the items: those of at least two samples count."""
        if not isinstance(items, list) or len(items) <= views:
            return
        self.calls += 1
        if self.calls & (self.calls - 1) == 0:
            refuse_mixing(collate, items, views, dataset)


class _Trial:
    """The rows that a collate_fn makes of the first records, and of others in the place of a sample's."""

    def __init__(self, collate: Collate, records: list[Any], views: int) -> None:
        self.collate, self.records, self.views = collate, records, views
        self.count = min(FEW, len(records) // views) * views
        self.generators = generators_of(nn.Module(), collate) + kept_by(collate)
        self.before = RandomNumbers(set(), self.generators)
        self.whole: tuple[Rows, RandomNumbers] | None = None

    def others_move(self, place: int) -> bool:
        """Whether rows of other samples change if another sample is in the place of one."""
        views, every = self.views, list(range(self.count))
        if self.whole is None:
            self.whole = self._made(every)
            again, fewer = self._made(every)[0], self._of_fewer()
            # a tensor that is as long as there are items, whatever their number: not of channels, or of time
            own = {path: rows for path, rows in self.whole[0].items() if path in fewer}
            self.whole = own if all(again.get(path) == rows for path, rows in own.items()) else {}, self.whole[1]
        rows, after = self.whole
        drew = not after.torchs_equal(self.before) or bool(after.others_moved(self.before))
        end = place + views
        others = [every[start : start + views] for start in every[::views] if start != place]
        shapes = [shape_of(self.records[number]) for number in every]
        if drew and any([shapes[number] for number in other] != shapes[place:end] for other in others):
            return False  # sorted by length, rows would be drawn for by other places
        moved = 0
        # a function may sort samples, and draw by their places: the next in its order leaves them where they are
        for other in others[: None if drew else TRIES] if rows else ():
            made, then = self._made([*every[:place], *other, *every[end:]])
            if not rows.keys() <= made.keys() or not then.torchs_equal(after) or then.others_moved(after):
                return False
            gone = max(_gone(one, made[path]) for path, one in rows.items())
            if 0 < gone <= views:
                return False  # its own rows alone
            moved += gone > views
        return moved > 0

    def _of_fewer(self) -> Rows:
        """Rows of fewer samples: one less, or two, as some functions pair samples and take an even number."""
        for less in range(self.views, min(2 * self.views, self.count - self.views) + 1, self.views):
            try:
                return self._made(list(range(self.count - less)))[0]
            except FAILS:
                continue
        return {}

    def _made(self, places: list[int]) -> tuple[Rows, RandomNumbers]:
        self.before.put_back()
        batch = self.collate([copied(self.records[place]) for place in places])
        found: Rows = {}
        _add_rows(found, batch, len(places), ())
        return found, RandomNumbers(set(), self.generators)


def _add_rows(found: Rows, value: Any, size: int, path: Path) -> None:
    """The rows of all tensors, arrays and lists of tensors in the value that have one for every item."""
    if isinstance(value, Tensor | np.ndarray):
        array = _plain(value) if isinstance(value, Tensor) else value
        if array is not None and array.ndim and array.shape[0] == size and not array.dtype.hasobject:
            found[path] = [row.tobytes() for row in np.ascontiguousarray(array).reshape(size, -1)]
        return
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return
    if isinstance(value, tuple | list) and len(value) == size:
        arrays = [_plain(each) if isinstance(each, Tensor) else each for each in value]
        rows = [repr(each.shape).encode() + each.tobytes() for each in arrays if isinstance(each, np.ndarray)]
        if len(rows) == size:
            found[path] = rows
    for place, part in enumerate(parts_of(value)):
        _add_rows(found, part, size, (*path, place))


def _plain(leaf: Tensor) -> np.ndarray[Any, Any] | None:
    """As an array of the same bits; None of one that has none (nested, sparse)."""
    if leaf.is_nested or leaf.layout != torch.strided:
        return None
    leaf = leaf.detach().cpu().contiguous()
    return leaf.view(torch.int16).numpy() if leaf.dtype == torch.bfloat16 else leaf.numpy()


def _gone(one: list[bytes], other: list[bytes]) -> int:
    """How many rows of the one are not in the other: in any order, as some collate_fn sort. 0 if they are of another
    length, as of a longer padding."""
    if sorted({len(row) for row in one}) != sorted({len(row) for row in other}):
        return 0
    return (Counter(one) - Counter(other)).total()
