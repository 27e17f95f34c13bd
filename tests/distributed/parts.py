"""What the loops of people have in common: data, an optimizer, Accelerate's state, and what each case returns."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import fastdp

from ..by_hand import EXPECTED, R, records
from .models import whole

Found = tuple[list[list[float]], list[Any], float]  # weights, history, epsilon


def found(model: nn.Module, history: list[Any], epsilon: float) -> Found:
    return [whole(p).detach().flatten().tolist() for p in model.parameters()], history, epsilon


def shared_folder(world: int) -> Path:
    """One that all processes know."""
    box = [tempfile.mkdtemp()]
    if world > 1:
        dist.broadcast_object_list(box)
    return Path(box[0])


def loader(limit: int | None = 2, **options: Any) -> Any:
    given = {"expected_batch_size": EXPECTED, "steps": 4, "seed": 1, **options}
    return fastdp.poisson_loader(records(), max_physical_batch_size=limit, **given)


def sgd(model: nn.Module, **options: Any) -> Any:
    given = {"lr": 1.0, "noise_multiplier": 1.0, "max_grad_norm": R, "seed": 3, "accountant": "rdp", **options}
    return fastdp.DPSGD(model, **given)


def accelerator(rank: int, **options: Any) -> Any:
    import accelerate

    no_accelerator()
    if dist.get_world_size() > 1:
        os.environ["LOCAL_RANK"] = str(rank)
    return accelerate.Accelerator(cpu=True, **options)


def no_accelerator() -> None:
    """Forget that of the case before."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which an Accelerator with a plugin leaves behind
