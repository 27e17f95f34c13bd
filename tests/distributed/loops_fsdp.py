"""Accelerate and Trainer lay a model in parts (FSDP2): the steps of one process, by two."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F

from ..by_hand import network, records
from .fsdp_on_cpu import allow
from .parts import Found, accelerator, found, loader, sgd


def plugin(world: int, **options: Any) -> dict[str, Any]:
    """For one process there is none."""
    if world == 1:
        return {}
    from accelerate.utils import FullyShardedDataParallelPlugin

    allow()
    given = {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 10, **options}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**given)}


def accelerated_parts(rank: int, world: int) -> Found:
    """`prepare` lays the model in parts once the optimizer was made; every batch makes a forward."""
    prepared = accelerator(rank, step_scheduler_with_optimizer=False, **plugin(world))
    plain = network()
    with torch.no_grad():
        plain(records()[:2][0])
    private, batches = sgd(plain), loader()
    schedule = torch.optim.lr_scheduler.StepLR(private, 2, 0.5)
    wholes = [weakref.ref(p) for p in plain.parameters()]
    model, optimizer, schedule = prepared.prepare(plain, private, schedule)
    gc.collect()
    assert all(p() is None for p in wholes) == (world > 1)  # nothing holds the whole model beside its parts
    for _ in range(2):
        for x, y in batches:
            with prepared.accumulate(model):
                if len(x) or world > 1:
                    prepared.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                if private.stepped:
                    schedule.step()
                optimizer.zero_grad()
    assert (private._privacy.replica.shards is not None) == (world > 1) and private._privacy.waits is None
    result = found(model, private.history, private.epsilon(1e-3))
    private.detach()
    return result


CASES: dict[str, Any] = {case.__name__: case for case in (accelerated_parts,)}
