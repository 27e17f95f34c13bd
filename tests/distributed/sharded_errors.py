"""What is refused of models that fully_shard has cut, and what must not go stale."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastdp.engine.per_sample import PerSampleGradients
from fastdp.errors import ClippingError, ParameterError, SampleMixingError, StepError, UncapturedUseError

from .models import adamw, batch, build, loss_of, single, whole
from .sharded import sharded


def nothing_stale(rank: int, world: int) -> None:
    """What was gathered before a step (for the backward, or by an evaluation between) is gathered anew after it."""
    for after_backward in (True, False):
        several, one = sharded(build(), reshard_after_forward=False), build()
        several.set_reshard_after_backward(after_backward)
        shared = dict(noise_multiplier=0.0, eps=1e-3)
        optimizer = adamw(several, **shared)
        with single():
            truth = adamw(one, **shared)
        for step in range(3):
            loss_of(several, batch(10 * step + rank, 2)).backward()
            with torch.no_grad():
                several(batch(5, 2))
            optimizer.step()
            with single():
                loss_of(one, torch.cat([batch(10 * step + r, 2) for r in range(world)])).backward()
                truth.step()
                with torch.no_grad():
                    expected = one(batch(6, 2))
            with torch.no_grad():
                assert torch.allclose(several(batch(6, 2)), expected, atol=1e-5)
        for p, q in zip(several.parameters(), one.parameters(), strict=True):
            assert float((whole(p) - q).abs().max()) < 1e-6
        optimizer.detach()
        truth.detach()


def one_refuses(rank: int, world: int) -> None:
    """A loss that couples samples on the last rank: it goes on to the end of its backward, as the others wait for the
    parts that it holds, and then all raise its error. Nobody has stepped."""
    model = sharded(build(), reshard_after_forward=True)
    optimizer = adamw(model)
    before = [p.to_local().detach().clone() for p in model.parameters()]
    begun = time.monotonic()
    with pytest.raises(SampleMixingError) as caught:
        if rank == world - 1:
            out = model(batch(rank, 3)).flatten(1)
            F.cross_entropy(out @ out.T, torch.arange(3)).backward()
        else:
            loss_of(model, batch(rank, 3)).backward()
    assert time.monotonic() - begun < 10
    assert rank == world - 1 or f"rank {world - 1} refused" in str(caught.value)
    with pytest.raises(StepError):
        optimizer.step()
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.history
    optimizer.detach()
    again = adamw(model)  # fully_shard's own state is as new
    for step in range(2):
        loss_of(model, batch(step, 3)).backward()
        again.step()
    again.detach()


def one_cannot_clip(rank: int, world: int) -> None:
    """An error between norms and sums (here: of a clipping function, on the last rank) is raised once the others have
    what they wait for; they raise it before a step."""
    model = sharded(build())
    optimizer = adamw(model, clipping=lambda n: (50.0 if rank == world - 1 else 0.1) / (n + 0.1))
    before = [p.to_local().detach().clone() for p in model.parameters()]
    begun = time.monotonic()
    with pytest.raises(ClippingError):
        loss_of(model, batch(rank, 3)).backward()
        optimizer.step()
    assert time.monotonic() - begun < 10
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.history
    optimizer.detach()


class Astray(nn.Module):
    """A parameter whose use no rule sees, on some ranks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(4))

    def forward(self, tokens: torch.Tensor, extra: bool = False) -> torch.Tensor:
        return self.model(tokens, extra=extra)


def used_out_of_sight(rank: int, world: int) -> None:
    """fully_shard would add such a gradient up over the ranks, and keep it."""
    mesh = init_device_mesh("cpu", (world,))
    for policy in ({}, {"reshard_after_forward": False}):
        model = fully_shard(Astray(build()), mesh=mesh, **policy)
        optimizer = adamw(model)
        with pytest.raises(UncapturedUseError, match="scale"):
            loss = loss_of(model, batch(rank, 3))
            model.unshard()
            (loss + model.scale.sum() if rank == 0 else loss).backward()
        assert model.scale.grad is None
        optimizer.detach()


def written_grads(rank: int, world: int) -> None:
    """What others write to a part's `.grad` would get lost, as no step takes it from there."""
    model = sharded(build())
    optimizer = adamw(model)
    for step in range(2):
        loss_of(model, batch(rank + 2 * step, 3)).backward()
        optimizer.step()  # leaves the private gradient there
    loss = loss_of(model, batch(rank, 3))
    for _ in range(2):  # zeros do no harm
        model.zero_grad(set_to_none=False)
        if not optimizer._privacy.busy:
            loss.backward()
    optimizer.step()
    loss_of(model, batch(rank, 3)).backward()
    model.norm.weight.square().sum().backward()
    with pytest.raises(StepError, match="norm.weight.* was written to"):
        optimizer.step()
    optimizer.detach()


def refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    part = build()
    fully_shard(part.blocks[0], mesh=mesh)
    with pytest.raises(ParameterError, match="not on the model itself"):
        adamw(part)
    whole_model = sharded(build())
    with pytest.raises(ParameterError, match="not on the model itself"):
        whole_model(batch(0, 2))
        adamw(whole_model.blocks[0])
    with pytest.raises(ParameterError, match="FSDP1"):
        adamw(FullyShardedDataParallel(build(), device_id=torch.device("cpu")))
    with pytest.raises(ParameterError, match="HSDP"):
        inner = sharded(build())
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        wrapped.module = inner
        adamw(wrapped)
    with pytest.raises(ParameterError, match="CPUOffloadPolicy"):
        adamw(fully_shard(build(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    both = init_device_mesh("cpu", (world, 1), mesh_dim_names=("copies", "parts"))
    adamw(sharded(build(), both), mesh=both).detach()
    with pytest.raises(StepError, match="2 dimensions"):
        adamw(sharded(build()), mesh=both)
    model = sharded(build())
    with pytest.raises(ParameterError, match="does not train them"):
        adamw(model, params=model.head.parameters())
    seen = sharded(build(), blocks=False)
    for _ in range(2):
        with pytest.raises(ParameterError, match="before fully_shard"):
            PerSampleGradients(seen)
        with torch.no_grad():
            seen(batch(0, 2))  # whole parameters stand in it after that
    apart = build("tied")
    for module in (apart.words, apart.head):
        fully_shard(module, mesh=mesh)
    with pytest.raises(ValueError, match="same FSDP group"):  # torch's own
        adamw(sharded(apart))
    torch.manual_seed(0)
    copy = build()
    if rank == 0:
        nn.init.zeros_(copy.head.weight)
    with pytest.raises((ParameterError, StepError), match="copies of the model|same weights"):
        adamw(sharded(copy, "replicated"))
    with pytest.raises(StepError, match="do not do the same"):
        adamw(sharded(build()), noise_multiplier=1.0 + rank)


def changed_since(rank: int, world: int) -> None:
    """Frozen, unfrozen, and replaced parameters."""
    model = sharded(build())
    optimizer = adamw(model)
    model.blocks[0].requires_grad_(False)
    loss_of(model, batch(rank, 3)).backward()
    optimizer.step()
    model.blocks[0].requires_grad_(True)
    loss_of(model, batch(rank, 3)).backward()
    optimizer.step()
    model.register_parameter("late", nn.Parameter(torch.ones(3)))
    with pytest.raises(ParameterError, match="late"):
        loss_of(model, batch(rank, 3)).backward()
    optimizer.detach()
    for options in ({}, {"reshard_after_forward": False}):
        optimizer = adamw(model := sharded(build(), **options))
        loss_of(model, batch(rank, 3)).backward()
        optimizer.step()
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        with pytest.raises(ParameterError, match="were replaced.*assign=True"):
            loss_of(model, batch(rank, 3 * rank)).backward()
        optimizer.detach()
        optimizer = adamw(model)  # fully_shard goes on with what was loaded
        loss_of(model, batch(rank, 3)).backward()
        optimizer.step()
        optimizer.detach()


CASES: dict[str, Any] = {
    function.__name__: function
    for function in (
        nothing_stale, one_refuses, one_cannot_clip, used_out_of_sight, written_grads, refused,
        changed_since,
    )
}  # fmt: skip
