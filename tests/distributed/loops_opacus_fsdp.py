"""Mode "ghost_fsdp" on two processes; in a group of one process the same cases run mode "ghost" on the whole model."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fastdp.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from fastdp.compat.opacus.utils.fsdp_utils import FSDP2Wrapper

from ..by_hand import EXPECTED, network, records
from .loops_opacus_fsdp_errors import CASES as ERRORS
from .loops_opacus_fsdp_errors import private
from .models import whole
from .parts import found, shared_folder


def laid(model: nn.Module, world: int) -> Any:
    """(the model, in parts if there are several processes, the mode)."""
    return (FSDP2Wrapper(model), "ghost_fsdp") if world > 1 else (model, "ghost")


def epoch(module: nn.Module, optimizer: Any, criterion: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        criterion(module(x), y.long()).backward()
        optimizer.step()


def trains(rank: int, world: int, physical: int | None = None, **options: Any) -> Any:
    """Poisson batches, shared out: what must be equal whatever the number of processes."""
    model, mode = laid(network(), world)
    engine, module, optimizer, criterion, loader = private(model, mode, **options)
    assert optimizer.expected_batch_size == EXPECTED / world
    for _ in range(2):
        if physical is None:
            epoch(module, optimizer, criterion, loader)
            continue
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as parts:
            epoch(module, optimizer, criterion, parts)
    result = found(model, engine.accountant.history, engine.get_epsilon(1e-3))
    module.cleanup()
    return result


# ---------------------------------------------------------------------- forms of models, on two processes


def _losses(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).transpose(1, 2), tokens.roll(-1, 1), reduction="none").mean(1)


def nested(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block.mlp)
        fully_shard(block)
    fully_shard(model)
    return model


# ---------------------------------------------------------------------- noise, states, adaptive clipping


def steps(rank: int, world: int, model: nn.Module, mode: str, count: int = 3, after: Any = None, **options: Any) -> Any:
    """Steps on fixed batches, of which this process has its part; (engine, module, optimizer)."""
    engine, module, optimizer, criterion, _ = private(model, mode, poisson_sampling=False, **options)
    for number in range(count):
        step(rank, world, module, optimizer, criterion, number)
        if after is not None:
            after(module, optimizer)
    return engine, module, optimizer


def step(rank: int, world: int, module: nn.Module, optimizer: Any, criterion: Any, number: int) -> None:
    x, y = records()[10 * number + rank : 10 * number + 10 : world]
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    optimizer.step()


def opacus_fsdp_resumed(rank: int, world: int) -> None:
    """From a checkpoint of every process, also into a model that holds what its last forward gathered."""
    folder = shared_folder(world)
    model = FSDP2Wrapper(network(), reshard_after_forward=False)
    options: dict[str, Any] = {"noise_multiplier": 0.0, "poisson_sampling": False}
    engine, module, optimizer, criterion, _ = private(model, **options)
    for number in range(2):
        step(rank, world, module, optimizer, criterion, number)
    engine.save_checkpoint(path=folder / f"{rank}.pt", module=module, optimizer=optimizer)
    again, other, taken, criterion_again, _ = private(FSDP2Wrapper(network(3), reshard_after_forward=False), **options)
    with torch.no_grad():
        other(records()[:3][0])
    again.load_checkpoint(path=folder / f"{rank}.pt", module=other, optimizer=taken)
    step(rank, world, module, optimizer, criterion, 2)
    step(rank, world, other, taken, criterion_again, 2)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))
    assert engine.accountant.history == again.accountant.history == [(0.0, 0.25, 3)]
    assert module.to_standard_module() is model
    F.cross_entropy(model(records()[:4][0]), records()[:4][1]).backward()  # fully_shard sums by itself again
    assert all(p.grad is not None for p in model.parameters())


CASES: dict[str, Any] = {
    "opacus, ghost_fsdp, parts": functools.partial(trains, physical=2),
    "opacus, ghost_fsdp, sum": functools.partial(
        trains, loss_reduction="sum", criterion=nn.CrossEntropyLoss(reduction="sum")
    ),
    "opacus_fsdp_resumed": opacus_fsdp_resumed,
    **ERRORS,
}
warnings.filterwarnings("ignore")
