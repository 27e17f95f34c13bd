"""A rank that leaves a forward, a backward or its data by an error, and lives on: what the others do."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import fastdp
from fastdp.distributed import failure_signal
from fastdp.errors import SampleMixingError, StepError

from .models import adamw, batch, build, loss_of, whole
from .sharded import sharded
from .tensor_errors import tokens
from .tensor_models import build as tensor_build
from .tensor_models import split

failure_signal.PATIENCE = 1.0


_NUMBERS = itertools.count()


def own_mesh() -> DeviceMesh:
    """Of all ranks, by a process group of its own, which may be closed: the cases after this one need the others. And
    by a name of its own, as DTensors take meshes of equal names and shapes for one."""
    return DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(f"parts{next(_NUMBERS)}",))


def bad(*_: object) -> None:
    raise ValueError("a bad record")


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        bad()


def local(parameters: list[Any]) -> list[Tensor]:
    return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in parameters]


def stopped(
    rank: int, world: int, run: Callable[[nn.Module, bool], Any], model: nn.Module | None = None,
    here: Any = (ValueError, "a bad record"), there: Any = (StepError, "rank [0-9] .*a bad record"),
) -> None:  # fmt: skip
    """The last rank does what raises an error, and catches it. All ranks raise one within seconds, and none steps."""
    model = sharded(build(), own_mesh(), reshard_after_forward=True) if model is None else model
    optimizer, parts = adamw(model), list(model.parameters())  # whole ones stand in the model after a failed forward
    run(model, False)
    optimizer.step()
    before = local(parts)
    begun = time.monotonic()
    kind, words = here if rank == world - 1 else there
    try:
        with pytest.raises(kind, match=words):
            run(model, rank == world - 1)
            optimizer.step()
        assert time.monotonic() - begun < 10
        for again in (lambda: run(model, False), optimizer.step):  # a retry would meet gathers of other layers
            with pytest.raises(RuntimeError):
                again()
        assert optimizer.history == [(1.0, 0.1, 1)]
        assert all(torch.equal(p, q) for p, q in zip(local(parts), before, strict=True))
    finally:
        optimizer.detach()


def trains(given: Tensor) -> Callable[[nn.Module, bool], None]:
    def run(model: nn.Module, fails: bool) -> None:
        handle = model.blocks[1].register_forward_pre_hook(bad) if fails else None
        try:
            loss_of(model, given).backward()
        finally:
            if handle is not None:
                handle.remove()

    return run


def in_a_forward(rank: int, world: int) -> None:
    stopped(rank, world, trains(batch(rank, 3)))


def in_the_middle_of_a_backward(rank: int, world: int) -> None:
    def run(model: nn.Module, fails: bool) -> None:
        hook = lambda m, a, out: BadBackward.apply(out)
        handle = model.blocks[0].register_forward_hook(hook) if fails else None
        loss_of(model, batch(rank, 3)).backward()
        if handle is not None:
            handle.remove()

    stopped(rank, world, run)


def uncaught_of_copies(rank: int, world: int) -> None:
    model = DistributedDataParallel(build())
    optimizer = adamw(model)
    loss = loss_of(model, batch(rank, 3))
    if rank == world - 1:
        sys.excepthook(ValueError, ValueError("a bad record"), None)
    else:
        loss.backward()
        with pytest.raises(StepError, match="refused.*a bad record"):
            optimizer.step()
    optimizer.detach()


class Broken(torch.utils.data.Dataset):
    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> Tensor:
        if self.bad:
            raise ValueError("a bad record")
        return batch(place, 1)[0]


def in_the_data(rank: int, world: int) -> None:
    model = sharded(build(), own_mesh(), reshard_after_forward=True)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    loader = fastdp.poisson_loader(Broken(False), expected_batch_size=10)
    loader.dataset.bad = rank == world - 1
    with pytest.raises(ValueError if rank == world - 1 else StepError, match="a bad record"):
        for given in loader:
            loss_of(model, given).backward()
    assert not optimizer.history
    optimizer.detach()


def of_split_layers(rank: int, world: int) -> None:
    def run(model: nn.Module, fails: bool) -> None:
        handle = model.blocks[1].register_forward_pre_hook(bad) if fails else None
        try:
            loss_of(model, tokens()).backward()
        finally:
            if handle is not None:
                handle.remove()

    there = RuntimeError, "rank [0-9] .*a bad record"
    stopped(rank, world, run, split(tensor_build(), own_mesh()), there=there)


def in_a_loss_of_split_layers(rank: int, world: int) -> None:
    """Refused before its backward, where the others add up norms at the end of theirs."""

    def run(model: nn.Module, fails: bool) -> None:
        losses = model(tokens()).square().sum((1, 2))
        (losses.outer(losses) if fails else losses).mean().backward()

    here, there = (SampleMixingError, "outer"), (SampleMixingError, "rank [0-9] .*outer")
    stopped(rank, world, run, split(tensor_build(), own_mesh()), here, there)


def by_all(rank: int, world: int) -> None:
    """All ranks fail at the same place, and catch it: nobody waits, and training goes on as if nothing had been."""
    found = []
    for fails in (False, True):
        model = sharded(build(), own_mesh(), reshard_after_forward=True)
        optimizer = adamw(model, seed=0)
        for step in range(3):
            for _ in range(2 if fails and step else 0):
                with pytest.raises(ValueError, match="a bad record"):
                    trains(batch(rank, 3))(model, True)
            trains(batch(10 * step + rank, 3))(model, False)
            optimizer.step()
        found.append([whole(p).clone() for p in model.parameters()])
        optimizer.detach()
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


CASES: dict[str, Any] = {
    function.__name__: function
    for function in (
        in_a_forward, in_the_middle_of_a_backward,
        uncaught_of_copies, in_the_data, of_split_layers, in_a_loss_of_split_layers, by_all,
    )
}  # fmt: skip
