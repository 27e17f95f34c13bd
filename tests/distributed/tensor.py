"""What processes do with a model whose layers are split over them, or over some of them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

import fastdp

from .models import single, whole
from .tensor_errors import OTHERS
from .tensor_hf import CASES as WITH_TRANSFORMERS
from .tensor_hf import EXACT as OF_TRANSFORMERS
from .tensor_models import LENGTH, WORDS, build, freeze, split


def batch(number: int, size: int) -> Tensor:
    return torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    targets = tokens.roll(-1, 1)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def exact(
    rank: int, world: int, how: str = "", kind: str = "", copies: int = 1, shard: bool = False, sigma: float = 0.0,
    accumulate: int = 1, steps: int = 2, unequal: bool = False, **options: Any,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Steps of AdamW on a split model, and in one process on the union of the copies' batches.

    copies: of the split model, each with samples of its own; shard: they are cut by fully_shard.
    Returns the largest relative error of a norm, of a weight, and epsilon of both.
    """
    mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("dp", "tp"))
    several, one = freeze(split(build(kind), mesh["tp"], how), kind), build(kind)
    if shard:
        for block in several.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(several, mesh=mesh["dp"])
    options = dict(lr=1e-2, eps=1e-3, noise_multiplier=sigma, max_grad_norm=0.5, seed=5, sample_rate=0.1,
                   expected_batch_size=3 * copies * accumulate, accountant="rdp", **options)  # fmt: skip
    optimizer = fastdp.DPAdamW(several, mesh=mesh["dp"] if copies > 1 else None, **options)
    with single():
        truth = fastdp.DPAdamW(one, **options)
    copy, worst = mesh["dp"].get_local_rank(), 0.0
    for step in range(steps):
        for part in range(accumulate):
            sizes = [[5, 0], [2, 4], [0, 3]][step][:copies] if unequal else [3] * copies
            batches = [batch(1000 * step + 10 * c + 100 * part, n) for c, n in enumerate(sizes)]
            with loss_parallel() if "loss" in how else contextlib.nullcontext():
                mine = loss_of(several, batches[copy])
                (mine if len(batches[copy]) else mine.nan_to_num() * 0).backward()
            with single():
                loss_of(one, torch.cat(batches)).backward()
            begin = sum(sizes[:copy])
            for a, b in zip(_each(optimizer.norms), _each(truth.norms), strict=True):
                b = b[begin : begin + sizes[copy]]
                worst = max([worst, *((a - b).abs() / b.clamp(min=1e-3)).tolist()])
        optimizer.step()
        optimizer.zero_grad()
        with single():
            truth.step()
        truth.zero_grad()
    error = max(float((whole(p) - q).abs().max()) for p, q in zip(several.parameters(), one.parameters(), strict=True))
    found = worst, error, optimizer.epsilon(1e-5) if sigma else 0.0, truth.epsilon(1e-5) if sigma else 0.0
    optimizer.detach()
    truth.detach()
    return found


def _each(norms: Any) -> list[Tensor]:
    return [norms] if isinstance(norms, Tensor) else list(norms.values())


def case(**options: Any) -> Any:
    return functools.partial(exact, **options)


EXACT: dict[str, Any] = {
    "adaptive": case(how="words sequence", clipping="adaptive", sigma=1.0, count_noise=1.0),
    "layers": case(sigma=1.0),
    "sequence": case(how="sequence", sigma=1.0),
    "sequence, rms": case(how="sequence", kind="rms"),
    "words": case(how="words", sigma=1.0),
    "columns": case(how="columns"),
    "words, sequence": case(how="words sequence"),
    "words, loss": case(how="words loss"),
    "words, sequence, loss": case(how="words sequence loss", sigma=1.0),
    "frozen": case(how="words sequence", kind="frozen"),
    "lora": case(kind="lora", sigma=1.0),
    "accumulation": case(how="sequence", accumulate=2),
    "layerwise": case(how="words sequence", style="layerwise"),
    "automatic": case(how="sequence", clipping="automatic"),
    "checkpointed": case(how="sequence", kind="checkpointed"),
}
COPIES: dict[str, Any] = {
    "copies, adaptive": case(copies=2, shard=True, unequal=True, clipping="adaptive", sigma=1.0, count_noise=1.0),
    "copies": case(how="words sequence loss", copies=2, sigma=1.0),
    "copies, unequal": case(how="words", copies=2, unequal=True),
    "copies in parts": case(how="words sequence", copies=2, shard=True, sigma=1.0),
    "copies in parts, unequal": case(how="columns", copies=2, shard=True, unequal=True, style="layerwise"),
    "copies in parts, lora": case(kind="lora", copies=2, shard=True),
    "copies in parts, checkpointed": case(how="sequence", kind="checkpointed", copies=2, shard=True),
}
EXACT |= OF_TRANSFORMERS
CASES = {**EXACT, **COPIES, **OTHERS, **WITH_TRANSFORMERS}
