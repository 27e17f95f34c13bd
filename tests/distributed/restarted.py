"""torchrun's agent begins all processes anew once one has died: they go on from a checkpoint, and the ledger counts all
steps that were made, also those that are made again."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastdp.accounting import epsilon_of

from .. import forked
from . import checkpoints
from .models import build
from .sharded import sharded

STEPS, SAVED = 5, 3  # all, and those before the checkpoint


def worker(folder: str) -> Any:
    dist.init_process_group("gloo")
    rank, world, again = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, place = sharded(build()), Path(folder) / "checkpoint"
    optimizer = checkpoints.optimizer_of(model, ledger=Path(folder) / "run.ledger")
    if again:
        checkpoints.load(model, optimizer, str(place))
    for step in range(SAVED if again else 0, STEPS):
        if step == SAVED and not again:
            checkpoints.save(model, optimizer, str(place))
        if step == STEPS - 1 and not again and rank:
            optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        checkpoints.train(model, optimizer, rank, world, step, step + 1)
    found = checkpoints.weights(model), optimizer.history, optimizer.epsilon(1e-5)
    optimizer.detach()
    dist.destroy_process_group()
    return found


def main(folder: str) -> None:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, monitor_interval=0.05, start_method="fork",
        run_id=str(uuid.uuid4()), rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    # else torch 2.13 keeps one store, in which those that begin anew find where the dead ones listened
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    found = elastic_launch(config, worker)(folder)
    (Path(folder) / "found.pickle").write_bytes(pickle.dumps([found[rank] for rank in sorted(found)]))


def check_restart(folder: Path) -> str:
    """Steps that are made again are on the ledger twice, as is the one that never was: the rank had died."""
    forked.ready(1, ("torch.distributed.launcher.api", "torch.distributed.checkpoint", "tests.distributed.restarted"))
    process = forked.start("-m", "tests.distributed.restarted", str(folder))
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
    alone = build()
    truth = checkpoints.optimizer_of(alone)
    checkpoints.train(alone, truth, 0, 1, 0, STEPS)
    made, worst = epsilon_of([(1e-9, 0.1, STEPS + STEPS - SAVED)], 1e-5, "rdp"), 0.0
    for found, history, epsilon in pickle.loads((folder / "found.pickle").read_bytes()):
        assert history == truth.history and epsilon == made > truth.epsilon(1e-5)
        pairs = zip(found, checkpoints.weights(alone), strict=True)
        worst = max(worst, *(float(np.abs(a - b).max()) for a, b in pairs))
    assert worst < 1e-6
    return f"weights {worst:.0e}"


if __name__ == "__main__":
    main(sys.argv[1])
