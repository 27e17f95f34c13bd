"""One training step of each contender, with AdamW and the same noise multiplier and clipping norm."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fastdp

from .models import Workload

SIGMA, R, LR = 1.0, 1.0, 1e-4
Step = Callable[[Tensor, Tensor], None]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def nonprivate(model: nn.Module, work: Workload, sigma: float = SIGMA) -> Step:
    optimizer = torch.optim.AdamW(trained(model), lr=LR, fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        work.losses(model(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(**options: object) -> Callable[..., Step]:
    def make(model: nn.Module, work: Workload, sigma: float = SIGMA) -> Step:
        optimizer = fastdp.DPAdamW(
            model, lr=LR, noise_multiplier=sigma, max_grad_norm=R, expected_batch_size=work.batch_size, **options
        )

        def step(x: Tensor, y: Tensor) -> None:
            work.losses(model(x), y).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def opacus(mode: str) -> Callable[..., Step]:
    """Opacus as its documentation says: GradSampleModule and DPOptimizer, or the ghost pair."""

    def make(model: nn.Module, work: Workload, sigma: float = SIGMA) -> Step:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        warnings.filterwarnings("ignore")
        inner = torch.optim.AdamW(trained(model), lr=LR, fused=True)
        common = dict(noise_multiplier=sigma, max_grad_norm=R, expected_batch_size=work.batch_size)
        if mode == "ghost":
            wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=R, use_ghost_clipping=True)
            optimizer = DPOptimizerFastGradientClipping(inner, **common)
        else:
            wrapped = GradSampleModule(model, force_functorch=mode == "functorch")
            optimizer = DPOptimizer(inner, **common)

        def step(x: Tensor, y: Tensor) -> None:
            losses = work.losses(wrapped(x), y)
            if mode == "ghost":
                DPTensorFastGradientClipping(wrapped, optimizer, losses, "mean").backward()
            else:
                losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


CONTENDERS: dict[str, Callable[..., Step]] = {
    "non-private": nonprivate,
    "fastdp": ours(),
    "fastdp layerwise": ours(style="layerwise"),
    "opacus hooks": opacus("hooks"),
    "opacus functorch": opacus("functorch"),
    "opacus ghost": opacus("ghost"),
}
