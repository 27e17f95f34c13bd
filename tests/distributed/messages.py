"""How many collectives, and bytes, a private step sends, against an ordinary one of the same model, laid as it is."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastdp
from fastdp.distributed import scatter
from fastdp.distributed.private_names import collectives_so_far, groups_here

from .models import adamw, batch, build, loss_of
from .sharded import sharded

SAMPLES, BYTES = 3, 1024  # of a rank; that a private step may send more, for each sample
READS = {f"aten::{name}" for name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")}
WITH_SUMS = (
    "optim/distributed_step.py",
    "distributed/reduce.py",
    "distributed/scatter.py",
    "optim/private_step.py",
    "optim/tensor_parallel_sums.py",
)


class Sent(TorchDispatchMode):
    """The collectives within it, by kind and bytes, and where fastdp reads numbers of a tensor."""

    def __enter__(self) -> Sent:
        self.bytes, self.kinds, self.reads = 0, Counter[str](), Counter[str]()
        self._before = _so_far()
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self.kinds[name.removeprefix("c10d::").strip("_")] += 1
            self.bytes += sum(t.nbytes for t in tree_leaves(args[:1]) if isinstance(t, torch.Tensor))
        elif name in READS:
            caller: Any = sys._getframe()
            while caller is not None and "/fastdp/" not in caller.f_code.co_filename:
                caller = caller.f_back
            self.reads["" if caller is None else caller.f_code.co_filename.rpartition("/fastdp/")[2]] += 1
        return func(*args, **(kwargs or {}))

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.collectives = _so_far() - self._before


def _so_far() -> int:
    """By the groups' own count, which sees what passes by the dispatcher, too."""
    return sum(collectives_so_far(group) or 0 for group in groups_here().values())


def sent_by(rank: int, wrap: Any, kind: str, private: bool, **options: Any) -> Sent:
    """By the third step, and its forward and backward."""
    plain = build(kind)
    plain.unused = None  # of which DistributedDataParallel would ask to be told
    model = wrap(plain)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = adamw(model, **options) if private else torch.optim.AdamW(trained)
    for step in range(3):
        sent = Sent()
        with sent:
            loss_of(model, batch(10 * step + rank, SAMPLES)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if private:
        optimizer.detach()
    assert sum(sent.kinds.values()) == sent.collectives, (sent.kinds, sent.collectives)
    return sent


def check(rank: int, world: int, more: int, wrap: Any, kind: str = "", **options: Any) -> None:
    """more: collectives beyond an ordinary step's."""
    ordinary, private = (sent_by(rank, wrap, kind, which, **options) for which in (False, True))
    found, allowed = private.collectives, ordinary.collectives + more
    assert found <= allowed, f"{found} collectives, not {allowed}: {private.kinds}, {ordinary.kinds}"
    assert private.bytes <= ordinary.bytes + BYTES * SAMPLES * world, (private.bytes, ordinary.bytes)
    assert not set(private.reads) & set(WITH_SUMS), private.reads


ADAPTIVE: dict[str, Any] = {"clipping": "adaptive", "count_noise": 1.0}


def messages(rank: int, world: int) -> None:
    """One more: what the processes agree on."""
    check(rank, world, 1, DistributedDataParallel)
    check(rank, world, 1, DistributedDataParallel, **ADAPTIVE)


def messages_of_parts(rank: int, world: int) -> None:
    """Two agreements, before the sums and before the update; groups whose sums share a collective save one and more
    (see `scatter.ends`: but where blocks above a bucket come before all that is larger or small)."""
    check(rank, world, 1, sharded)
    check(rank, world, 1, sharded, "lora")
    check(rank, world, 1, sharded, **ADAPTIVE)
    check(rank, world, 1, functools.partial(sharded, mesh="replicated"))
    check(rank, world, 2, functools.partial(sharded, blocks=False))
    bucket = scatter.BUCKET
    try:
        scatter.BUCKET = 1000  # bytes: less than any group's sums
        check(rank, world, 2, sharded)
    finally:
        scatter.BUCKET = bucket


def on_two_meshes(model: nn.Module, world: int) -> nn.Module:
    """Some in as many parts as ranks, others whole on each."""
    fully_shard(model[0], mesh=init_device_mesh("cpu", (world,)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("copies", "parts")))


def drop_and_count_parts(rank: int, world: int) -> None:
    """Samples that are not finite are counted once, on all ranks alike, whoever holds what."""
    sizes, names = ((world,), (world, 1), (1, world)), ("copies", "parts")
    meshes = [init_device_mesh("cpu", size, mesh_dim_names=names[-len(size) :]) for size in sizes]
    ways = [functools.partial(fully_shard, mesh=mesh) for mesh in meshes]
    for wrap in (*ways, functools.partial(on_two_meshes, world=world), lambda model: model):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
        optimizer = fastdp.DPSGD(
            model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4, sample_rate=0.1
        )
        for step in range(1, 3):
            for spoilt in (rank, 1):  # two backwards, of which the first has none on the first rank
                x = torch.ones(3, 3)
                x[:spoilt, 0] = float("inf")
                model(x).sum(1).mean().backward()
            optimizer.step()
            assert optimizer.nonfinite_samples == step * (sum(range(world)) + world)
        optimizer.detach()


CASES = {case.__name__: case for case in (messages, messages_of_parts, drop_and_count_parts)}
