"""The effect of clipping on a gradient while a model trains: norms, a histogram, and the angle by which it turns.

Nothing here is private: the numbers come from the raw gradients, and the guarantee of the optimizer does not cover
them.

Source: the figures by which Shamsabadi and Papernot (Losing less, PoPETs 2023) judge losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batch_axis.inputs import nested_tensors
from .engine.gradients import Gradients
from .engine.per_sample import PerSampleGradients
from .errors import StepError
from .losses.preactivations import Hook, chosen_layers, hook_layers, runs_again
from .optim.optimizers import PrivateOptimizer
from .utils.number_checks import check_whole


class NormHistogram(NamedTuple):
    """Counts [bins] of per-sample norms between edges [bins + 1]. The last bin includes its upper edge."""

    edges: Tensor
    counts: Tensor


@dataclass
class Report:
    """The diagnostics of one logical batch.

    Norms are Euclidean. Those of gradients are in units of the gradient of one sample's own loss.

    Attributes:
        samples: the number of samples.
        norms: per-sample gradient norms [samples], float32, over all parameters, in the order of the backwards.
        clipped: the share of the finite norms above the clipping norm R; by groups, if clipping is.
        nonfinite: the number of samples with a NaN or infinite gradient, which are in no sum.
        clipped_norm: the norm of the sum with clipping, before noise.
        unclipped_norm: the norm of the sum without clipping.
        cosine: the cosine of the angle between these two sums; NaN if a sum is 0.
        cosine_of: the same, by parameter.
        weights: the norm of each parameter.
        pre_activations: the root of the mean over samples of the squared norm, by layer; 0 if a layer did not run.
        logits: the same, for the model's output.
    """

    samples: int
    norms: Tensor
    clipped: float
    nonfinite: int
    clipped_norm: float
    unclipped_norm: float
    cosine: float
    cosine_of: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    pre_activations: dict[str, float] = field(default_factory=dict)
    logits: float = math.nan

    def histogram(self, bins: int = 20, log: bool = True) -> NormHistogram:
        """Count the finite norms in bins between the smallest and the largest (positive) norm.

        Args:
            bins: the number of bins, at least 1.
            log: whether the edges have equal ratios. Norms of 0 are then left out.

        Raises:
            ValueError: if bins is less than 1.
        """
        check_whole(bins=bins)
        kept = self.norms.double()
        kept = kept[torch.isfinite(kept) & ((kept > 0) | (not log))]
        if not len(kept):
            return NormHistogram(torch.zeros(bins + 1, dtype=torch.float64), torch.zeros(bins, dtype=torch.int64))
        low, high = float(kept.min()), float(kept.max())
        edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
        edges = low * (high / low) ** edges if log else low + (high - low) * edges
        edges[0], edges[-1] = low, high
        which = torch.bucketize(kept, edges, right=True).sub(1).clamp(0, bins - 1)
        return NormHistogram(edges, torch.bincount(which, minlength=bins))

    def values(self) -> dict[str, float]:
        """Everything as numbers by name, for a row of a table: "cosine", "norm_median", "weight.fc.bias", ..."""
        finite = self.norms[torch.isfinite(self.norms)].double()
        quantiles = finite.quantile(torch.tensor([0.1, 0.5, 0.9]).double()).tolist() if len(finite) else [math.nan] * 3
        found = {
            "samples": float(self.samples), "clipped": self.clipped, "nonfinite": float(self.nonfinite),
            "norm_mean": float(finite.mean()) if len(finite) else math.nan,
            "norm_p10": quantiles[0], "norm_median": quantiles[1], "norm_p90": quantiles[2],
            "clipped_norm": self.clipped_norm, "unclipped_norm": self.unclipped_norm, "cosine": self.cosine,
            "logits": self.logits,
            "weights": math.sqrt(sum(n**2 for n in self.weights.values())),
            "pre_activations": math.sqrt(sum(n**2 for n in self.pre_activations.values())),
        }  # fmt: skip
        for kind, parts in (("cosine", self.cosine_of), ("weight", self.weights), ("pre", self.pre_activations)):
            found.update({f"{kind}.{name}": value for name, value in parts.items()})
        return found


class GradientDiagnostics:
    """Watches a private optimizer, without changing its training by a single bit.

    Call `report()` after a backward, or after the step, for the logical batch so far. Call `remove()` at the end.

    Args:
        optimizer: a fastdp optimizer that is not detached.
        layers: the names of modules with pre-activations to measure: the inputs of activation functions, and the
            outputs of other modules. None: the inputs of all activation functions of `torch.nn` that are modules. []:
            none.
        every: examine each n-th logical batch only. Each examination costs about as much as another clipped sum.

    Raises:
        StepError: if the optimizer is detached or already watched.
        ValueError: if an argument is invalid.

    >>> from fastdp import DPSGD
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> optimizer = DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=8)
    >>> watch = GradientDiagnostics(optimizer)
    >>> model(torch.randn(8, 3)).square().mean().backward()
    >>> optimizer.step()
    >>> 0 < watch.report().cosine <= 1
    True
    >>> watch.remove(); optimizer.detach()
    """

    def __init__(self, optimizer: PrivateOptimizer, layers: Iterable[str] | None = None, *, every: int = 1) -> None:
        if not isinstance(optimizer, PrivateOptimizer):
            raise ValueError(
                f"diagnostics are of a fastdp optimizer (DPSGD, privatize(...)), not of {type(optimizer).__name__}; of "
                "an engine alone use compare()"
            )
        check_whole(every=every)
        self._privacy = privacy = optimizer._attached()
        privacy.replica.refuse_parts("GradientDiagnostics")
        self._engine, self._backward = privacy.engine, privacy.engine._backward
        if isinstance(getattr(self._backward.on_end, "__self__", None), GradientDiagnostics):
            raise StepError("this optimizer is being watched already: remove() the other GradientDiagnostics first")
        model = self._engine.model
        chosen = chosen_layers(model, layers) if layers is None or list(layers := list(layers)) else {}
        self.every, self._number, self._looking = every, -1, True
        self._squares: dict[str, Tensor] = {}
        self._fresh: dict[str, Tensor] = {}
        self._parts: list[_Part] = []
        self._layers = list(chosen)
        handle = model.register_forward_hook(Hook(self, "_output", "").run)
        self._handles: list[Any] = [handle, *hook_layers(self, chosen)]
        self._inner = self._backward.on_end
        self._backward.on_end = self._observe

    def remove(self) -> None:
        """Stop watching. The last report stays available."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if getattr(self._backward.on_end, "__self__", None) is self:
            self._backward.on_end = self._inner

    @property
    def looking(self) -> bool:
        """Whether the logical batch at hand is one that is examined."""
        return self._looking

    def report(self) -> Report:
        """Return the Report of the last logical batch that was examined, over the backwards so far.

        Raises StepError before the first backward.
        """
        if not self._parts:
            raise StepError("no backward was watched yet: call loss.backward() first")
        return _report(self._parts, self._engine.named_parameters(), self._squares, self._layers)

    # ------------------------------------------------------------------ while the model runs

    def _input(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        self._add(layer, [t for t in args[:1] if isinstance(t, Tensor)])

    def _output(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        self._add(layer or _LOGITS, [t for t in nested_tensors(out) if t.is_floating_point()][:1])

    def _add(self, layer: str, tensors: list[Tensor]) -> None:
        if not torch.is_grad_enabled() or runs_again():
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():  # an engine's mode may be on
            for tensor in tensors:
                square = tensor.detach().double().square().sum()
                self._fresh[layer] = self._fresh[layer] + square if layer in self._fresh else square

    def _observe(self, gradients: Gradients) -> None:
        privacy, squares = self._privacy, self._fresh
        self._fresh = {}
        begins = not privacy._has_pending and not privacy._has_sums
        before = {key: value.clone() for key, value in privacy._pending.items()} if privacy._has_pending else {}
        assert self._inner is not None
        self._inner(gradients)
        if begins:
            self._number += 1
            self._looking = self._number % self.every == 0
        if not self._looking:
            return
        if begins:
            self._parts, self._squares = [], {}
        for layer, value in squares.items():
            self._squares[layer] = self._squares[layer] + value if layer in self._squares else value
        clipped = {
            key: value - before[key] if key in before else value.clone() for key, value in privacy._pending.items()
        }
        self._parts.append(_part(gradients, self._engine, clipped, privacy))


_LOGITS = " logits"  # no module's name


class _Part(NamedTuple):
    """The diagnostics of one backward."""

    records: int
    norms: Tensor  # [B] on the CPU
    above: float  # how many norms are above their R, and of how many
    of: int
    clipped: dict[int, Tensor]
    unclipped: dict[int, Tensor]


def _part(gradients: Gradients, engine: PerSampleGradients, clipped: dict[int, Tensor], privacy: Any) -> _Part:
    groups = privacy.norms if isinstance(privacy.norms, dict) else {"all": privacy.norms}
    limits = {group.name: group.max_grad_norm for group in privacy.clipping.groups}
    norms = torch.stack([n.double().square() for n in groups.values()]).sum(0).sqrt()
    finite = torch.isfinite(norms)
    above = sum(int(((n > limits[name]) & finite).sum()) for name, n in groups.items())
    named = engine.named_parameters()
    members = [[named[name] for name in group.parameters if name in named] for group in privacy.clipping.groups]
    timed = gradients.timed()
    clocks = [item.clock for item in timed]
    unclipped: dict[int, Tensor] = {}
    try:
        for item in timed:  # explain() tells what the training took
            item.clock = None
        for parameters in members:
            unclipped.update(gradients.clipped_sum(finite.float(), parameters))
    finally:
        for item, clock in zip(timed, clocks, strict=True):
            item.clock = clock
    return _Part(gradients.records, norms.float().cpu(), above, int(finite.sum()) * len(groups), clipped, unclipped)


def _report(parts: list[_Part], named: dict[str, Tensor], squares: dict[str, Tensor], layers: list[str]) -> Report:
    norms = torch.cat([part.norms for part in parts])
    records = max(sum(part.records for part in parts), 1)
    dots: dict[str, tuple[float, float, float]] = {}
    for name, p in named.items():
        a, b = (_sum([getattr(part, kind)[id(p)] for part in parts if id(p) in getattr(part, kind)])
                for kind in ("clipped", "unclipped"))  # fmt: skip
        dots[name] = (0.0, 0.0, 0.0) if a is None or b is None else (float(a @ b), float(a @ a), float(b @ b))
    ab, aa, bb = (sum(values) for values in zip(*dots.values(), strict=True))
    root = {name: math.sqrt(float(value) / records) for name, value in squares.items()}
    return Report(
        samples=len(norms), norms=norms,
        clipped=sum(part.above for part in parts) / max(sum(part.of for part in parts), 1),
        nonfinite=int((~torch.isfinite(norms)).sum()),
        clipped_norm=math.sqrt(aa), unclipped_norm=math.sqrt(bb), cosine=_cosine(ab, aa, bb),
        cosine_of={name: _cosine(*three) for name, three in dots.items()},
        weights={name: float(p.detach().double().norm()) for name, p in named.items()},
        pre_activations={name: root.get(name, 0.0) for name in layers}, logits=root.get(_LOGITS, math.nan),
    )  # fmt: skip


def _sum(tensors: list[Tensor]) -> Tensor | None:
    return torch.stack([t.detach().double().flatten() for t in tensors]).sum(0) if tensors else None


def _cosine(ab: float, aa: float, bb: float) -> float:
    return ab / math.sqrt(aa * bb) if aa > 0 and bb > 0 else math.nan


def compare(engine: PerSampleGradients, factors: Tensor) -> Report:
    """Return the Report of an engine's last backward under custom clipping factors, without layers and logits.

    `clipped` is the share of samples with a factor below 1.

    Args:
        engine: a PerSampleGradients after a backward.
        factors: [B], the factor of each sample.

    Raises:
        StepError: before the first backward.
        ValueError: if factors have another shape.
    """
    norms = engine.norms()
    ids = {name: id(p) for name, p in engine.named_parameters().items()}
    finite = torch.isfinite(norms)
    ones = finite.to(factors.dtype)
    clipped, unclipped = ({ids[n]: t for n, t in engine.clipped_sum(c).items()} for c in (factors * ones, ones))
    part = _Part(len(norms), norms.cpu(), float(((factors < 1) & finite).sum()), int(finite.sum()), clipped, unclipped)
    return _report([part], engine.named_parameters(), {}, [])
