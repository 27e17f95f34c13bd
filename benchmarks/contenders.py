"""One training step of each contender, with AdamW and the same noise multiplier and clipping norm."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fastdp

from .models import Workload

SIGMA, R, LR = 1.0, 1.0, 1e-4
Step = Callable[[Tensor, Tensor], None]


class NotApplicable(Exception):
    """A contender that this machine or workload has no use for."""


class Contender(NamedTuple):
    """How to make a step, and which truth its gradient is compared with.

    make: (model, workload, noise multiplier, clipping norm) -> step. prepare: what its documentation says to do to a
    model before. clipping: "none", "local", "global" or "automatic", of the whole gradient, or "layerwise". patience:
    how many times the time limit its first step may take. resident: whether the memory of its process on the CPU,
    and on a GPU what the allocator counts after its first step, is that of its training. named: run only where it is
    asked for by name.
    """

    make: Callable[..., Step]
    clipping: str = "local"
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    patience: float = 1.0
    resident: bool = True
    named: bool = False


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def nonprivate(model: nn.Module, work: Workload, sigma: float = SIGMA, limit: float = R) -> Step:
    return _eager(model, work, torch.optim.AdamW(trained(model), lr=LR, fused=True))


def _eager(model: nn.Module, work: Workload, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        work.losses(model(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compiled(model: nn.Module) -> nn.Module:
    """The model compiled in place; the loss and the optimizer are as they were."""
    model.compile()
    return model


def ours(**options: object) -> Callable[..., Step]:
    def make(model: nn.Module, work: Workload, sigma: float = SIGMA, limit: float = R) -> Step:
        optimizer = fastdp.DPAdamW(
            model, lr=LR, noise_multiplier=sigma, max_grad_norm=limit, expected_batch_size=work.batch_size, **options
        )
        return _eager(model, work, optimizer)

    return make


def graphed(model: nn.Module, work: Workload, sigma: float = SIGMA, limit: float = R, compile: bool = False) -> Step:
    """The replayed step, recorded on another batch."""
    optimizer = fastdp.DPAdamW(
        model, lr=LR, noise_multiplier=sigma, max_grad_norm=limit, expected_batch_size=work.batch_size
    )
    weight = next(model.parameters())
    x, y = (t.to(weight.device) for t in work.batch(work.batch_size))
    example = (x.to(weight.dtype) if x.is_floating_point() else x, y)
    step = optimizer.graphed(lambda model, x, y: work.losses(model(x), y), example, compile=compile)
    if compile and not step.compiled:
        raise NotApplicable("Inductor does not take this step")

    def replayed(x: Tensor, y: Tensor) -> None:
        step(x, y)
        if step.eager or (x.is_cuda and not step.captured):
            raise RuntimeError(f"not replayed, or not as a CUDA graph: {step.reasons}")

    return replayed


def validated(model: nn.Module) -> nn.Module:
    """Opacus's documentation: validate, and fix what it says; nn.LSTM becomes its DPLSTM, with the same weights."""
    if importlib.util.find_spec("opacus") is None:
        raise NotApplicable("opacus is not installed")
    from opacus.validators import ModuleValidator

    if ModuleValidator.validate(model, strict=False):
        model = ModuleValidator.fix(model)
        ModuleValidator.validate(model, strict=True)
    return model


def opacus(mode: str, package: str = "opacus") -> Callable[..., Step]:
    """Opacus as its documentation says: its wrapper of the mode, and its optimizer; package: where these come from."""

    def make(model: nn.Module, work: Workload, sigma: float = SIGMA, limit: float = R) -> Step:
        layers, optimizers, utils = (
            importlib.import_module(f"{package}.{name}")
            for name in ("grad_sample", "optimizers", "utils.fast_gradient_clipping_utils")
        )
        warnings.filterwarnings("ignore")
        inner = torch.optim.AdamW(trained(model), lr=LR, fused=True)
        common = dict(noise_multiplier=sigma, max_grad_norm=limit, expected_batch_size=work.batch_size)
        if package != "opacus":  # the others seed torch's generator again, which would repeat its noise
            common["secure_mode"] = True
        if mode == "ghost":
            wrapped = layers.GradSampleModuleFastGradientClipping(model, max_grad_norm=limit, use_ghost_clipping=True)
            optimizer = optimizers.DPOptimizerFastGradientClipping(inner, **common)
        elif mode == "ew":
            wrapped = layers.GradSampleModuleExpandedWeights(model)
            optimizer = optimizers.DPOptimizer(inner, **common)
        else:
            wrapped = layers.GradSampleModule(model, force_functorch=mode == "functorch")
            optimizer = optimizers.DPOptimizer(inner, **common)

        def step(x: Tensor, y: Tensor) -> None:
            losses = work.losses(wrapped(x), y)
            if mode == "ghost":
                utils.DPTensorFastGradientClipping(wrapped, optimizer, losses, "mean").backward()
            else:
                losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


CONTENDERS: dict[str, Contender] = {
    "non-private": Contender(nonprivate, "none"),
    "non-private compiled": Contender(nonprivate, "none", compiled, patience=5.0, resident=False),
    "fastdp": Contender(ours()),
    "fastdp global": Contender(ours(clipping="global"), "global"),
    "fastdp automatic": Contender(ours(clipping="automatic"), "automatic"),
    "fastdp layerwise": Contender(ours(style="layerwise"), "layerwise"),
    "fastdp graphed": Contender(graphed, patience=8.0, resident=False),
    **{f"opacus {mode}": Contender(opacus(mode), "local", validated) for mode in ("hooks", "functorch", "ew", "ghost")},
    "fastdp loop": Contender(ours(graphed=True), patience=8.0, resident=False),
    "fastdp graphed compiled": Contender(
        functools.partial(graphed, compile=True), patience=8.0, resident=False, named=True
    ),
    **{f"compat {mode}": Contender(opacus(mode, "fastdp.compat.opacus"), named=True) for mode in ("hooks", "ghost")},
}
DEFAULT = tuple(name for name, contender in CONTENDERS.items() if not contender.named)
