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

from .models import compare
from .tensor_errors import OTHERS
from .tensor_hf import CASES as WITH_TRANSFORMERS
from .tensor_hf import EXACT as OF_TRANSFORMERS
from .tensor_models import LENGTH, WORDS, build, freeze, split


def batch(number: int, size: int) -> Tensor:
    return torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    return loss if len(tokens) else loss.nan_to_num() * 0


def exact(
    rank: int, world: int, how: str = "", kind: str = "", copies: int = 1, shard: bool = False, unequal: bool = False,
    **options: Any,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Steps of a split model, and of one process on the union of the copies' batches.

    copies: of the split model, each with samples of its own; shard: they are cut by fully_shard.
    """
    mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("dp", "tp"))

    def wrap(model: nn.Module) -> nn.Module:
        several = freeze(split(model, mesh["tp"], how), kind)
        for block in several.blocks if shard else ():
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(several, mesh=mesh["dp"]) if shard else several

    sizes = [[5, 0], [2, 4]] if unequal else [[3] * copies] * 2
    return compare(
        mesh["dp"].get_local_rank(), copies, kind, sizes, wrap, build=build, loss=loss_of, batch=batch,
        mesh=mesh["dp"] if copies > 1 else None,
        around=loss_parallel if "loss" in how else contextlib.nullcontext, **options,
    )  # fmt: skip


def case(**options: Any) -> Any:
    return functools.partial(exact, **options)


EXACT: dict[str, Any] = {
    "adaptive": case(how="words sequence", clipping="adaptive", sigma=1.0, count_noise=1.0),
    "layers": case(sigma=1.0),
    "sequence": case(how="sequence", sigma=1.0),
    "sequence, rms": case(how="sequence", kind="rms"),
    "rotary, whole": case(how="whole", kind="rotary"),
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
    "copies, adaptive": case(
        copies=2, shard=True, unequal=True, clipping="adaptive", sigma=1.0, count_noise=1.0, seed=6
    ),
    "copies": case(how="words sequence loss", copies=2, sigma=1.0),
    "copies, unequal": case(how="words", copies=2, unequal=True),
    "copies in parts": case(how="words sequence", copies=2, shard=True, sigma=1.0),
    "copies in parts, unequal": case(how="columns", copies=2, shard=True, unequal=True, style="layerwise"),
    "copies in parts, lora": case(kind="lora", copies=2, shard=True),
    "copies in parts, checkpointed": case(how="sequence", kind="checkpointed", copies=2, shard=True),
}
EXACT |= OF_TRANSFORMERS
CASES = {**EXACT, **COPIES, **OTHERS, **WITH_TRANSFORMERS}
