"""Truth: every sample alone, float64, plain autograd, no hook, no formula; and what a step is asked for by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.errors import FastDPError
from fastdp.grad_sample.parameter_use import ParameterUse

Loss = Callable[[nn.Module, Any], Tensor]  # -> one loss a sample, [B]


class Comparison(NamedTuple):
    """Relative errors of norms, clipped sum and (against the mean norm) per-sample gradients."""

    norms: float
    clipped_sum: float
    per_sample: float
    too_small: float  # how far norms lie below the truth; above it they may lie by what rounding may add to the sums
    uses: list[ParameterUse]  # by whose routes

    @property
    def worst(self) -> float:
        return max(self.norms, self.clipped_sum, self.per_sample)


def take(batch: Any, rows: list[int] | slice) -> Any:
    if isinstance(batch, Tensor):
        part = batch[rows]
        if batch.dim() == 4 and not batch.is_contiguous() and batch.is_contiguous(memory_format=torch.channels_last):
            part = part.contiguous(memory_format=torch.channels_last)
        return part
    if isinstance(batch, dict):
        return {key: take(value, rows) for key, value in batch.items()}
    return type(batch)(take(value, rows) for value in batch)


def as_double(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: as_double(value) for key, value in batch.items()}
    return type(batch)(as_double(value) for value in batch)


def size(batch: Any) -> int:
    if isinstance(batch, dict):
        return size(next(iter(batch.values())))
    return len(batch) if isinstance(batch, Tensor) else len(batch[0])


def truth(model: nn.Module, batch: Any, losses: Loss, double: bool = True) -> dict[str, Tensor]:
    """Per-sample gradients {name: [B, *shape]} of the trainable parameters, float64."""
    model = copy.deepcopy(model)
    if double:
        model, batch = model.double(), as_double(batch)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in range(size(batch)):
        model.zero_grad()
        losses(model, take(batch, [i])).sum().backward()
        for name, p in named.items():
            rows[name].append(torch.zeros_like(p).double() if p.grad is None else p.grad.double().clone())
    return {name: torch.stack(grads).detach() for name, grads in rows.items()}


def norms_of(rows: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in rows.values()]).sum(0).sqrt()


def compare(model: nn.Module, batch: Any, losses: Loss, double: bool = True) -> Comparison:
    """fastdp on the batch against the truth; the model comes back without an engine."""
    return against(truth(model, batch, losses, double), model, batch, losses)


def against(exact: dict[str, Tensor], model: nn.Module, batch: Any, losses: Loss, **options: Any) -> Comparison:
    """The same with the truth at hand; options: of the engine."""
    norms = norms_of(exact)
    assert bool((norms > 0).all()), "a case whose gradient is zero shows nothing"
    factors = (norms.median() / norms).clamp(max=1)
    engine = fastdp.PerSampleGradients(model, **options)
    try:
        losses(model, batch).mean().backward()
        uses = engine._last().uses
        found, summed, rows = engine.norms().double(), engine.clipped_sum(factors.float()), engine.materialize()
    finally:
        engine.detach()
        model.zero_grad()
    assert set(summed) == set(exact) == set(rows)
    want = {name: torch.einsum("b,b...->...", factors, g) for name, g in exact.items()}
    wrong = sum(float((summed[n].double() - t).square().sum()) for n, t in want.items()) ** 0.5
    each = max(float((rows[n].double() - g).reshape(len(g), -1).norm(dim=1).max()) for n, g in exact.items())
    return Comparison(
        float(((found - norms).abs() / norms).max()),
        wrong / sum(float(t.square().sum()) for t in want.values()) ** 0.5,
        each / float(norms.mean()),
        float(((norms - found) / norms).max()),
        uses,
    )


def assert_step(engine: fastdp.PerSampleGradients, batch: Any, losses: Loss, rtol: float = 1e-5) -> Tensor:
    """One backward of an attached model: its norms, gradients and clipped sums are those of each sample alone."""
    exact = truth(engine.model, batch, losses)
    losses(engine.model, batch).mean().backward()
    norms, rows = engine.norms(), engine.materialize()
    factors = torch.linspace(0.2, 1.0, len(norms))
    close(norms.double(), norms_of(exact), rtol)
    for name, total in engine.clipped_sum(factors).items():
        close(rows[name].double(), exact[name], rtol)
        close(total.double(), torch.einsum("b,b...->...", factors.double(), exact[name]), rtol)
    return norms


def close(found: Tensor, want: Tensor, rtol: float) -> None:
    """Equal within rounding; small elements within that of the large ones."""
    torch.testing.assert_close(found, want, rtol=rtol, atol=rtol * float(want.abs().max() if want.numel() else 0))


def assert_refused(model: nn.Module, batch: Any, losses: Loss, match: str = "", kind: Any = FastDPError) -> None:
    """A step of this program raises an error of this kind, with these words, before there are norms."""
    engine = fastdp.PerSampleGradients(model)
    try:
        with pytest.raises(kind, match=match):
            losses(model, batch).mean().backward()
            engine.norms()
    finally:
        engine.detach()
