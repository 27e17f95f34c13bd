"""Several processes that `torchrun` starts: the first one says, keeps and writes everything, the others train with it.

Every process finds out alone what can be found out before the first step (`prepare`); `together` then joins them. From
there on the journal, the keys, checkpoints and outputs are the first process's. What the others must know, it tells.
A step is journalled and synced before any process draws its noise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.world import World, processes, world_of
from .journal import Entry, Journal
from .keys import Keys


def started() -> tuple[int, int]:
    """This process's number, and how many `torchrun` has started; (0, 1) without it."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    return (int(os.environ["RANK"]), size) if size > 1 else (0, 1)


def own_device() -> str:
    """The GPU of this process, of those that a machine has."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if started()[1] > 1 else "cuda"


@contextmanager
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


class Told(Journal):
    """The journal of a process that is not the first: what the first has told of its own, and no file."""

    def __init__(self, about: dict[str, Any]) -> None:
        vars(self).update(about)

    def begin(self, generation: int, environment: dict[str, Any]) -> None:
        self.environments[generation] = environment

    def add(self, generation: int, step: int, entry: Entry) -> None:
        self.steps[generation, step] = entry

    def close(self) -> None:
        """Nothing is open."""


def about(journal: Journal) -> dict[str, Any]:
    """What other processes must know of a journal."""
    return {name: getattr(journal, name) for name in ("path", "steps", "environments", "damaged", "run")}


def tell_keys(world: World, keys: Keys | None) -> Keys | None:
    """The keys of the first process."""
    return world.told("the keys of a run", keys)  # type: ignore[no-any-return]
