"""How a Poisson sample passes through the Trainer's loop, which counts batches and not samples.

The loop is handed tickets, gradient_accumulation_steps of them a step. With a ticket the training step takes physical
batches from the Poisson loader: one, or with the step's last ticket all that are left of the logical batch. So the
loop's own counting (steps, epochs, schedule, logs, checkpoints) is in noised steps, whatever the sample's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from .. import sampling
from ..errors import StepError
from ..sampling import PoissonLoader


class Ticket(dict[str, Any]):
    """What the loop sees as a batch; `last` says that the step ends with it. It is filled with what was computed."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last, self.flops = last, 0


class _Places(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class _Redeem:
    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation

    def __call__(self, items: list[int]) -> Ticket:
        return Ticket((items[0] + 1) % self.accumulation == 0)


def tickets(steps: int, accumulation: int) -> DataLoader[Any]:
    """The loop's loader: steps * accumulation tickets, and no random number drawn for them.

    A real DataLoader, so that resuming in the middle of an epoch skips its first ones as it would any batches.
    """
    return DataLoader(
        _Places(steps * accumulation), batch_size=1, collate_fn=_Redeem(accumulation), generator=torch.Generator()
    )


class Source:
    """Physical batches of a Poisson loader, pass after pass."""

    def __init__(self, loader: PoissonLoader, generator: torch.Generator, seed: int) -> None:
        self.loader, self.generator, self.seed = loader, generator, seed
        self._running: Iterator[Any] | None = None

    def next(self) -> tuple[Any, sampling.PhysicalBatch]:
        """The next physical batch, and what there is to know of it."""
        for _ in range(2):
            if self._running is None:
                # the workers' seeds: the same for the same pass of a run, however often it was taken up
                self.generator.manual_seed(self.seed + 1_000_003 * self.loader.state_dict()["pass"])
                self._running = iter(self.loader)
            for batch in self._running:
                current = sampling.current(id(self.loader))
                assert current is not None
                return batch, current
            self._running = None
        raise StepError("the Poisson loader hands out nothing")

    def close(self) -> None:
        """Leave the pass: no batch is in hand any more."""
        if self._running is not None:
            self._running.close()  # type: ignore[attr-defined]
            self._running = None


def check_dataset(dataset: Any) -> None:
    """Raises StepError on data that cannot be sampled by index."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not isinstance(dataset, Sized):
        raise StepError(
            "train_dataset is iterable only: Poisson sampling needs a length and access by index. Load it into a "
            "map-style dataset (datasets.Dataset, or a list)"
        )
