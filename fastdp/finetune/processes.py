"""The processes that `torchrun` starts. Each finds out alone what can be found out before the first step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..distributed.world import World, processes, world_of


def started() -> tuple[int, int]:
    """This process's rank, and the number of processes that `torchrun` has started; (0, 1) without it."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    return (int(os.environ["RANK"]), size) if size > 1 else (0, 1)


@contextlib.contextmanager
def together(device: str) -> Iterator[World]:
    """The processes that `torchrun` has started; they part at the end. An error within is raised by all."""
    begun = started()[1] > 1 and processes() == 1
    if begun:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        world = world_of()
        with world.deciding():
            yield world
    finally:
        if begun:
            dist.destroy_process_group()


def own_device() -> str:
    """The GPU of this process, of those that a machine has."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if started()[1] > 1 else "cuda"
