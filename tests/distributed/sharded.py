"""What two and three processes do with a model that fully_shard has cut."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fastdp

from .cases import UNEQUAL
from .models import compare, single, whole


def sharded(model: nn.Module, mesh: Any = None, blocks: bool = True, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),)) if mesh is None else mesh
    for block in model.blocks if blocks else ():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def exact(rank: int, world: int, shard: Any = None, unequal: bool = False, **options: Any) -> Any:
    sizes = [row[:world] for row in UNEQUAL] if unequal else None
    return compare(rank, world, sizes=sizes, wrap=functools.partial(sharded, **(shard or {})), **options)


def case(shard: Any = None, **options: Any) -> Any:
    return functools.partial(exact, shard=shard, **options)


EXACT: dict[str, Any] = {
    "gathered again in the backward": case(dict(reshard_after_forward=True)),
    "kept for the backward": case(dict(reshard_after_forward=False)),
    "noise": case(sigma=1.0),
    "unequal and empty": case(unequal=True, sigma=1.0),
    "tied": case(kind="tied"),
    "lora": case(kind="lora"),
    "frozen": case(kind="frozen"),
    "checkpointed": case(kind="checkpointed"),
    "accumulation": case(accumulate=2, unequal=True),
    "layerwise": case(style="layerwise", unequal=True),
}


def same_noise(rank: int, world: int) -> None:
    """Sums of whole numbers are the same bits in any order: so are the weights, noise and all, to the last bit."""
    for place, kind, shape in (
        (0, "SGD", (31, 40)),
        (0, "AdamW", (31, 40)),
        (1, "SGD", (31, 12 * world)),
        (0, "SGD", (1, 5)),
    ):
        several, one = nn.Linear(shape[1], shape[0]), nn.Linear(shape[1], shape[0])
        for parameter in (*several.parameters(), *one.parameters()):
            nn.init.zeros_(parameter)
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(several, mesh=mesh, shard_placement_fn=lambda p, d=place: Shard(d) if p.dim() == 2 else None)
        options = dict(lr=0.5, noise_multiplier=0.7, max_grad_norm=1e6, expected_batch_size=8, loss_reduction="sum",
                       seed=3)  # fmt: skip
        make = getattr(fastdp, f"DP{kind}")
        optimizer = make(several, **options)
        with single():
            truth = make(one, **options)
        for step in range(3):
            data = torch.randint(-3, 4, (4 * world, shape[1]), generator=torch.Generator().manual_seed(step)).float()
            several(data[rank::world]).sum().backward()
            optimizer.step()
            with single():
                one(data).sum().backward()
                truth.step()
            for p, q in zip(several.parameters(), one.parameters(), strict=True):
                assert torch.equal(whole(p), q), (place, kind)
        optimizer.detach()


OTHERS: dict[str, Any] = {function.__name__: function for function in (same_noise,)}
CASES = {**EXACT, **OTHERS}
