"""Runs of a program: by the engine, and by plain torch for one sample at a time; all from the same beginning."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..batch_axis.python_reads import PythonReads
from ..data.random_generators import RandomNumbers, devices_of, generators_of
from ..engine.per_sample import PerSampleGradients
from ..errors import BatchReadWarning, VerificationError
from .draws import SampleDraws
from .noise import disturb, last_bits, nodes_of
from .records import Records
from .state import Attributes, Buffers

Loss = Callable[[nn.Module, Any], Tensor]


class Drew(Exception):
    """A run drew random numbers, unseen so far: all must be run again with draws made sample by sample."""


class Miscounted(Exception):
    """The engine took the batch for another number of samples."""

    def __init__(self, found: int, wanted: int) -> None:
        super().__init__(found, wanted)
        self.found, self.wanted = found, wanted


class Found(NamedTuple):
    """By the engine, in float64: norms [B] and the sum clipped with factors [B], by the routes that training takes,
    and the per-sample gradients themselves, by name (none where they were not asked for)."""

    norms: Tensor
    factors: Tensor
    sums: dict[str, Tensor]
    rows: dict[str, Tensor]


class Runs:
    """A program: model, loss, and how the engine is made. Every run begins with the same buffers and seeds."""

    def __init__(self, model: nn.Module, loss_fn: Loss, params: list[Tensor] | None, reduction: str,
                 options: dict[str, Any], seed: int) -> None:  # fmt: skip
        self.model, self.loss_fn, self.params, self.reduction = model, loss_fn, params, reduction
        self.options, self.seed = options, seed
        self.draws: SampleDraws | None = None  # where the program draws
        self.attributes: Attributes | None = None  # put back before every run as well, if set
        self.outside: dict[str, None] = {}  # generators outside of torch that were drawn from
        self.hidden = False  # whether torch's generator was drawn from by what no mode sees
        self.moved: list[str] = []  # buffers and attributes that a run changed
        self.reads: list[PythonReads] = []
        self.reordered = False  # whether the program was seen to put the samples into another order
        self.rounding: np.random.Generator | None = None  # changes the last bits in backwards of one sample, if set
        self._buffers, self._devices = Buffers(model), devices_of(model)
        self._own = RandomNumbers(set(), generators_of(model, loss_fn))
        self._by_backward = False
        engine = self._attached(1)
        try:
            chosen = set(engine.named_parameters())
        finally:
            engine.detach()
        self.named = {name: p for name, p in model.named_parameters() if name in chosen}

    # ------------------------------------------------------------------ one run

    @contextlib.contextmanager
    def run(self, samples: list[int] | None, fresh: bool = True) -> Iterator[None]:
        """A run of these samples; None: which only looks what is drawn. fresh: not with what a run before left."""
        if fresh:
            self.put_back()
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        self._own.put_back_own()
        before = self._random()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self.draws is not None:
                stack.enter_context(_seen_kernels(self._devices))
                stack.enter_context(self.draws.of(samples))
            yield
        after = self._random()
        self.outside.update(dict.fromkeys(after.others_moved(before)))
        if self.draws is None:
            if not after.torchs_equal(before):
                raise Drew
        elif samples is not None and not self.hidden and not self.draws.constants:  # of a seed that the program sets
            expected = torch.Generator().manual_seed(self.seed)
            for _ in range(self.draws.drawn()):
                torch.randint(2**62, (), generator=expected)
            self.hidden = not torch.equal(expected.get_state(), after.torch[torch.device("cpu")])

    def _random(self) -> RandomNumbers:
        return RandomNumbers(self._devices, [generator for generator, _ in self._own.own])

    def put_back(self) -> None:
        """The buffers (and attributes) as they were at first."""
        self._buffers.put_back()
        if self.attributes is not None:
            self.attributes.put_back()

    def note_moved(self) -> None:
        """What the run before changed."""
        found = [*self._buffers.changed(), *([] if self.attributes is None else self.attributes.changed())]
        self.moved += [name for name in found if name not in self.moved]

    def look_ahead(self, records: Records) -> None:
        """See what is drawn for a whole batch, before any sample draws alone."""
        if self.draws is None:
            return
        with self.run(None):
            self.loss_fn(self.model, records.batch)
        self.put_back()
        torch.manual_seed(self.seed + 1)
        with torch.enable_grad(), _seen_kernels(self._devices), self.draws.after_another_seed():
            self.loss_fn(self.model, records.batch)

    def counted(self, records: Records) -> int:
        """How many samples the engine takes a batch for."""
        engine = self._attached(records.samples)
        try:
            with contextlib.suppress(Drew), self.run(None):
                self.loss_fn(self.model, records.batch)
            return engine._forward.batch
        finally:
            engine.detach()

    # ------------------------------------------------------------------ gradients

    def engine(self, records: Records, factors: Tensor | None = None, rows: bool = False) -> Found:
        """Norms, clipped sum (factors: by default those of clipping at the median norm), and gradients if asked for.

        Raises Miscounted where the engine sees another number of samples.
        """
        engine = self._attached(records.samples)
        try:
            with self.run(records.names):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", BatchReadWarning)  # what is read is about to be judged
                    if self.reads:
                        warnings.simplefilter("ignore")  # said of the first batch
                    engine.group_by(records.numbers if records.grouped else None)
                    loss = self._loss(records)
                with _others_grads(loss):
                    loss.backward()  # type: ignore[no-untyped-call]
                self.reads.append(engine._forward.reads)
                norms = engine.norms()
                if len(norms) != records.samples:
                    raise Miscounted(len(norms), records.samples)
                found = {name: g.double() for name, g in engine.materialize().items()} if rows else {}
                if factors is None:
                    factors = (norms.median() / norms.clamp(min=1e-30)).clamp(max=1.0)
                sums = engine.clipped_sum(factors.to(norms.device, norms.dtype))
                return Found(norms.double(), factors.double(), {n: s.double() for n, s in sums.items()}, found)
        finally:
            engine.detach()

    def alone(self, records: Records, fresh: bool = True) -> dict[str, Tensor]:
        """The gradient of a batch of one sample by plain torch: the sum over its records."""
        wanted = list(self.named.values())
        found: tuple[Tensor | None, ...] | None = None
        if not self._by_backward:
            try:
                with self.run(records.names, fresh):
                    found = torch.autograd.grad(self._scaled(records), wanted, allow_unused=True)
            except RuntimeError as error:
                if "reentrant" not in str(error):
                    raise
                self._by_backward = fresh = True  # reentrant checkpointing refuses autograd.grad
        if found is None:
            with self.run(records.names, fresh):
                found = self._grads_by_backward(self._scaled(records))
        self.note_moved()
        return {
            name: torch.zeros_like(p).double() if g is None else g.double()
            for (name, p), g in zip(self.named.items(), found, strict=True)
        }

    def _grads_by_backward(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        with _others_grads(loss):
            loss.backward()  # type: ignore[no-untyped-call]
            found = tuple(p.grad for p in self.named.values())
            for p in self.model.parameters():
                p.grad = None
        return found

    def _attached(self, samples: int) -> PerSampleGradients:
        options = dict(self.options)
        if options.get("batch_size") is not None:
            options["batch_size"] = samples
        return PerSampleGradients(self.model, self.params, loss_reduction=self.reduction, **options)

    def _loss(self, records: Records) -> Tensor:
        loss = self.loss_fn(self.model, records.batch)
        if loss.dim() == 0:
            return loss
        if loss.dim() != 1:
            raise VerificationError(
                f"loss_fn returned a tensor of shape {tuple(loss.shape)}: it must be a scalar, or one loss a sample [B]"
            )
        return loss.mean() if self.reduction == "mean" else loss.sum()

    def _scaled(self, records: Records) -> Tensor:
        loss = self._loss(records) * (records.units if self.reduction == "mean" else 1)
        if self.rounding is not None:
            disturb(loss, self.rounding, last_bits(self.named.values()))
        return loss


@contextlib.contextmanager
def _others_grads(loss: Tensor) -> Iterator[None]:
    """No backward adds to the gradients of what the loss takes besides: what stands in `.grad` is put back."""
    leaves = [node.variable for node in nodes_of(loss) if hasattr(node, "variable")]
    kept = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


@contextlib.contextmanager
def _seen_kernels(devices: set[torch.device]) -> Iterator[None]:
    """Kernels that draw by operations which a mode sees, instead of within."""
    if all(device.type != "cuda" for device in devices):
        yield
        return
    with sdpa_kernel([SDPBackend.MATH]), torch.backends.cudnn.flags(enabled=False):
        yield
