"""`PerSampleGradients`: exact per-sample gradient norms and clipped sums from one ordinary backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import grad_sample as _rules  # noqa: F401  (registers the rules)
from ..batch_axis.current_batch import SampleGroups
from ..batch_axis.deferred_checks import settle
from ..batch_axis.inputs import Batching
from ..errors import ParameterError, StepError
from ..grad_sample.custom_rules import see_foreign
from ..grad_sample.planner import Planner
from ..ops.common import exactly, sum_type
from . import loss_tracking
from .attach_checks import check_unattached, warn_of_missing_kernels
from .backward import Backward
from .explain import Plan
from .forward import Forward
from .gradients import Gradients
from .layerwise import ByGroup
from .tracked_parameters import Shards, Tracked
from .unused_batches import Known


class PerSampleGradients:
    """Exact per-sample gradients of a model from an ordinary `loss.backward()`.

    After a backward, call `norms()`, `clipped_sum(factors)` or `materialize()`. `detach()` restores the model. If
    several records are one sample (a person), call `group_by(keys)` before the forward.

    Args:
        model: any nn.Module. No part of it is replaced.
        params: the parameters to track (default: all that require grad). They get no `.grad`.
        loss_reduction: "mean" or "sum", which is how the loss combines the samples' losses.
        batch_first: whether samples lie along the first dimension of the model's inputs; False means the second.
        batch_size: the number of samples, if the inputs do not show it. Inputs then hold batch_size * k rows, with k
            consecutive rows for each sample.
        rows_per_sample: k, if k consecutive rows of the inputs are one sample (augmentations), whatever the batch.
        memory_budget: the bytes that may be held from the begin of backward to its end for norms and clipped sums (see
            `fastdp.grad_sample.planner`). None selects the fastest plan.
        on_backward: a function that receives the `Gradients` at the end of every backward; they are then not kept.
        shards: for a model that lies in parts on several processes, what gathers the parts; a private optimizer gives
            it.

    Raises:
        ParameterError: if the model or its parameters cannot be tracked.
        ValueError: if an option is out of range.

    >>> model = torch.nn.Linear(3, 2)
    >>> engine = PerSampleGradients(model)
    >>> model(torch.ones(5, 3)).square().sum(1).mean().backward()
    >>> engine.norms().shape
    torch.Size([5])
    >>> engine.detach()

    Source: book-keeping of inputs and output gradients, Bu et al. 2023 (arXiv 2210.00038), here by use of a parameter
    instead of by layer.
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
        shards: Shards | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ParameterError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
        self.model, self.planner = model, Planner(memory_budget)
        check_unattached(model)
        see_foreign()
        self._tracked = Tracked(model, params, shards)
        self._backward = Backward(self._tracked, self.planner, loss_reduction == "mean", on_backward)
        self._forward = Forward(model, self._backward, Batching(batch_first, batch_size, rows_per_sample))
        self._forward.attach()
        for kind in {"cpu", *(p.device.type for p in self.parameters())}:  # C++ keeps the books on every device
            warn_of_missing_kernels(kind)

    def detach(self) -> None:
        """Remove every hook from the model."""
        if self._forward.graphed is not None:
            self._forward.graphed.remove()
        self._forward.detach()
        self._backward.forget()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within it the model is free for another engine. Where what is within fails, this one is on it again."""
        self._forward.take_off()
        try:
            yield
        except BaseException:
            self._forward.attach()
            raise

    def public(self) -> contextlib.AbstractContextManager[None]:
        """Within it, forwards and backwards are ordinary ones, of batches that are not private."""
        return self._forward.public()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[Gradients]]:
        """Within it the gradients of backwards go into this list, and to nobody else."""
        found: list[Gradients] = []
        backward = self._backward
        own, backward.on_end = backward.on_end, found.append
        try:
            yield found
        finally:
            backward.on_end = own

    def clip_by_group(self, by_group: ByGroup | None) -> None:
        """`on_backward` lets go of what it takes; with `by_group`, it is given what groups that are taken within the
        backward leave (`fastdp.engine.layerwise`)."""
        self._backward.by_group, self._backward.clips = by_group, self._backward.on_end

    def watch(
        self, begins: Callable[[], None], refused: Callable[[BaseException], None],
        broken: Callable[[BaseException], None] = lambda error: None,
    ) -> None:  # fmt: skip
        """Call a function before every forward that a backward may follow, one with every error of fastdp's, and one
        with every error that ends a backward."""
        self._backward.begins, self._backward.refused, self._backward.broken = begins, refused, broken

    def grouped(self) -> bool:
        """Whether the coming batch's records are grouped (`group_by`)."""
        return self.whose.grouped()

    def hold_no_parameters(self) -> None:
        """Hold none between calls, as a framework is about to lay the model in parts."""
        self._tracked.holds = False
        self._tracked.let_go()

    def replayed(self, given: object, gradients: Gradients) -> None:
        """A forward and backward were replayed on this batch, with these gradients."""
        with torch._C.DisableTorchFunction():  # a mode that follows the loss may be on
            self._backward.replayed(given, gradients)

    def graph_forwards(self, by: Any) -> Forward:
        """Tell this of every outermost forward before it begins (`fastdp.optim.graphed_forwards`)."""
        self._forward.graphed = by
        return self._forward

    def others(self) -> list[str]:
        """The names of parameters that require grad and are not tracked."""
        return [name for name, _ in self._tracked.others()]

    def left_out(self, params: Iterable[Tensor]) -> list[str]:
        """The names of those among these parameters of an optimizer that are not tracked, frozen or not."""
        return self._tracked.left_out(params)

    # ------------------------------------------------------------------ parameters

    def track(self, params: Iterable[Tensor] | None = None) -> None:
        """Choose the tracked parameters again (default: all of the model)."""
        self._tracked.choose(params)

    def named_parameters(self) -> dict[str, Tensor]:
        """The tracked parameters that currently require grad, by name."""
        return self._tracked.named()

    def parameters(self) -> list[Tensor]:
        """The tracked parameters that currently require grad."""
        return self._tracked.tensors()

    def shape_of(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of a tracked parameter in all the model, of which this process may use a part."""
        return tuple(self._tracked.part(parameter).shape)

    def steady(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model's parameters stay what they are, and are looked at once."""
        return self._tracked.steady()

    def present(self) -> set[int]:
        """The ids of all parameters that are currently in the model, tracked or not."""
        return self._tracked.current()

    def offsets(self) -> dict[str, int]:
        """The position of each parameter's first element among all elements of the model, frozen ones included."""
        return self._tracked.offsets()

    def note_grads(self) -> None:
        """Note, between a forward and its backward, that other code than autograd wrote to `.grad` (zeroed it)."""
        self._backward.uncaptured.note_grads()

    def written_grads(self) -> list[str]:
        """The names of parameters whose `.grad` was written to by other code since the last forward began."""
        return self._backward.uncaptured.written()

    # ------------------------------------------------------------------ results

    @property
    def whose(self) -> SampleGroups:
        """The assignment of the batch's records to samples."""
        return self._backward.whose

    @property
    def taken(self) -> Known | None:
        """The batch of a Poisson loader that the last forward received, if it was taken out of the loader before."""
        return self._backward.taken

    def group_by(self, keys: Any) -> None:
        """Set which sample each record of the coming batch belongs to. A sample's gradient is the sum over its records.

        Samples are numbered in the order in which their keys first appear. Call this method for every batch;
        `fastdp.poisson_loader(group_by=)` does so itself.

        Args:
            keys: a number or string for each record (a tensor or sequence). None: samples are records again.

        Raises:
            ValueError: if a key is missing.
        """
        self.whose.say(keys)

    @property
    def profile(self) -> bool:
        """Whether the time of each use is also measured on a device."""
        return self._backward.profile

    @profile.setter
    def profile(self, value: bool) -> None:
        self._backward.profile = value

    def _last(self) -> Gradients:
        if self._backward.gradients is None:
            raise StepError("no backward yet: call loss.backward() on the model's output first")
        self._backward.gradients.check_unwritten()
        settle(self._backward.gradients.doubts)
        return self._backward.gradients

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Gradients]:
        with loss_tracking.swept(), torch.no_grad(), exactly():
            yield self._last()

    def norms(self) -> Tensor:
        """The norms of the per-sample gradients of the last backward, over all tracked parameters: [B], float32.

        Raises StepError before the first backward.
        """
        with self._reading() as gradients:
            return gradients.norm_sq(self.parameters()).sqrt().float()

    def clipped_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """Compute sum_b factors_b gradient_b, by parameter name.

        Samples with factor 0 contribute nothing, even if their gradients are NaN or infinite.

        Args:
            factors: the factors [B].

        Raises:
            ValueError: if factors have another shape.
            StepError: before the first backward.
        """
        named = self.named_parameters()
        with self._reading() as gradients:
            if factors.shape != (gradients.batch,):
                raise ValueError(f"factors must have shape ({gradients.batch},), not {tuple(factors.shape)}")
            sums = gradients.clipped_sum(factors, list(named.values()))
        return {name: sums.get(id(p), torch.zeros_like(p, dtype=sum_type(p))) for name, p in named.items()}

    def materialize(self) -> dict[str, Tensor]:
        """Compute the per-sample gradients of the last backward, {name: [B, *shape]}.

        They need B times the memory of the parameters, so this is for small models.
        """
        with self._reading() as gradients:
            return {name: gradients.per_sample(p) for name, p in self.named_parameters().items()}

    def explain(self, profile: bool = False) -> str:
        """Return the plan of the last backward as text.

        Each use has a line with its parameter, shape, route, memory held, and predicted time.

        Args:
            profile: also show the time that its norms and its clipped sum took, if these have been computed. On a
                device, times are measured from the next backward on.
        """
        self.profile = self.profile or profile
        with self._reading() as gradients:
            return Plan(gradients).table(self.named_parameters(), profile)
