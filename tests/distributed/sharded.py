"""What two and three processes do with a model that fully_shard has cut."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fastdp

from .cases import UNEQUAL, in_turns
from .loading import correlated, persons, records
from .models import adamw, batch, build, compare, loss_of, single, whole


def sharded(model: nn.Module, mesh: Any = "", blocks: bool = True, ignored: bool = False, dim: int = 0,
            policies: Any = None, **options: Any) -> nn.Module:  # fmt: skip
    """mesh: "replicated": as many copies as ranks, each in one part; "copies": one copy in parts, by HSDP's mesh.
    policies: of mixed precision, the blocks' and the model's."""
    world = dist.get_world_size()
    sizes = {"": (world,), "replicated": (world, 1), "copies": (1, world), "both": (2, world // 2)}
    if isinstance(mesh, str):
        size = sizes[mesh]
        mesh = init_device_mesh("cpu", size, mesh_dim_names=("copies", "parts")[-len(size) :])
    options["mesh"] = mesh
    if dim:
        even = lambda p: p.dim() > dim and p.size(dim) % world == 0
        options["shard_placement_fn"] = lambda p: Shard(dim) if even(p) else None
    if ignored:
        options["ignored_params"] = {model.head.weight, model.places}
    of_blocks, outer = ({"mp_policy": policy} for policy in policies) if policies else ({}, {})
    for block in model.blocks if blocks else ():
        fully_shard(block, **options, **of_blocks)
    return fully_shard(model, **options, **outer)


def exact(rank: int, world: int, shard: Any = None, unequal: bool = False, **options: Any) -> Any:
    sizes = [row[:world] for row in UNEQUAL] if unequal else None
    return compare(rank, world, sizes=sizes, wrap=functools.partial(sharded, **(shard or {})), **options)


def compiled(model: nn.Module) -> nn.Module:
    """Blocks that were compiled before they are cut."""
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend="aot_eager")
    return sharded(model)


def nested(model: nn.Module) -> nn.Module:
    """Groups within groups, one of several modules, blocks under checkpointing's wrapper, and prefetching."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for place, block in enumerate(model.blocks):
        fully_shard(block.mlp, mesh=mesh)
        model.blocks[place] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return model


def in_nests(rank: int, world: int, **options: Any) -> Any:
    return compare(rank, world, wrap=nested, sizes=[row[:world] for row in UNEQUAL], **options)


def tied_apart(model: nn.Module) -> nn.Module:
    """Embedding and head, whose weight is one, in a group of their own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard([model.words, model.head], mesh=mesh)
    return sharded(model, mesh)


def switched(model: Any, quiet: bool) -> Any:
    model.set_requires_gradient_sync(not quiet)
    return contextlib.nullcontext()


def compiled_whole(rank: int, world: int) -> Any:
    """torch.compile of the model once it was cut: it runs as it is."""
    whole_of = lambda model: torch.compile(sharded(model), backend="aot_eager")
    return compare(rank, world, wrap=whole_of, steps=2, sizes=[row[:world] for row in UNEQUAL], sigma=1.0)


def case(shard: Any = None, **options: Any) -> Any:
    return functools.partial(exact, shard=shard, **options)


def halves() -> list[dict[str, Any]]:
    """Two clipping groups, each of every second parameter."""
    names = [name for name, _ in build().named_parameters()]
    return [{"params": names[::2], "max_grad_norm": 0.3}, {"params": names[1::2], "max_grad_norm": 0.4}]


EXACT: dict[str, Any] = {
    "adaptive": functools.partial(exact, unequal=True, clipping="adaptive", sigma=1.0, count_noise=1.0),
    "gathered again in the backward": case(dict(reshard_after_forward=True)),
    "kept for the backward": case(dict(reshard_after_forward=False)),
    "noise": case(sigma=1.0),
    "unequal and empty": case(unequal=True, sigma=1.0),
    "tied": case(kind="tied"),
    "tied, in a group of their own": functools.partial(compare, kind="tied", wrap=tied_apart),
    "lora": case(kind="lora"),
    "lora, frozen in 16 bits": case(kind="lora half"),
    "augmentations": case(rows_per_sample=2, unequal=True),
    "set_requires_gradient_sync": functools.partial(in_turns, wrap=sharded, quiet=switched),
    "frozen": case(kind="frozen"),
    "checkpointed": case(kind="checkpointed"),
    "accumulation": case(accumulate=2, unequal=True),
    "layerwise": case(style="layerwise", unequal=True),
    "groups": case(style=halves()),
    "global": case(clipping="global", norm=1.75),
    "automatic": case(clipping="automatic"),
    "a function": case(clipping=lambda n: 0.4 / (n + 0.1)),
    "sum": case(loss_reduction="sum", unequal=True),
    "budget": case(kind="checkpointed", memory_budget=1, unequal=True, sigma=1.0),
    "budget, kept": case(dict(reshard_after_forward=False), kind="checkpointed", memory_budget=1),
    "derived": case(kind="derived", unequal=True),
    "derived, checkpointed": case(kind="derived checkpointed"),
    "derived, in regions of several blocks": case(kind="derived spanned", unequal=True),
    "a bias that all blocks use": case(kind="biased", unequal=True, sigma=1.0),
    "a bias in a dataclass": case(kind="biased dataclass"),
    "fused head": case(kind="fused"),
    "reentrant": case(kind="reentrant", unequal=True),
    "replicated": case(dict(mesh="replicated"), unequal=True, sigma=1.0),
    "replicated, parts of one": case(dict(mesh="copies"), unequal=True, sigma=1.0),
    "compiled": functools.partial(compare, wrap=compiled, steps=2),
    "compiled as a whole": compiled_whole,
    "nested": in_nests,
    "nested, derived": functools.partial(in_nests, kind="derived"),
    "nested, budget": functools.partial(in_nests, memory_budget=1),
    "one group": case(dict(blocks=False)),
    "a parameter left out": case(dict(ignored=True), unequal=True, sigma=1.0),
    "along the second dimension": case(dict(dim=1), sigma=1.0),
    "a layer that only some ranks use": case(extra=lambda rank: rank == 0),
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


_ALONE: list[Any] = []  # the mesh of this rank alone


def alone() -> Any:
    """A mesh of this rank alone; all ranks must come here."""
    if not _ALONE:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _ALONE.append(DeviceMesh.from_group(groups[dist.get_rank()], "cpu"))
    return _ALONE[0]


def mixed_precision(rank: int, world: int) -> None:
    """16-bit weights in forwards: sums and updates stay float32, and are those of one process within float32's
    rounding, where `reduce_dtype` would round them to 16 bits."""
    half = torch.bfloat16
    shared = dict(noise_multiplier=0.0, eps=1e-3, loss_reduction="sum")  # no mean, which 16 bits would round
    in_whole = MixedPrecisionPolicy(half, output_dtype=torch.float32)
    for of_blocks, outer, joint in (
        (MixedPrecisionPolicy(half, half), MixedPrecisionPolicy(half, half), True),
        (MixedPrecisionPolicy(half, output_dtype=half, cast_forward_inputs=False), in_whole, False),
        (in_whole, MixedPrecisionPolicy(output_dtype=half), False),
    ):
        _by_policy(rank, world, functools.partial(sharded, policies=(of_blocks, outer)), joint, **shared)


def _by_policy(rank: int, world: int, wrap: Any, joint: bool, **shared: Any) -> None:
    """joint: the one process takes one batch; else the ranks' one by one, as 16-bit products round by its size."""
    several = wrap(build())
    with single():
        one = wrap(build(), alone())
    optimizer = adamw(several, **shared)
    with single():
        truth = adamw(one, **shared)
    for step in range(2):
        batches = [batch(10 * step + r, n) for r, n in enumerate(UNEQUAL[step][:world])]
        loss_of(several, batches[rank], total=True).backward()
        optimizer.step()
        with single():
            for own in [torch.cat(batches)] if joint else batches:
                loss_of(one, own, total=True).backward()
            truth.step()
    for p, q in zip(several.parameters(), one.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert float((whole(p) - whole(q)).abs().max()) < 1e-6
    optimizer.detach(), truth.detach()


def optimizers(rank: int, world: int) -> None:
    """By the fused operators and by torch's own step; their state lies as the parameters do."""
    makers = [
        functools.partial(fastdp.DPSGD, lr=0.1, momentum=0.9), functools.partial(fastdp.DPRMSprop, lr=1e-3, eps=1e-3),
        functools.partial(fastdp.DPAdamW, lr=1e-2, eps=1e-3, amsgrad=True),
        functools.partial(fastdp.DPAdam, lr=1e-2, eps=1e-3, weight_decay=0.1),
    ]  # fmt: skip
    shared = dict(noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=4, sample_rate=0.1, seed=4)
    for make in makers:
        several, one = sharded(build()), build()
        optimizer = make(several, **shared)
        with single():
            truth = make(one, **shared)
        for step in range(3):
            loss_of(several, batch(10 * step + rank, 2)).backward()
            optimizer.step()
            with single():
                loss_of(one, torch.cat([batch(10 * step + r, 2) for r in range(world)])).backward()
                truth.step()
        for p, q in zip(several.parameters(), one.parameters(), strict=True):
            assert float((whole(p) - q).abs().max()) < 1e-5
            assert whole(p.grad).shape == q.grad.shape and torch.allclose(whole(p.grad), q.grad, atol=1e-6)
            for name, value in truth.state[q].items():
                mine = optimizer.state[p][name]
                assert not value.dim() or mine.placements == p.placements
                assert torch.allclose(whole(mine), value, atol=1e-5), name
        optimizer.detach(), truth.detach()


def in_order(rank: int, world: int) -> list[Any]:
    """The records of a loader, and what was trained on them."""
    return records(rank, world, sharded)


def in_order_by_persons(rank: int, world: int) -> list[Any]:
    return persons(rank, world, sharded)


def in_order_correlated(rank: int, world: int) -> list[Any]:
    return correlated(rank, world, sharded)


OTHERS: dict[str, Any] = {
    function.__name__: function
    for function in (
        same_noise,
        optimizers,
        mixed_precision,
        in_order,
        in_order_by_persons,
        in_order_correlated,
    )
}
FOUR = {
    "cut for two between forward and backward": case(dict(reshard_after_forward=2), kind="checkpointed", sigma=1.0),
    "two copies in two parts": case(dict(mesh="both"), accumulate=2, sigma=1.0),
}
CASES = {**EXACT, **OTHERS, **FOUR}
