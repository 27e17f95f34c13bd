"""What two and three processes run, in one start of each."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import fastdp
from fastdp.errors import AccountingError, NotVerifiedWarning, ParameterError, SampleMixingError, StepError
from fastdp.mechanisms import DPFTRL

from .loading import CASES as LOADING
from .models import adamw, batch, build, compare, loss_of, single

UNEQUAL = [[5, 0, 2, 1], [3, 4, 0, 2], [0, 6, 1, 0]]


def _unequal(rank: int, world: int, **options: Any) -> Any:
    return compare(rank, world, sizes=[row[:world] for row in UNEQUAL], **options)


def in_turns(rank: int, world: int, wrap: Any, quiet: Any, **options: Any) -> Any:
    """Of two backwards, whose gradients add up, the wrapper is told to keep the first one's to itself.

    quiet: of the wrapped model, and whether it shall, a context."""
    made: list[Any] = []

    def wrapped(model: nn.Module) -> Any:
        made.append(wrap(model))
        return made[0]

    def around() -> Any:
        made.append(None)
        return quiet(made[0], len(made) % 2 == 0)

    return compare(rank, world, wrap=wrapped, around=around, accumulate=2, **options)


def _no_sync(model: Any, quiet: bool) -> Any:
    return model.no_sync() if quiet else contextlib.nullcontext()


def _groups(rank: int, world: int) -> Any:
    from .models import build

    names = [name for name, _ in build().named_parameters()]
    style = [{"params": names[::2], "max_grad_norm": 0.3}, {"params": names[1::2], "max_grad_norm": 0.4}]
    return compare(rank, world, style=style)


EXACT: dict[str, Any] = {
    "ddp": compare,
    "plain model": functools.partial(compare, wrap=lambda model: model),
    "noise": functools.partial(compare, sigma=1.0),
    "unequal and empty": _unequal,
    "unequal, layerwise, noise": functools.partial(_unequal, style="layerwise", sigma=1.0),
    "unequal, budget, checkpointed": functools.partial(_unequal, kind="checkpointed", memory_budget=1),
    "tied": functools.partial(compare, kind="tied"),
    "lora": functools.partial(compare, kind="lora"),
    "frozen": functools.partial(compare, kind="frozen"),
    "checkpointed": functools.partial(compare, kind="checkpointed"),
    "accumulation": functools.partial(compare, accumulate=2),
    "no_sync": functools.partial(in_turns, wrap=DDP, quiet=_no_sync),
    "augmentations": functools.partial(_unequal, rows_per_sample=2),
    "layerwise": functools.partial(compare, style="layerwise"),
    "groups": _groups,
    "global": functools.partial(compare, clipping="global", norm=1.75),
    "automatic": functools.partial(compare, clipping="automatic"),
    "adaptive": functools.partial(compare, clipping="adaptive", sigma=1.0, count_noise=1.0, accumulate=2),
    "unequal, adaptive": functools.partial(_unequal, clipping="adaptive", sigma=1.0, count_noise=1.0),
    "a function": functools.partial(compare, clipping=lambda n: 0.4 / (n + 0.1)),
    "sum": functools.partial(compare, loss_reduction="sum"),
    "a layer that only some ranks use": functools.partial(compare, extra=lambda rank: rank == 0),
}


def same_noise(rank: int, world: int) -> None:
    """Sums of whole numbers are the same bits in any order: so are the weights, noise and all, to the last bit."""
    several, one = nn.Linear(40, 30).requires_grad_(True), nn.Linear(40, 30)
    for model in (several, one):
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    options = dict(lr=0.5, noise_multiplier=0.7, max_grad_norm=1e6, expected_batch_size=8, loss_reduction="sum", seed=3)
    optimizer = fastdp.DPSGD(DDP(several), **options)
    with single():
        truth = fastdp.DPSGD(one, **options)
    for step in range(3):
        whole = torch.randint(-3, 4, (4 * world, 40), generator=torch.Generator().manual_seed(step)).float()
        several(whole[rank::world]).sum().backward()
        optimizer.step()
        with single():
            one(whole).sum().backward()
            truth.step()
        assert torch.equal(several.weight, one.weight) and torch.equal(several.bias, one.bias)
    optimizer.detach()


def secret_key(rank: int, world: int) -> bytes:
    """Without a seed, all draw by the key of the first rank, which alone says that the model was never verified."""
    model = build()
    optimizer = adamw(DDP(model), noise_multiplier=2.0)
    loss_of(model, batch(rank, 2)).backward()
    optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.epsilon(1e-5, sample_rate=0.1), optimizer.epsilon(1e-5, sample_rate=0.1)
    assert sum(issubclass(w.category, NotVerifiedWarning) for w in caught) == (rank == 0)
    key, weights = optimizer.noise_state()["key"], [p.detach().clone() for p in model.parameters()]
    optimizer.detach()
    other = adamw(build())  # the key of every optimizer is another
    assert other.noise_state()["key"] != key
    other.detach()
    return key + b"".join(w.numpy().tobytes() for w in weights)


def drop_and_count(rank: int, world: int) -> int:
    """A sample that is not finite contributes nothing, and all ranks count it."""
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    optimizer = adamw(DDP(model))
    x = torch.ones(2, 3)
    x[0, 0] = float("inf") if rank == 0 else 1.0
    model(x).sum(1).mean().backward()
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    optimizer.detach()
    return int(optimizer._privacy.nonfinite_samples)


# --------------------------------------------------------------------------- refusals


def one_refuses(rank: int, world: int) -> None:
    """Of a loss that couples samples, on the last rank, every rank hears within its step; and none has stepped."""
    model = build()
    optimizer = adamw(DDP(model))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(SampleMixingError) as caught:
        if rank == world - 1:
            out = model(batch(rank, 3)).flatten(1)
            F.cross_entropy(out @ out.T, torch.arange(3)).backward()
        loss_of(model, batch(rank, 3)).backward()
        begun = time.monotonic()
        optimizer.step()
    if rank == world - 1:
        time.sleep(2)  # alive, and silent
    else:
        assert time.monotonic() - begun < 1.5
    assert rank == world - 1 or f"rank {world - 1} refused" in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)) and not optimizer.history
    with pytest.raises(StepError, match="stopped on all ranks"):
        loss_of(model, batch(rank, 3)).backward()
    optimizer.detach()
    again = adamw(model)  # of a new optimizer on every rank nobody remembers it
    loss_of(model, batch(rank, 3)).backward()
    again.step()
    assert again.history == [(1.0, 0.1, 1)]
    again.detach()


def one_has_no_backward(rank: int, world: int) -> None:
    model = build()
    optimizer = adamw(model)
    if rank:
        loss_of(model, batch(rank, 3)).backward()
    with pytest.raises(StepError, match="without a backward"):
        optimizer.step()
    optimizer.detach()


def out_of_step(rank: int, world: int) -> None:
    """A rank whose noise is of another step, or of another key, is caught before anything is summed."""
    options = {
        "lr": rank + 1, "tensor lr": torch.tensor(0.1 + rank), "betas": (0.9, 0.9 + 0.01 * rank), "amsgrad": rank > 0,
    }  # fmt: skip
    for tamper in ("step", "key", "sigma", "history", "class", "frozen", *options):
        model = build()
        optimizer = adamw(DDP(model), fastdp.DPSGD if tamper == "class" and rank else fastdp.DPAdamW)
        if tamper in options:
            optimizer.param_groups[-1][tamper.split()[-1]] = options[tamper]
        elif rank == 1:
            noise = optimizer._privacy.noise
            if tamper == "step":
                noise.step += 1
            elif tamper == "key":
                noise.restore(bytes(32), 0)
            elif tamper == "sigma":
                optimizer.noise_multiplier = 0.5
            elif tamper == "history":
                optimizer._privacy.ledger.add(1.0, 0.5)
            elif tamper == "frozen":
                model.head.requires_grad_(False)
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, batch(rank, 2)).backward()
        with pytest.raises(StepError, match="do not do the same") as caught:
            optimizer.step()
        assert "rank 1 has" in str(caught.value), tamper
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        optimizer.detach()


def refused_when_made(rank: int, world: int) -> None:
    with pytest.raises(StepError, match="model"):
        torch.manual_seed(rank)
        adamw(nn.Linear(3, 2))
    with pytest.raises(StepError, match="noise_multiplier"):
        adamw(build(), noise_multiplier=1.0 + rank)
    with pytest.raises(ParameterError, match=r"replicate\(\)"):
        adamw(replicate(build()))
    with pytest.raises(ParameterError, match="static_graph"):
        adamw(DDP(build(), static_graph=True))
    part = build()
    with pytest.raises(ParameterError, match="does not train them"):
        adamw(part, params=part.head.parameters())
    with pytest.raises(AccountingError, match="must lie in"):  # on one rank alone
        adamw(build(), sample_rate=0.1 if rank else 2.0)
    alone = dist.new_group([0])
    with pytest.raises(StepError, match="of its own for each training"):
        adamw(build(), process_group=alone)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    model = build()
    optimizer = adamw(DDP(model), mesh=mesh)
    with pytest.raises(StepError, match="graphed works in one process"):
        optimizer.graphed(lambda m, x: loss_of(m, x))
    plain = build()
    for _ in range(2):  # and nothing is left on the model
        with pytest.raises(StepError, match="DPFTRL works in one process.*DPSGD and fastdp.poisson_loader"):
            DPFTRL(plain, lr=0.1, noise_multiplier=1.0)
    optimizer._privacy.replica.wrapper.require_backward_grad_sync = True
    with pytest.raises(StepError, match="require_backward_grad_sync"):
        loss_of(model, batch(rank, 2)).backward()
    optimizer.detach()


def weights_loaded_on_one_rank(rank: int, world: int) -> None:
    """A checkpoint that only one rank has loaded, once the optimizer was made."""
    model = build()
    optimizer = adamw(DDP(model))
    if rank:
        nn.init.zeros_(model.head.weight)
    loss_of(model, batch(rank, 2)).backward()
    with pytest.raises(StepError, match="weights"):
        optimizer.step()
    optimizer.detach()


def joined(rank: int, world: int) -> None:
    """Within Join, a rank without more batches would answer the others' sums, and none of what they say before."""
    model = DDP(build())
    optimizer = adamw(model)
    with pytest.raises(ParameterError, match="Join.*poisson_loader"), Join([model]):
        loss_of(model, batch(rank, 3)).backward()
    optimizer.detach()


def persons_apart(rank: int, world: int) -> None:
    model = build()
    optimizer = adamw(DDP(model))
    optimizer.group_by([1, 1, 2])
    with pytest.raises(StepError, match="count twice"):
        loss_of(model, batch(rank, 3)).backward()
    optimizer.detach()


def messages_within(rank: int, world: int) -> None:
    """Samples that lie in parts on a ring of ranks: seen where the backend counts collectives alone, as NCCL does."""
    optimizer, real = adamw(DDP(build())), dist.ProcessGroup._get_sequence_number_for_group
    model, gloo = optimizer._privacy.replica.wrapper, vars(dist.distributed_c10d)["ProcessGroupGloo"]
    try:
        gloo._get_sequence_number_for_group = dist.ProcessGroup._get_sequence_number_for_group = lambda self: 0
        for step in range(2):
            loss = loss_of(model, batch(rank, 3))
            if step == 0:
                loss.backward()
                optimizer.step()
            sent, came = torch.ones(1), torch.ones(1)
            around = [
                dist.P2POp(dist.isend, sent, (rank + 1) % world),
                dist.P2POp(dist.irecv, came, (rank - 1) % world),
            ]
            for work in dist.batch_isend_irecv(around):
                work.wait()
        with pytest.raises(StepError, match="a collective of torch.distributed"):
            loss.backward()
    finally:
        del gloo._get_sequence_number_for_group
        dist.ProcessGroup._get_sequence_number_for_group = real
    optimizer.detach()


def collectives_within(rank: int, world: int) -> None:
    """A loss that takes other ranks' outputs as constants is refused, by whatever group it got them, and so is a
    replaced attention."""
    mine = dist.new_group()
    for group in (lambda: None, lambda: mine, dist.new_group):  # one that is made there, too
        model = build()
        optimizer = adamw(DDP(model))
        with pytest.raises(StepError, match="a collective of torch.distributed"):
            loss = loss_of(model, batch(rank, 3))
            dist.all_reduce(torch.ones(1), group=group())
            loss.backward()
        optimizer.detach()
    optimizer = adamw(DDP(build()))
    model = optimizer._privacy.replica.wrapper
    for step in range(3):  # metrics between steps are fine, after a forward that had no backward too
        loss_of(model, batch(rank, 3)).backward()
        optimizer.step()
        dist.all_reduce(torch.ones(1))
        with torch.no_grad():
            model(batch(step, 2))
        dist.all_reduce(torch.ones(1))
    optimizer.detach()
    optimizer, real = adamw(model), F.scaled_dot_product_attention
    try:
        F.scaled_dot_product_attention = lambda *a, **k: real(*a, **k)
        with pytest.raises(StepError, match="[Cc]ontext parallel"):
            loss_of(model, batch(rank, 3)).backward()
    finally:
        F.scaled_dot_product_attention = real
    optimizer.detach()


OTHERS: dict[str, Any] = {
    function.__name__: function
    for function in (
        same_noise, secret_key, drop_and_count, one_refuses, one_has_no_backward, out_of_step, refused_when_made,
        messages_within, collectives_within, weights_loaded_on_one_rank, joined, persons_apart,
    )
}  # fmt: skip
CASES = {**EXACT, **OTHERS, **LOADING}
