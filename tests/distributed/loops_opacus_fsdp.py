"""Mode "ghost_fsdp" on two processes; in a group of one process the same cases run mode "ghost" on the whole model."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from fastdp.compat.opacus import PrivacyEngine
from fastdp.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from fastdp.compat.opacus.utils.fsdp_utils import FSDP2Wrapper

from ..by_hand import EXPECTED, Loop, R, network, records
from .cases import UNEQUAL
from .models import batch, build, single, whole
from .parts import found


def private(model: nn.Module, mode: str = "ghost_fsdp", seed: int = 4, lr: float = 1.0, **options: Any) -> Any:
    """(engine, module, optimizer, criterion, loader). The loader's batch is that of all processes."""
    engine = options.pop("engine", None) or PrivacyEngine(accountant="rdp", secure_mode=options.pop("secure", False))
    generator = None if engine.secure_mode else torch.Generator().manual_seed(seed)
    batches = DataLoader(records(), batch_size=EXPECTED, generator=torch.Generator().manual_seed(seed))
    given = {"noise_multiplier": 1.0, "max_grad_norm": R, "noise_generator": generator, **options}
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), data_loader=batches, grad_sample_mode=mode,
        **given,
    )  # fmt: skip


def laid(model: nn.Module, world: int) -> Any:
    """(the model, in parts if there are several processes, the mode)."""
    return (FSDP2Wrapper(model), "ghost_fsdp") if world > 1 else (model, "ghost")


def epoch(module: nn.Module, optimizer: Any, criterion: Any, batches: Any, seen: Any = None) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        criterion(module(x), y.long()).backward()
        if seen is not None:
            seen(x, y.long(), not (optimizer._step_skip_queue and optimizer._step_skip_queue[0]))
        optimizer.step()


def trains(rank: int, world: int, physical: int | None = None, by_hand: bool = False, **options: Any) -> Any:
    """Poisson batches, shared out: what must be equal whatever the number of processes."""
    model, mode = laid(network(), world)
    loop = Loop(network()) if by_hand else None

    def seen(x: Tensor, y: Tensor, last: bool) -> None:
        assert loop is not None
        boxes: list[Any] = [None] * world
        dist.all_gather_object(boxes, (x, y))
        for box in boxes:
            loop.see(*box)
        if last:
            loop.step()

    engine, module, optimizer, criterion, loader = private(model, mode, **options)
    assert optimizer.expected_batch_size == EXPECTED / world
    for _ in range(2):
        if physical is None:
            epoch(module, optimizer, criterion, loader, seen if by_hand else None)
            continue
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as parts:
            epoch(module, optimizer, criterion, parts, seen if by_hand else None)
    if loop is not None:
        assert loop.steps == 8
        for p, q in zip(loop.model.parameters(), model.parameters(), strict=True):
            assert float((p - whole(q)).abs().max()) < 1e-6
    result = found(model, engine.accountant.history, engine.get_epsilon(1e-3))
    module.cleanup()
    return result


# ---------------------------------------------------------------------- forms of models, on two processes


def _losses(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).transpose(1, 2), tokens.roll(-1, 1), reduction="none").mean(1)


def _clipped_by_hand(model: nn.Module, tokens: Tensor, norms: list[float]) -> dict[str, Tensor]:
    """The clipped sum of samples taken one at a time, in float64."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for row in tokens:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(_losses(model, row[None]).sum(), list(trained.values()), allow_unused=True)
        norm = sum(float(g.square().sum()) for g in grads if g is not None) ** 0.5
        norms.append(norm)
        for name, grad in zip(trained, grads, strict=True):
            sums[name] += 0 if grad is None else grad * min(1.0, R / norm)
    return sums


def exact(rank: int, world: int, kind: str = "", wrap: Any = FSDP2Wrapper, accumulate: int = 1) -> None:
    """Norms and weights of several steps, some ranks without samples, against one process and float64 by hand."""
    several, one, hand = wrap(build(kind)), build(kind), copy.deepcopy(build(kind)).double()
    shared = {"noise_multiplier": 0.0, "poisson_sampling": False}
    engine, module, optimizer, criterion, _ = private(several, **shared)
    with single():
        spent, *truth = private(one, "ghost", **shared)
    for step, row in enumerate(UNEQUAL):
        optimizer.zero_grad(), truth[1].zero_grad()
        by_hand: dict[str, Tensor] = {}
        for part in range(accumulate):
            batches = [batch(1000 * step + 100 * part + r, n) for r, n in enumerate(row[:world])]
            criterion_of(criterion, module, batches[rank]).backward()
            norms: list[float] = []
            for name, total in _clipped_by_hand(hand, torch.cat(batches), norms).items():
                by_hand[name] = by_hand.get(name, 0) + total
            with single():
                criterion_of(truth[2], truth[0], torch.cat(batches)).backward()
            begin = sum(row[:rank])
            mine = module.per_sample_gradient_norms.tolist()
            for of_all in (norms, truth[0].per_sample_gradient_norms.tolist()):
                own = of_all[begin : begin + row[rank]]
                assert len(own) == len(mine) and all(abs(a - b) < 1e-5 * b for a, b in zip(mine, own, strict=True))
        optimizer.step()
        assert optimizer.accumulated_iterations == accumulate
        with single():
            truth[1].step()
        with torch.no_grad():
            for name, p in hand.named_parameters():
                if p.requires_grad:
                    p -= by_hand[name] / (EXPECTED * accumulate)
    for p, q, r in zip(several.parameters(), one.parameters(), hand.parameters(), strict=True):
        assert float((whole(p) - q).abs().max()) < 1e-6
        assert float((whole(p) - r).abs().max()) < 1e-6
        assert not hasattr(p, "placements") or p.grad is None or p.grad.placements == p.placements
    assert engine.accountant.history == spent.accountant.history == [(0.0, 0.25 * accumulate, len(UNEQUAL))]
    module.cleanup()


def criterion_of(criterion: Any, module: nn.Module, tokens: Tensor) -> Tensor:
    out = module(tokens)
    return criterion(out.flatten(0, 1), tokens.roll(-1, 1).flatten(), shape=out.shape)


def only_the_root(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def kept_for_the_backward(model: nn.Module) -> nn.Module:
    return FSDP2Wrapper(model, reshard_after_forward=False)


def nested(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block.mlp)
        fully_shard(block)
    fully_shard(model)
    return model


def opacus_fsdp_exact(rank: int, world: int) -> None:
    for options in (
        {}, {"kind": "tied"}, {"kind": "frozen"}, {"kind": "lora", "wrap": only_the_root}, {"accumulate": 2},
        {"wrap": kept_for_the_backward}, {"kind": "derived", "wrap": nested}, {"kind": "checkpointed"},
    ):  # fmt: skip
        try:
            exact(rank, world, **options)
        except Exception as problem:
            problem.add_note(f"{options}")
            raise


CASES: dict[str, Any] = {
    "opacus, ghost_fsdp": trains,
    "opacus, ghost_fsdp, parts": functools.partial(trains, physical=2),
    "opacus, ghost_fsdp, without noise": functools.partial(trains, physical=3, by_hand=True, noise_multiplier=0.0),
    "opacus, ghost_fsdp, sum": functools.partial(
        trains, loss_reduction="sum", criterion=nn.CrossEntropyLoss(reduction="sum")
    ),
    "opacus_fsdp_exact": opacus_fsdp_exact,
}
warnings.filterwarnings("ignore")
