"""Physical batches: large logical batches cut into pieces that fit the memory, one noised step for all pieces."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

from opacus.utils import batch_memory_manager as theirs
from torch.utils.data import DataLoader

from ....batch_axis import current_batch
from ....data.empty_batches import options_of

__all__ = ["BatchMemoryManager", "BatchSplittingSampler", "wrap_data_loader"]


class BatchSplittingSampler(theirs.BatchSplittingSampler):  # type: ignore[misc]
    """The lists of another sampler in parts of at most max_batch_size, of about equal size.

    Iterated by itself it tells the optimizer of every part whether to step, when the part is drawn, as Opacus's does.
    """

    def __iter__(self) -> Iterator[list[int]]:
        for part, _, last in self.parts():
            self.optimizer.signal_skip_step(do_skip=not last)
            yield part

    def parts(self) -> Iterator[tuple[list[int], bool, bool]]:
        """(indices, first of its logical batch, last of it)."""
        for indices in self.sampler:
            chosen = [int(i) for i in indices]
            pieces = max(1, math.ceil(len(chosen) / self.max_batch_size))
            if (of_all := getattr(self.optimizer, "pieces", None)) is not None:  # mode "ghost_fsdp"
                pieces = of_all(pieces)
            for n in range(pieces):
                low, high = (-(-len(chosen) * m // pieces) for m in (n, n + 1))
                yield chosen[low:high], n == 0, n == pieces - 1


class _Noting(BatchSplittingSampler):
    """Notes what each part is, for the loader to tell when it hands the part out."""

    pending: deque[tuple[bool, bool, int]]

    def __iter__(self) -> Iterator[list[int]]:
        pending = self.pending = deque()  # a queue of its own for every pass
        for part, first, last in self.parts():
            pending.append((first, last, len(part)))
            yield part


class _SplitLoader(DataLoader[Any]):
    """Tells the optimizer what batch it has in hand when it gets it.

    Opacus tells when indices are drawn, ahead of time where workers fetch: after a loop that was left early, or a batch
    without a step, the signals no longer belong to the batches.
    """

    optimizer: Any

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        pending: deque[tuple[bool, bool, int]] | None = None
        for batch in super().__iter__():
            if pending is None:
                pending = self.batch_sampler.pending  # type: ignore[union-attr]
            first, last, size = pending.popleft()
            self.optimizer._step_skip_queue.clear()
            if first and self.optimizer._is_last_step_skipped:
                warnings.warn(
                    "a logical batch was left before its last physical batch: its gradients are dropped", stacklevel=2
                )
                self.optimizer._is_last_step_skipped = False
                self.optimizer.zero_grad()
            self.optimizer.signal_skip_step(do_skip=not last)
            current_batch.tell(batch, size)
            yield batch


def wrap_data_loader(*, data_loader: DataLoader[Any], max_batch_size: int, optimizer: Any) -> DataLoader[Any]:
    """A loader of the same data in physical batches of at most max_batch_size."""
    if max_batch_size < 1:
        raise ValueError(f"the physical batch size must be at least 1, not {max_batch_size!r}")
    sampler = _Noting(sampler=data_loader.batch_sampler, max_batch_size=max_batch_size, optimizer=optimizer)
    loader = _SplitLoader(
        data_loader.dataset, batch_sampler=sampler, generator=data_loader.generator, **options_of(data_loader)
    )
    loader.optimizer = optimizer
    return loader


class BatchMemoryManager(theirs.BatchMemoryManager):  # type: ignore[misc]
    """with BatchMemoryManager(data_loader=..., max_physical_batch_size=..., optimizer=...) as loader: ...

    The loop body runs once for every physical batch; `optimizer.step()` accumulates until the last one of a logical
    batch and `optimizer.zero_grad()` keeps what was accumulated. An empty logical batch is one empty physical batch. In
    mode "ghost_fsdp" all processes cut a logical batch into equally many parts, of which some may be empty.
    """

    def __enter__(self) -> DataLoader[Any]:
        return wrap_data_loader(
            data_loader=self.data_loader,
            max_batch_size=self.max_physical_batch_size,
            optimizer=self.optimizer,
        )
