"""Replayed steps of a run, which are the same whenever the run is taken up.

Which batches are replayed, and what was recorded, may depend on a batch and on the data only, never on the batches that
came before: a resumed run has not seen them, and repeats steps bit for bit.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphError
from .job import FinetuneError, Job


class Replays:
    """Forward and backward of the batches of one optimizer: a recording for each shape and physical batch size."""

    def __init__(self, job: Job, optimizer: Any, device: torch.device) -> None:
        assert job.graphed is not None
        check(job, device)
        self._optimizer, self._graphed = optimizer, job.graphed
        self._steps: dict[Any, Any] = {}

    def backward(self, batch: Any, samples: int, size: int | None) -> Tensor:
        """The mean loss of a batch, detached, after its backward. size: of the physical batches, None without limit."""
        size = size or 1 << (samples - 1).bit_length()
        key = (tuple((name, value.shape[1:]) for name, value in batch.items()), size)
        if key not in self._steps:
            self._steps[key] = self._record(batch, size)
        step = self._steps[key]
        if step is None:
            loss = self._graphed.losses(self._optimizer._privacy.engine.model, batch).mean()
            loss.backward()
            return loss.detach()
        return step.backward(batch)  # type: ignore[no-any-return]

    def _record(self, batch: Any, size: int) -> Any:
        """The step of batches of this shape; None if the data has a single record of it."""
        example = self._graphed.example(batch, size)
        if example is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._optimizer.graphed(self._graphed.losses, (example,), sizes=(size,))
        except GraphError as problem:
            raise FinetuneError(
                f"--graphed: the step of this model cannot be replayed: {problem}. Go on with --resume, without "
                "--graphed"
            ) from problem


def check(job: Job, device: torch.device) -> None:
    """Raises FinetuneError if the steps of a job are none that can be replayed."""
    if job.group_by is not None:
        raise FinetuneError("--graphed replays batches of records, and --group-by protects persons: leave one out")
    if device.type != "cpu":
        raise FinetuneError(f"--graphed replays on the CPU only, and the model is on {device}: leave it out")
