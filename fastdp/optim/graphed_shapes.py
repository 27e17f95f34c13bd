"""Replayed steps for batches of several shapes: texts that are padded to their own longest, say."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..graphs.batches import shape_of
from ..graphs.steps import LossFn
from .graphed_loss import Begun, ReplayedSteps
from .graphed_step import GraphedStep, losses_of
from .private_step import PrivateStep

SHAPES = 8  # recorded at most: each holds a step of each size
_ENOUGH = 2  # a shape is recorded when it is met that often


class GraphedShapes(ReplayedSteps):
    """A `GraphedStep` for each shape of a batch, recorded when the shape is met for the second time.

    More than `SHAPES` shapes, and the first batch of each, go the way of every other step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, privacy: PrivateStep, loss_fn: LossFn,
        record: Callable[[Sequence[Any], frozenset[int]], GraphedStep],
    ) -> None:  # fmt: skip
        super().__init__(optimizer, privacy.loss_reduction == "mean")
        self._privacy, self._loss_fn, self._record = privacy, loss_fn, record
        self._steps: dict[Any, GraphedStep] = {}
        self._met: dict[Any, int] = {}
        self._eager = 0
        self._fixed: set[int] = set()  # places of tensors that once had other rows than there were samples
        self._warned = False

    @property
    def replayed(self) -> int:
        """How many batches were replayed."""
        return sum(step.replayed for step in self._steps.values())

    @property
    def eager(self) -> int:
        """How many went through Python."""
        return self._eager + sum(step.eager for step in self._steps.values())

    @property
    def reasons(self) -> dict[str, int]:
        """Why batches went through Python, and how many."""
        found = Counter({"a shape that was not met before, or not often": self._eager} if self._eager else {})
        for step in self._steps.values():
            found.update(step.reasons)
        return dict(found)

    def _begin(self, batch: tuple[Any, ...]) -> Begun:
        key, samples = self._shape_of(batch)
        if key in self._steps:
            return self._steps[key]._begin(batch)
        if samples == 0 and self._steps:
            return next(iter(self._steps.values())).begin_nothing(batch)
        self._met[key] = self._met.get(key, 0) + (samples > 1)
        if self._met[key] >= _ENOUGH and len(self._steps) < SHAPES and not self._privacy.pending():
            self._steps[key] = self._record(batch, frozenset(self._fixed))
            return self._steps[key]._begin(batch)
        if len(self._steps) == SHAPES and not self._warned:
            self._warned = True
            warnings.warn(
                f"batches of {SHAPES} shapes are recorded, and there are more, which go through Python: pad to fewer "
                "lengths (pad_to_multiple_of=64, say)",
                stacklevel=4,
            )
        self._eager += 1
        return losses_of(self._privacy.engine.model, self._loss_fn, batch), None

    def _shape_of(self, batch: Sequence[Any]) -> tuple[Any, int]:
        """What batches of one recording have in common, and the number of samples."""
        leaves, spec = tree_flatten(tuple(batch))
        samples = next((leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
        return (spec, shape_of(leaves, samples, self._fixed)), samples
