"""Ranks that are killed at random moments, and started again: the ledger holds every step that any of them released.

    python -m tests.distributed.kills --kills 100

Two ranks train, write down each step once they have its weights, and save checkpoints now and then. One of them (or
both) dies after a random time. The others must raise, and never release a step that the file does not hold.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastdp
from fastdp.errors import StepError

from .ranks import free_port

KINDS = ("first", "second", "both")


def train(rank: int, port: int, folder: Path, launch: int) -> None:
    """Steps without end, from the last checkpoint."""
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20))
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8, sample_rate=0.1,
        ledger=folder / "ledger",
    )  # fmt: skip
    saved = folder / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    spent = sum(run[2] for run in optimizer._privacy.ledger.spent)
    with open(folder / f"released.{launch}.{rank}", "a", buffering=1) as released:
        released.write(f"begun {spent}\n")
        for number in range(1, 100_000):
            model(torch.randn(4, 6)).square().sum(1).mean().backward()
            optimizer.step()
            released.write(f"{number}\n")
            optimizer.zero_grad()
            if rank == 0 and number % 7 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / "part.pt")
                os.replace(folder / "part.pt", saved)


def child(rank: int, port: int, folder: Path, launch: int) -> int:
    """Fork a rank; its exit status is 3 if it stopped by fastdp's error."""
    pid = os.fork()
    if pid:
        return pid
    try:
        train(rank, port, folder, launch)
    except StepError:
        os._exit(3)
    except BaseException as problem:  # noqa: BLE001 - gloo's, while the group is made
        print(f"rank {rank}: {type(problem).__name__}: {problem}", flush=True)
        os._exit(4)
    os._exit(0)


def lines(folder: Path) -> int:
    """Steps in the ledger's file."""
    path = folder / "ledger"
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def released(folder: Path, launch: int, rank: int) -> tuple[int, int]:
    """What a rank had counted when it began (-1: it did not), and the steps that it released in this launch."""
    path = folder / f"released.{launch}.{rank}"
    said = path.read_text().splitlines() if path.exists() else []
    return (int(said[0].split()[1]), len(said) - 1) if said else (-1, 0)


def run(kills: int, folder: Path, seed: int) -> dict[str, int]:
    """Kill ranks so many times; raises AssertionError if a step is not accounted for."""
    chance = random.Random(seed)
    total = {"steps": 0, "written ahead only": 0, "stopped by fastdp": 0, "redone": 0, "before the first step": 0}
    for launch in range(kills):
        before, port = lines(folder), free_port()
        pids = [child(rank, port, folder, launch) for rank in range(2)]
        begun = time.monotonic()
        while not all(released(folder, launch, rank)[0] >= 0 for rank in range(2)):  # both have made their optimizer
            assert time.monotonic() - begun < 30, "the ranks do not begin"
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.25))
        for rank in {"first": [0], "second": [1], "both": [0, 1]}[chance.choice(KINDS)]:
            os.kill(pids[rank], signal.SIGKILL)
        killed = time.monotonic()
        for pid in pids:
            status = os.waitpid(pid, 0)[1]
            ended = os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 3
            assert ended, f"launch {launch}: exit status {os.waitstatus_to_exitcode(status)}"
            total["stopped by fastdp"] += not os.WIFSIGNALED(status)
        assert time.monotonic() - killed < 10, f"launch {launch}: a rank hung"
        made = [released(folder, launch, rank) for rank in range(2)]
        written, seen = lines(folder) - before, max(count for _, count in made)
        assert seen <= written <= seen + 1, f"launch {launch}: {written} steps written, {made} released"
        assert all(counted == before for counted, _ in made), f"launch {launch}: {made} counted of {before}"
        total["steps"] += seen
        total["written ahead only"] += written - seen
        total["before the first step"] += not seen
    first = json.loads((folder / "ledger").read_bytes().splitlines()[0].partition(b" ")[2])
    assert first["fastdp"] == "ledger of noised steps"
    history = torch.load(folder / "checkpoint.pt", weights_only=True)["optimizer"]["fastdp"]["history"]
    total["redone"] = lines(folder) - sum(run[2] for run in history)
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(run(options.kills, Path(place), options.seed))
