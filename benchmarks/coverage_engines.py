"""The engines compared: each makes one step of SGD without noise, clipping norm 1, expected batch size B."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .coverage_parts import Net
from .coverage_truth import Engine, Losses


class Contender(NamedTuple):
    step: Engine
    package: str  # whose own exceptions are refusals
    repair: Callable[[nn.Module], nn.Module]  # by its own means: batch norms to norms of a sample alone


def _private(model: nn.Module, batch: dict[str, Any], rate: float, size: int) -> Any:
    import fastdp

    options = {"batch_size": size} if _rows(batch) != size else {}  # several rows of each sample: only the user knows
    return fastdp.DPSGD(model, lr=rate, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=size, **options)


def fastdp_step(model: nn.Module, batch: dict[str, Any], losses: Losses, rate: float, size: int) -> None:
    optimizer = _private(model, batch, rate, size)
    losses(model, batch).mean().backward()
    optimizer.step()
    optimizer.detach()


def graphed_step(model: nn.Module, batch: dict[str, Any], losses: Losses, rate: float, size: int) -> None:
    """Recorded on the samples in another order, replayed on the batch."""
    import fastdp

    optimizer = _private(model, batch, rate, size)
    step = optimizer.graphed(losses, (_in_another_order(batch, size),))
    step(batch)
    if step.eager:
        raise fastdp.errors.GraphError(f"not replayed: {', '.join(step.reasons)}")
    optimizer.detach()


def loop_step(model: nn.Module, batch: dict[str, Any], losses: Losses, rate: float, size: int) -> None:
    """In a plain loop, after three batches with the samples in another order and a learning rate of 0."""
    import fastdp

    settings = dict(noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=size, graphed=True)
    optimizer = fastdp.DPSGD(model, lr=0.0, **settings)
    other = _in_another_order(batch, size)
    for number in range(4):
        optimizer.param_groups[0]["lr"] = rate if number == 3 else 0.0
        losses(model, batch if number == 3 else other).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    told = optimizer.explain().partition("replayed: ")[2]
    if told.startswith(("0 ", "1 ")):
        raise fastdp.errors.GraphError(f"not replayed: {told}")
    optimizer.detach()


def _in_another_order(batch: dict[str, Any], size: int) -> dict[str, Any]:
    return {name: value.roll(1, 0) if isinstance(value, Tensor) and value.dim() and len(value) == size else value
            for name, value in batch.items()}  # fmt: skip


def fastdp_repair(model: nn.Module) -> nn.Module:
    import fastdp

    return fastdp.make_compatible(model).model


class Criterion(nn.Module):
    """For `PrivacyEngine`: a loss for each sample, of the batch instead of (output, target)."""

    reduction = "mean"  # Opacus sets it to "none" while it calls

    def __init__(self, losses: Losses) -> None:
        super().__init__()
        self.losses = losses

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found = self.losses(model, batch)
        return found if self.reduction == "none" else found.mean()


def _rows(batch: dict[str, Any]) -> int:
    """Rows of the model's first input."""
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())


def opacus_step(mode: str) -> Engine:
    """By `PrivacyEngine.make_private`, with a loader of one batch."""

    def step(model: nn.Module, batch: dict[str, Any], losses: Losses, rate: float, size: int) -> None:
        from opacus import PrivacyEngine

        warnings.filterwarnings("ignore")
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
        data = torch.utils.data.TensorDataset(torch.zeros(size, 1))
        criterion = Criterion(losses)
        wrapped, optimizer, *more = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=inner,
            criterion=criterion,
            data_loader=torch.utils.data.DataLoader(data, batch_size=size),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )
        criterion = more[0] if mode == "ghost" else criterion
        criterion(wrapped, batch).backward()
        optimizer.step()

    return step


def opacus_repair(model: nn.Module) -> nn.Module:
    from opacus.validators import ModuleValidator

    if isinstance(model, Net):  # it is copied by pickling, which a forward given as a function cannot be
        for name, part in model.named_children():
            setattr(model, name, ModuleValidator.fix(part).train())
        return model
    return ModuleValidator.fix(model).train()


def one_by_one(model: nn.Module, batch: dict[str, Any], losses: Losses, rate: float, size: int) -> None:
    """Plain autograd on one sample at a time: what the benchmark must find exact wherever samples are independent."""
    from .coverage_truth import clipped_mean, gradient, size_of, take, trainable

    rows = [gradient(model, take(batch, [i], size), losses) for i in range(size)]
    update = clipped_mean(rows, [min(1.0, 1 / size_of(g)) for g in rows])
    with torch.no_grad():
        for name, p in trainable(model).items():
            p -= (rate * update[name]).to(p.dtype)


ENGINES: dict[str, Contender] = {
    "fastdp": Contender(fastdp_step, "fastdp", fastdp_repair),
    "fastdp-graphed": Contender(graphed_step, "fastdp", fastdp_repair),
    "fastdp-loop": Contender(loop_step, "fastdp", fastdp_repair),
    "opacus-hooks": Contender(opacus_step("hooks"), "opacus", opacus_repair),
    "opacus-functorch": Contender(opacus_step("functorch"), "opacus", opacus_repair),
    "opacus-ghost": Contender(opacus_step("ghost"), "opacus", opacus_repair),
    "one-by-one": Contender(one_by_one, "benchmarks", fastdp_repair),
}
