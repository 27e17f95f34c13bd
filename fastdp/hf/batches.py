"""How a Poisson sample passes through the Trainer's loop, which counts batches and not samples.

The loop is handed tickets, gradient_accumulation_steps of them a step. With a ticket the training step takes physical
batches from the Poisson loader: one, or with the step's last ticket all that are left of the logical batch. So the
loop's own counting (steps, epochs, schedule, logs, checkpoints) is in noised steps, whatever the sample's size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import seed_worker

from .. import sampling
from ..errors import StepError
from ..sampling import PoissonLoader, poisson_loader
from .correlated import loader_of
from .options import PrivacyArguments


class Ticket(dict[str, Any]):
    """What the loop sees as a batch; `last` says that the step ends with it. It is filled with what was computed."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last, self.flops = last, 0


def _ticket(items: list[int], accumulation: int) -> Ticket:
    return Ticket((items[0] + 1) % accumulation == 0)


def tickets(steps: int, accumulation: int) -> DataLoader[Any]:
    """The loop's loader: steps * accumulation tickets, and no random number drawn for them.

    A real DataLoader, so that resuming in the middle of an epoch skips its first ones as it would any batches.
    """
    places: Any = range(steps * accumulation)
    collate = functools.partial(_ticket, accumulation=accumulation)
    return DataLoader(places, batch_size=1, collate_fn=collate, generator=torch.Generator())


def are_tickets(loader: Any) -> bool:
    """Whether a loader is the loop's, and not one of evaluation."""
    return getattr(getattr(loader, "collate_fn", None), "func", None) is _ticket


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


def make_source(data: Any, collate: Any, keys: list[Any] | None, args: Any, privacy: PrivacyArguments) -> Source:
    """The loader of a run. keys: the group of each record, where samples are groups of them.

    The sample rate is per_device_train_batch_size * gradient_accumulation_steps * processes / n, unless given. Raises
    ValueError where that is more than 1.
    """
    rate, samples = privacy.sample_rate, len(data) if keys is None else len(set(keys))
    expected = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if rate is None:
        rate = expected / max(samples, 1)
        if rate > 1:
            raise ValueError(
                f"per_device_train_batch_size x gradient_accumulation_steps x processes = {expected} is more than "
                f"there are samples ({samples}): lower one of them, or give PrivacyArguments(sample_rate=)"
            )
    generator = torch.Generator()
    grouped: dict[str, Any] = (
        {} if keys is None else {"group_by": keys, "max_records_per_group": privacy.max_records_per_group}
    )
    options = dict(
        max_physical_batch_size=args.train_batch_size,
        collate_fn=collate, generator=generator, num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        persistent_workers=args.dataloader_persistent_workers, prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        worker_init_fn=functools.partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    )  # fmt: skip
    if privacy.noise is not None:
        return Source(loader_of(data, expected, privacy, args.seed, options), generator, args.seed)
    try:
        loader = poisson_loader(data, sample_rate=rate, seed=privacy.noise_seed, **options, **grouped)
    except ValueError as problem:  # in the words of the trainer's arguments
        raise ValueError(str(problem).replace("max_physical_batch_size", "per_device_train_batch_size")) from None
    return Source(loader, generator, args.seed)


def varied(examples: list[Any], collate: Any) -> list[Any]:
    """Up to four of the examples, the largest and the smallest among them when collated alone."""
    sizes = []
    for example in examples:
        alone = collate([example])
        tensors = [v for v in alone.values() if isinstance(v, Tensor)] if hasattr(alone, "values") else []
        if not tensors:
            raise StepError("the collator must return a dict of tensors, samples first")
        sizes.append(sum(t.numel() for t in tensors))
    order = sorted(range(len(examples)), key=lambda index: sizes[index])
    chosen = dict.fromkeys([order[0], order[-1], order[len(order) // 2], *order])
    return [examples[index] for index in list(chosen)[:4]]
