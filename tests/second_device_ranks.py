"""A step of several processes must not make the host wait for its device. The other processes are not there: what they
say is what this one does, and their part of a sum is nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastdp
from fastdp.batch_axis.deferred_checks import DeferredCheck
from fastdp.distributed import world
from fastdp.optim.clipped_sums import Sums
from fastdp.optim.distributed_step import reduce_sums

from .second_device_syncs import waits_of

RANKS = 2


class _Stream(torch.Stream):
    """All of the device's are one."""

    def __new__(cls, *given: Any, **options: Any) -> Any:
        return super().__new__(cls, stream_id=0, device_index=0, device_type=20)

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or torch.get_device_module("stub").Event()


@contextlib.contextmanager
def _one_of_many() -> Iterator[None]:
    """A process group of which this is the only process, and what fully_shard needs of a device."""
    import torch.distributed.fsdp._fully_shard._fsdp_param as parts

    functions = torch.get_device_module("stub")
    event = type("Event", (functions.Event,), {"wait": lambda self, stream=None: None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "_control", lambda: dist.group.WORLD)
        patch.setattr(world.Ranks, "_gather", lambda self, message: [message] * RANKS)
        patch.setattr(world.Ranks, "from_first", lambda self, secret: secret)
        for name in ("free_storage", "alloc_storage"):
            patch.setattr(parts, name, lambda tensor: None)
        needed = {
            "is_initialized": lambda: True, "set_device": lambda device: None, "Stream": _Stream, "Event": event,
            "stream": lambda stream: contextlib.nullcontext(), "current_stream": lambda device=None: _Stream(),
        }  # fmt: skip
        for name, function in needed.items():
            patch.setattr(functions, name, function, raising=False)
        dist.Backend.register_backend("stub", lambda *given: None, devices=["stub"])
        dist.init_process_group("cpu:fake,stub:fake", rank=0, world_size=RANKS, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def _waits(in_parts: bool, **options: Any) -> int:
    """Of the third step. options: of the private optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to("stub:0")
    if in_parts:
        mesh = init_device_mesh("stub", (RANKS,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4, **options}
    optimizer, x = fastdp.DPAdamW(model, lr=0.1, **given), torch.randn(4, 4).to("stub:0")

    def step(which: Any) -> None:
        which(x).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = waits_of(model, step, "stub")
    assert optimizer.nonfinite_samples == 0
    optimizer.detach()
    return sum(found.values())


def check_ranks() -> None:
    """None at all; one with adaptive clipping, whose next clipping norm follows a count."""
    with _one_of_many():
        for in_parts in (False, True):
            assert _waits(in_parts) == 0
            assert _waits(in_parts, clipping="adaptive", count_noise=1.0) == 1
        _check_withheld()


class _Doubtful(Sums):
    """Sums of which a device knows whether processes have the same."""

    def __init__(self, differ: bool) -> None:
        self.check = DeferredCheck(torch.tensor(differ).to("stub:0"), "", "other sums")

    def settled(self, sums: Any) -> Any:
        return sums, [self.check]


class _Equal:
    """A world whose processes have nothing to add."""

    speaks = False
    agree = staticmethod(lambda said, records: records)
    sums = staticmethod(lambda reduction, group: reduction.run(group))


def _check_withheld() -> None:
    """Sums that are refused a step later are nothing in this one."""
    for differ in (False, True):
        held, later, world = _Doubtful(differ), list[DeferredCheck](), _Equal()
        found, *_ = reduce_sums(world, held, {0: torch.ones(3).to("stub:0")}, 0, 4, {}, later.extend)  # type: ignore
        assert bool(found[0].cpu().any()) is not differ
        assert later == [held.check]
