"""Opacus's names on one process or two, in a group of that size."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fastdp.compat.opacus import PrivacyEngine
from fastdp.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from fastdp.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from fastdp.errors import StepError

from ..by_hand import EXPECTED, R, network, records
from .parts import found


def _private(model: nn.Module, seed: int = 4, secure: bool = False, **options: Any) -> Any:
    """The loader's batch is that of all processes."""
    engine = PrivacyEngine(accountant="rdp", secure_mode=secure)
    generator = None if secure else torch.Generator().manual_seed(seed)
    batches = DataLoader(records(), batch_size=EXPECTED, generator=torch.Generator().manual_seed(seed))
    given = {"noise_multiplier": 1.0, "max_grad_norm": R, "noise_generator": generator, **options}
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=batches, **given
    )  # fmt: skip
    return engine, *made


def _trains(rank: int, world: int, physical: int | None = None, **options: Any) -> Any:
    torch.manual_seed(rank)
    plain = network()
    if rank:
        nn.init.zeros_(plain[0].weight)  # the copies begin with the weights of process 0
    engine, model, optimizer, *criterion, loader = _private(DPDDP(plain), **options)
    assert optimizer.expected_batch_size == EXPECTED / world
    for _ in range(2):
        if physical is None:
            _epoch(model, optimizer, loader, *criterion)
        else:
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as parts:
                _epoch(model, optimizer, parts, *criterion)
    result = found(plain, engine.accountant.history, engine.get_epsilon(1e-3))
    model.cleanup()
    return result


def _epoch(model: nn.Module, optimizer: Any, loader: Any, criterion: Any = F.cross_entropy) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y.long()).backward()
        optimizer.step()


def opacus_refused(rank: int, world: int) -> None:
    with pytest.raises(NotImplementedError, match="DistributedDataParallel is not supported by make_private"):
        _private(DistributedDataParallel(network()))
    with pytest.raises((NotImplementedError, ValueError), match="ghost_fsdp"):
        _private(DPDDP(network()), grad_sample_mode="ghost_fsdp")
    for match, options in (("noise_multiplier", {"noise_multiplier": 1.0 + rank}), ("weights", {})):
        plain = network()
        engine, model, optimizer, loader = _private(DPDDP(plain), **options)
        if rank and not options:
            nn.init.zeros_(plain[0].weight)
        with pytest.raises(StepError, match=match):
            _epoch(model, optimizer, loader)
        assert not engine.accountant.history
        model.cleanup()
    engine, model, optimizer, loader = _private(DPDDP(network()))
    with pytest.raises(StepError, match="collective"):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if number == 1 and rank:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(type(optimizer._processes()), "communicated", lambda self: True)
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
    assert len(engine.accountant) == 1
    model.cleanup()


CASES = {
    "opacus": _trains,
    "opacus, per layer": functools.partial(_trains, clipping="per_layer", max_grad_norm=[0.2] * 4),
    "opacus, parts": functools.partial(_trains, physical=2),
    "opacus_refused": opacus_refused,
}
warnings.filterwarnings("ignore")
