"""A use of a parameter: enough to give the norms of its per-sample gradients, and their clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..layouts.nests import tensors_in
from ..ops.bounds import enlarged
from ..ops.common import accumulate, chunks
from ..ops.rows import square_sum, weighted_sum
from .costs import Segments, Shape
from .planner import Planner
from .timing import Clock


class Use:
    """A recorded use of `operand` (a parameter, or a tensor derived from parameters) by one batch.

    Subclasses give the gradients with respect to the operand; all of a use's numbers are float32 or float64.
    """

    route = "materialise"
    overwrites = False  # whether clipped_sum can write into memory it is given
    shared = False  # whether a parameter of it has other uses
    shape: Shape | None = None  # as a matrix product, where it is one
    clock: Clock | None = None  # measures norm_sq and clipped_sum, where profiling is on

    def __init__(self, operand: Tensor, batch: int, name: str) -> None:
        self.operand, self.batch, self.name = operand, batch, name

    def plan(self, planner: Planner) -> None:
        """Take the route that the planner chooses."""

    def per_sample(self, low: int, high: int) -> Tensor:
        """Gradients of samples [low, high): [high - low, *operand.shape]."""
        raise NotImplementedError

    def chunks(self) -> Iterable[tuple[int, int]]:
        return chunks(self.batch, 4 * self.operand.numel())

    def norm_sq(self) -> Tensor:
        """Squared norms [B], enlarged where terms cancel, for the sums to stay within them."""
        parts = [square_sum(self.per_sample(low, high)) for low, high in self.chunks()]
        return enlarged(torch.cat(parts), self.rounding())

    def rounding(self) -> Tensor | None:
        """How far `clipped_sum` may be off a sample's gradient times its factor, for each factor: [B] float64.

        None: it is a sum of the very numbers that `per_sample` gives.
        """
        return None

    def clipped_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        """sum_b c_b gradient_b, of the operand's shape; samples with c_b = 0 are not read as numbers.

        into: float32 memory of that shape on the CPU which the result may take, contents lost.
        """
        total = None
        for low, high in self.chunks():
            part = weighted_sum(self.per_sample(low, high), c[low:high])
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def data(self) -> tuple[Tensor, ...]:
        """The tensors that the use holds until the end of backward."""
        return tuple(v for v in vars(self).values() if isinstance(v, Tensor) and v is not self.operand)

    def holds(self) -> tuple[Tensor, ...]:
        """These, and what functions hold that the use is to call."""
        return self.data()

    def versions(self) -> int:
        """Grows with every write in place to what the use holds."""
        return sum([t._version for t in self.holds() if not t.is_inference()])

    @property
    def short(self) -> bool:
        """Whether it holds 16-bit numbers."""
        return any(t.dtype in (torch.bfloat16, torch.float16) for t in self.data())

    def held_bytes(self) -> int:
        """Memory that the use holds until the end of backward."""
        return sum(t.nbytes for t in self.data())

    def segments(self) -> Segments | None:
        """Of routed rows: for the table, without the rows."""
        return None


class Stored(Use):
    """Per-sample gradients that are small enough to keep: biases, norm layers, broadcast parameters."""

    route = "kept"

    def __init__(self, operand: Tensor, grads: Tensor, name: str, shape: Shape | None = None) -> None:
        super().__init__(operand, grads.size(0), name)
        self.grads = accumulate(grads)  # [B, *operand.shape]
        if shape is not None:  # of a product that the planner chose to materialise
            self.shape, self.route = shape, "materialise"
        assert grads.shape[1:] == operand.shape, (name, grads.shape, operand.shape)

    def data(self) -> tuple[Tensor, ...]:
        return (self.grads,)

    def per_sample(self, low: int, high: int) -> Tensor:
        return self.grads[low:high]

    def norm_sq(self) -> Tensor:
        return square_sum(self.grads)

    def clipped_sum(self, c: Tensor, into: Tensor | None = None) -> Tensor:
        return weighted_sum(self.grads, c)


class Lazy(Use):
    """Per-sample gradients computed when asked for, in chunks of samples."""

    def __init__(self, operand: Tensor, batch: int, name: str, compute: Callable[[int, int], Tensor]) -> None:
        super().__init__(operand, batch, name)
        self.compute = compute

    def holds(self) -> tuple[Tensor, ...]:
        cells = [cell.cell_contents for cell in getattr(self.compute, "__closure__", None) or ()]
        found = tensors_in([*cells, *getattr(self.compute, "args", ())])
        return tuple(tensor for tensor in found if tensor is not self.operand)

    def per_sample(self, low: int, high: int) -> Tensor:
        return accumulate(self.compute(low, high))
