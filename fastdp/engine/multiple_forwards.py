"""Checks that several forwards before one backward hold the same samples.

Their i-th samples are clipped as one. That is right for two views of a record, for the parts of a pair, for a generated
sample beside a real one; samples of their own would be clipped together, and each could move the sum by 2 R.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch_axis.generations import Generation
from ..batch_axis.tensor_notes import LABELS, LAYOUT, MOMENT
from ..errors import PairedForwardsWarning, StepError


class Given:
    """What tells the samples of a forward from those of another one.

    path: of the module that was called; hand: number of the batch that a loader has handed out, None if none has; one:
    batch_size=1 says that it is of one sample, as all are; made: an input was made by a forward before, or has a graph;
    moment: of the forward.
    """

    def __init__(
        self,
        path: str,
        tensors: Sequence[Tensor],
        batch: int,
        dim: int,
        hand: int | None,
        one: bool,
        moment: Generation,
    ) -> None:
        self.path, self.batch, self.hand, self.one, self.moment = path, batch, hand, one, moment
        self.made = any(t.grad_fn is not None or _is_known(t, moment) for t in tensors)
        self._memory: weakref.ref[Tensor] | None = None
        self._lies: tuple[int, int] | None = None  # offset and stride of the samples there
        self._first: int | None = None  # the number of the first sample there, if the rows of the memory are samples
        rows = next((t for t in tensors if t.dim() > dim and t.size(dim) == batch), None)
        whole = None if rows is None or rows.layout != torch.strided else rows._base if rows._is_view() else rows
        if rows is None or whole is None or not batch:
            return
        self._memory, self._lies = weakref.ref(whole), (int(rows.storage_offset()), rows.stride(dim))
        if whole.dim() > dim and whole.stride(dim) == rows.stride(dim) > 0 and (batch > 1 or whole.dim() == rows.dim()):
            self._first = int(rows.storage_offset()) // rows.stride(dim) % whole.size(dim)

    def has_rows_of(self, other: Given) -> bool | None:
        """Whether both were given the same rows of one tensor; None if nothing tells."""
        memory = None if self._memory is None else self._memory()
        if memory is None or other._memory is None or other._memory() is not memory:
            return None
        if self._lies == other._lies:
            return True
        return None if self._first is None or other._first is None else self._first == other._first

    def goes_with(self, other: Given) -> bool:
        """Whether the samples of both are known to be the same."""
        later = max(self, other, key=lambda given: given.moment.number)
        return later.made or other.moment.number in self.moment.joined or bool(self.has_rows_of(other))


def _is_known(tensor: Tensor, moment: Generation) -> bool:
    """Whether a tensor is, or was made of, what a forward of this engine took or gave; labels are only taken for it."""
    noted = tensor.__dict__
    of = noted.get(MOMENT) if LAYOUT in noted and LABELS not in noted else None
    return isinstance(of, Generation) and of.owner is moment.owner and (of.parent or of).alive


class MultipleForwards:
    """The forwards that the backwards of one engine go through."""

    def __init__(self) -> None:
        self._here: list[Given] = []  # those of this backward
        self._most = Counter[str]()  # by path, in one backward of several samples
        self._warned = False

    def begin(self) -> None:
        """A backward begins."""
        self._here = []

    def add(self, given: Given) -> StepError | None:
        """The backward goes through one more forward. Returns what is wrong with that, if something is."""
        before, self._here = self._here, [*self._here, given]
        if not before:
            return None
        if given.hand is not None:  # (which has as many samples as the forward)
            return None if given.hand == before[-1].hand else StepError(
                "one backward goes through forwards of several batches of the loader: their i-th samples would be "
                "clipped as one. Call backward() and step() for each batch; for larger batches raise the loader's "
                "expected_batch_size=, with max_physical_batch_size= for what memory holds."
            )  # fmt: skip
        if any(given.has_rows_of(each) is False for each in before):
            return StepError(
                "one backward goes through several forwards of different rows of one tensor, as of the parts of a "
                f"batch: their i-th samples would be clipped as one. {_REMEDY}. (If these rows are of the same "
                "samples, as two views of them one after the other, put the views into a dimension of their own: "
                "x.view(views, samples, ...), and x[0], x[1].)"
            )
        if any(given.goes_with(each) for each in before):
            return None
        if given.batch > 1:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"one backward goes through several forwards of {given.batch} samples each, and nothing shows that "
                    "these are the same samples: fastdp takes the i-th samples of all forwards for one, and clips them "
                    "together. That is right for views of one record, for pairs, and for generated samples beside real "
                    "ones. For different records (two data sets, the chunks of a batch) it is wrong, as each could "
                    f"move the sum by 2 R. {_REMEDY}.",
                    PairedForwardsWarning,
                    stacklevel=2,
                )
            return None
        if given.one:
            return None
        count = Counter(each.path for each in self._here)[given.path]
        return None if count <= max(1, self._most[given.path]) else StepError(
            "one backward goes through several forwards of one sample each: they would be clipped together, as one "
            f"sample. {_REMEDY}. If all forwards are of one sample (two views of it, a pair), say so by batch_size=1."
        )  # fmt: skip

    def end(self) -> None:
        """The backward has ended well."""
        if len(self._here) > 1 and self._here[0].batch > 1:
            self._most |= Counter(each.path for each in self._here)
        self._here = []


_REMEDY = (
    "Call the model once on all samples, or call backward() after each forward, on the loss of its own samples, and "
    "step() after the last one"
)
