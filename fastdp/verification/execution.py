"""Runs a program by the engine, or by plain torch for one sample at a time, always from the same state and seeds."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..batch_axis.python_reads import PythonReads
from ..engine.per_sample import PerSampleGradients
from ..errors import BatchReadWarning, VerificationError
from ..utils.autograd_graph import graph_nodes
from ..utils.random_generators import RandomNumbers, devices_of, generators_of, seed_generators
from .random_draws import SampleDraws
from .records import Records
from .state import Contents, Kept, refill

Loss = Callable[[nn.Module, Any], Tensor]
Rows = dict[str, Tensor]


class Drew(Exception):
    """A run drew random numbers, unseen so far: all must be run again with draws made sample by sample."""


class Miscounted(Exception):
    """The engine took the batch for another number of samples."""

    def __init__(self, found: int, wanted: int) -> None:
        super().__init__(found, wanted)
        self.found, self.wanted = found, wanted


class Found(NamedTuple):
    """By the engine, in float64: norms [B] and the sum clipped with factors [B], by the routes that training takes,
    and the per-sample gradients themselves, by name."""

    norms: Tensor
    factors: Tensor
    sums: Rows
    rows: Rows


class Runs:
    """A program: model, loss, and how the engine is made. Every run begins with the same seeds and module state."""

    def __init__(self, model: nn.Module, loss_fn: Loss, params: list[Tensor] | None, reduction: str,
                 options: dict[str, Any], seed: int, averages: Contents) -> None:  # fmt: skip
        self.model, self.loss_fn, self.params, self.reduction = model, loss_fn, params, reduction
        self.options, self.seed = options, seed
        self.draws: SampleDraws | None = None  # where the program draws
        self.outside: dict[str, None] = {}  # generators outside of torch that were drawn from
        self.hidden = False  # whether torch's generator was drawn from by what no mode sees
        self.moved: list[str] = []  # buffers and attributes that a run changed
        self.reads: list[PythonReads] = []
        self.reordered = False  # whether the program was seen to put the samples into another order
        self._kept, self._averages, self._devices = Kept(model), averages, devices_of(model)
        self._own = RandomNumbers(set(), generators_of(model, loss_fn))
        engine = self._attached(1)
        try:
            chosen = set(engine.named_parameters())
        finally:
            engine.detach()
        self.named = {name: p for name, p in model.named_parameters() if name in chosen}
        self._place = next(iter(self.named.values())).device  # where gradients meet, of a model on several devices

    # ------------------------------------------------------------------ one run

    @contextlib.contextmanager
    def run(self, samples: list[int] | None, fresh: bool = True) -> Iterator[None]:
        """A run of these samples; None: which only looks what is drawn. fresh: not with what a run before left."""
        if fresh:
            self.put_back()
        seed_generators(self.seed)
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
        """What the modules hold, as it was at first."""
        self._kept.put_back()
        refill(self._averages)

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

    def engine(self, records: Records) -> Found:
        """Norms, the sum clipped at the median norm, and gradients.

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
                rows = {name: self._here(g) for name, g in engine.materialize().items()}
                factors = (norms.median() / norms.clamp(min=1e-30)).clamp(max=1.0)
                sums = engine.clipped_sum(factors)
                return Found(self._here(norms), self._here(factors), {n: self._here(s) for n, s in sums.items()}, rows)
        finally:
            engine.detach()

    def alone(self, records: Records, fresh: bool = True) -> dict[str, Tensor]:
        """The gradient of a batch of one sample by plain torch: the sum over its records.

        By backward(), as reentrant checkpointing refuses autograd.grad.
        """
        with self.run(records.names, fresh):
            loss = self._loss(records) * (records.units if self.reduction == "mean" else 1)
            with _others_grads(loss):
                loss.backward()  # type: ignore[no-untyped-call]
                found = {
                    name: self._here(torch.zeros_like(p) if p.grad is None else p.grad)
                    for name, p in self.named.items()
                }
                for p in self.model.parameters():
                    p.grad = None
        self.moved += [name for name in self._kept.changed() if name not in self.moved]
        return found

    def _here(self, tensor: Tensor) -> Tensor:
        return (tensor.to_dense() if tensor.is_sparse else tensor).to(self._place, torch.float64)

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


@contextlib.contextmanager
def _others_grads(loss: Tensor) -> Iterator[None]:
    """No backward adds to the gradients of what the loss takes besides: what stands in `.grad` is put back."""
    leaves = [node.variable for node in graph_nodes([loss.grad_fn]) if hasattr(node, "variable")]
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
