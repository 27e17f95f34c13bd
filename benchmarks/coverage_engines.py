"""The engines compared: each makes one step of SGD without noise, clipping norm 1, expected batch size B."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import nn

from .coverage_truth import Engine, Losses


class Contender(NamedTuple):
    step: Engine
    package: str  # whose own exceptions are refusals


def fastdp_step(model: nn.Module, batch: dict[str, Any], losses: Losses, rate: float, size: int) -> None:
    import fastdp

    options = {"batch_size": size} if _rows(batch) != size else {}  # several rows of each sample: only the user knows
    settings = dict(noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=size, **options)
    optimizer = fastdp.DPSGD(model, lr=rate, **settings)
    losses(model, batch).mean().backward()
    optimizer.step()
    optimizer.detach()


def _rows(batch: dict[str, Any]) -> int:
    """Rows of the model's first input."""
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())


def opacus_step(mode: str) -> Engine:
    """As `PrivacyEngine.make_private` puts it together."""

    def step(model: nn.Module, batch: dict[str, Any], losses: Losses, rate: float, size: int) -> None:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
        from opacus.validators import ModuleValidator

        warnings.filterwarnings("ignore")
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
        ModuleValidator.validate(model, strict=True)
        common = dict(noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=size)
        if mode == "ghost":
            wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
            optimizer = DPOptimizerFastGradientClipping(inner, **common)
            DPTensorFastGradientClipping(wrapped, optimizer, losses(wrapped, batch), "mean").backward()
        else:
            wrapped = GradSampleModule(model, force_functorch=mode == "functorch")
            wrapped.forbid_grad_accumulation()
            optimizer = DPOptimizer(inner, **common)
            losses(wrapped, batch).mean().backward()
        optimizer.step()

    return step


def one_by_one(model: nn.Module, batch: dict[str, Any], losses: Losses, rate: float, size: int) -> None:
    """Plain autograd on one sample at a time: what the benchmark must find exact wherever samples are independent."""
    from .coverage_truth import clipped_mean, gradient, size_of, take, trainable

    rows = [gradient(model, take(batch, [i], size), losses) for i in range(size)]
    update = clipped_mean(rows, [min(1.0, 1 / size_of(g)) for g in rows])
    with torch.no_grad():
        for name, p in trainable(model).items():
            p -= (rate * update[name]).to(p.dtype)


ENGINES: dict[str, Contender] = {
    "fastdp": Contender(fastdp_step, "fastdp"),
    "opacus-hooks": Contender(opacus_step("hooks"), "opacus"),
    "opacus-functorch": Contender(opacus_step("functorch"), "opacus"),
    "opacus-ghost": Contender(opacus_step("ghost"), "opacus"),
    "one-by-one": Contender(one_by_one, "benchmarks"),
}
