"""The loop of `python -m fastdp finetune` on one process or two, and what its command says where one refuses."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from typing import Any

import pytest
import torch.distributed as dist

from fastdp.__main__ import parsed
from fastdp.errors import FastDPError
from fastdp.finetune import command
from fastdp.finetune.job import FinetuneError
from fastdp.finetune.training import run

from ..finetune.finetune_runs import job_of, plan_of
from .parts import found, shared_folder


def _job(world: int, folder: Any = None, **changes: Any) -> Any:
    job = job_of(folder or shared_folder(world) / "run", plan=plan_of(accountant="rdp", **changes))
    job.model.drop.p = 0.0  # processes draw masks of their own
    return job


def finetune(rank: int, world: int) -> Any:
    job, losses = _job(world), []
    job.log = lambda kind, values: losses.append({"loss": values["loss"]}) if kind == "step" else None
    outcome = run(job)
    assert outcome.status == "finished" and (job.folder / "journal.jsonl").exists()
    return *found(job.model, [outcome.steps, outcome.lost_steps], outcome.epsilon), losses


def finetune_resumed(rank: int, world: int) -> None:
    """A process that fails ends the run of all; taken up, it counts the steps that are lost, with new keys."""
    job = _job(world, seed=None)
    job.log = _fails_at(7) if rank else None
    with pytest.raises(FastDPError, match="spoilt"):
        run(job)
    dist.barrier()
    again = _job(world, folder=job.folder, seed=None)
    outcome = run(again, resume=True)
    assert outcome.steps == 12 and 3 <= outcome.lost_steps <= 4  # the checkpoint is that of step 4
    told = found(again.model, [outcome.steps, outcome.lost_steps], outcome.epsilon)
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, told)
    assert everywhere[0] == everywhere[1]


def _fails_at(step: int) -> Any:
    def log(kind: str, values: dict[str, Any]) -> None:
        if kind == "step" and values["step"] == step:
            raise FinetuneError("the run is spoilt")

    return log


def finetune_refused(rank: int, world: int) -> None:
    """What one process finds out before the first step, the first one says, and all end with exit code 1."""

    def prepare(options: Namespace) -> Any:
        if rank:
            raise FinetuneError("the data is not here")
        return Namespace(plan=plan_of(), job=Namespace(fingerprint={}))

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(command, "prepare", prepare)
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world))  # which Lightning, in the cases before, has deleted
        words = ["finetune", "gpt2", "none.csv", "--task", "lm", "--epsilon", "1", "--device", "cpu"]
        options = parsed([*words, "--out", str(shared_folder(world) / "out")])
        assert command.main(options) == 1
    assert ("rank 1 refused" in said.getvalue() and "the data is not here" in said.getvalue()) == (rank == 0)


CASES = {"finetune": finetune, "finetune_resumed": finetune_resumed, "finetune_refused": finetune_refused}
