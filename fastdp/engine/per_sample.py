"""The per-sample gradient engine: one ordinary backward, exact norms, clipped sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import uses as _rules  # noqa: F401  (registers the rules)
from ..errors import ParameterError, StepError
from ..layouts.batch import Whose
from ..layouts.doubts import settle
from ..layouts.inputs import Batching
from ..ops.common import exactly, sum_type
from ..uses.planner import Planner
from . import following
from .attachable import check_unattached
from .backward import Backward
from .explain import Plan
from .forward import Forward
from .gradients import Gradients
from .taken import Known
from .tracked import Tracked

LOSS_REDUCTIONS = ("mean", "sum")


class PerSampleGradients:
    """Exact per-sample gradients of a model from an ordinary `loss.backward()`.

    Args:
        model: any nn.Module; nothing of it is replaced.
        params: the parameters to track (default: all that require grad). They get no `.grad`.
        loss_reduction: "mean" or "sum": how the loss combines the samples' losses.
        batch_first: whether the samples lie along the first dimension of the model's inputs, else the second.
        batch_size: number of samples, where the inputs do not show it: inputs then hold batch_size * k rows,
            k consecutive ones of each sample.
        rows_per_sample: k consecutive rows of the inputs are one sample (augmentations), whatever the batch.
        memory_budget: bytes that may be held from the begin of backward to its end for norms and clipped sums (see
            `fastdp.uses.planner`); None: what is fastest.
        on_backward: called with the `Gradients` at the end of every backward; they are then not kept.

    After a backward: `norms()`, `clipped_sum(factors)`, `materialize()`. `detach()` restores the model. Where several
    records are one sample (a person's), `group_by(keys)` before the forward says so.

    >>> model = torch.nn.Linear(3, 2)
    >>> engine = PerSampleGradients(model)
    >>> model(torch.ones(5, 3)).square().sum(1).mean().backward()
    >>> engine.norms().shape
    torch.Size([5])
    >>> engine.detach()

    Source: book-keeping of inputs and output gradients, Bu et al. 2023 (arXiv 2210.00038); here by use of a
    parameter instead of by layer.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Tensor] | None = None,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        batch_size: int | None = None,
        rows_per_sample: int = 1,
        memory_budget: int | None = None,
        on_backward: Callable[[Gradients], None] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ParameterError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if loss_reduction not in LOSS_REDUCTIONS:
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
        self.model, self.planner = model, Planner(memory_budget)
        check_unattached(model)
        self._tracked = Tracked(model, params)
        self._backward = Backward(self._tracked, self.planner, loss_reduction == "mean", on_backward)
        self._forward = Forward(model, self._backward, Batching(batch_first, batch_size, rows_per_sample))
        self._forward.attach()

    def detach(self) -> None:
        """Take every hook off the model."""
        self._forward.detach()
        self._backward.forget()

    # ------------------------------------------------------------------ parameters

    def track(self, params: Iterable[Tensor] | None = None) -> None:
        """Choose the parameters again (default: all of the model)."""
        self._tracked.choose(params)

    def named_parameters(self) -> dict[str, Tensor]:
        """The tracked parameters that require grad now, by name."""
        return self._tracked.named()

    def parameters(self) -> list[Tensor]:
        """The tracked parameters that require grad now."""
        return self._tracked.tensors()

    def present(self) -> set[int]:
        """Ids of all parameters that stand in the model now, tracked or not."""
        return self._tracked.current()

    def offsets(self) -> dict[str, int]:
        """Where each parameter begins among all the model's elements, frozen ones counted."""
        return self._tracked.offsets()

    def note_grads(self) -> None:
        """Say, between a forward and its backward, that `.grad` was written by other hands than autograd's (zeroed)."""
        self._backward.note_grads()

    # ------------------------------------------------------------------ results

    @property
    def whose(self) -> Whose:
        """Whose the records of a batch are."""
        return self._backward.whose

    @property
    def taken(self) -> Known | None:
        """Which batch of a Poisson loader the last forward was given, if it was taken out of it before."""
        return self._backward.taken

    def group_by(self, keys: Any) -> None:
        """Say whose the records of the coming batch are: those of one key are one sample, whose gradient is their sum.

        keys: a number or string for each record (a tensor or sequence); None: from now on samples are records again.
        Samples are numbered in the order in which their keys first appear. To be said of every batch;
        `fastdp.poisson_loader(group_by=)` does so itself. Raises ValueError where a key is missing.
        """
        self.whose.say(keys)

    @property
    def profile(self) -> bool:
        """Whether the time of each use is measured on a device too."""
        return self._backward.profile

    @profile.setter
    def profile(self, value: bool) -> None:
        self._backward.profile = value

    def _last(self) -> Gradients:
        following.sweep()
        if self._backward.gradients is None:
            raise StepError("no backward yet: call loss.backward() on the model's output first")
        self._backward.gradients.check_unwritten()
        settle(self._backward.gradients.doubts)
        return self._backward.gradients

    def norms(self) -> Tensor:
        """Norms of the per-sample gradients of the last backward, all tracked parameters together: [B]."""
        with torch.no_grad(), exactly():
            return self._last().norm_sq(self.parameters()).sqrt().float()

    def clipped_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """sum_b factors_b gradient_b by parameter name; samples whose factor is 0 are not read as numbers.

        Args: factors [B]. Raises ValueError on another shape.
        """
        gradients = self._last()
        if factors.shape != (gradients.batch,):
            raise ValueError(f"factors must have shape ({gradients.batch},), not {tuple(factors.shape)}")
        named = self.named_parameters()
        with torch.no_grad(), exactly():
            sums = gradients.clipped_sum(factors, list(named.values()))
        return {name: sums.get(id(p), torch.zeros_like(p, dtype=sum_type(p))) for name, p in named.items()}

    def materialize(self) -> dict[str, Tensor]:
        """The per-sample gradients themselves, {name: [B, *shape]}: for small models."""
        gradients = self._last()
        with torch.no_grad(), exactly():
            return {name: gradients.per_sample(p) for name, p in self.named_parameters().items()}

    def explain(self, profile: bool = False) -> str:
        """The plan of the last backward: per use its parameter, shape, route, memory held and predicted time.

        profile: also the time that its norms and its clipped sum took, where these have been asked for (on a
        device from the next backward on, as it is not measured unasked).
        """
        self.profile = self.profile or profile
        return Plan(self._last()).table(self.named_parameters(), profile, self.compiled())

    def compiled(self) -> list[str]:
        """What torch.compile compiled of the model and what not, and why: lines for `explain`; none without it."""
        return self._forward.compiled()
