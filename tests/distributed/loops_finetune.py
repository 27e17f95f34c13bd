"""`python -m fastdp finetune` on one process or two, and what it says if one refuses."""

from __future__ import annotations

import contextlib
import io
import os
from argparse import Namespace
from typing import Any

import pytest
import torch.distributed as dist

from fastdp.__main__ import parsed
from fastdp.errors import FastDPError
from fastdp.finetune import batch_size, command
from fastdp.finetune.plan import FinetuneError
from fastdp.finetune.prepare import prepare

from ..finetune.finetune_models import classifier, reviews
from .parts import found, no_accelerator, shared_folder


def _job(rank: int, world: int, folder: Any = None, *more: str) -> Any:
    folder = folder or shared_folder(world)
    if rank == 0 and not (folder / "model").exists():
        (folder / "model").mkdir()
        classifier(folder / "model", dropout=0.0)  # processes draw masks of their own
        reviews(folder / "reviews.csv")
    if world > 1:
        dist.barrier()
        os.environ["LOCAL_RANK"] = str(rank)  # as torchrun sets it
    no_accelerator()
    words = ["finetune", str(folder / "model"), str(folder / "reviews.csv"), "--task", "classify", "--epsilon", "8"]
    words += ["--eval-fraction", "0", "--batch-size", "8", "--epochs", "1.6", "--accountant", "rdp", "--device", "cpu"]
    options = parsed([*words, "--max-physical-batch-size", "5", "--out", str(folder / "out"), *more])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastdp.finetune.prepare.fit", lambda job: batch_size.Fit(5, 1.0, 1, "given"))
        ready = prepare(options)
    ready.job.options.out.mkdir(exist_ok=True)
    return folder, ready.job


def finetune(rank: int, world: int) -> Any:
    from fastdp.finetune.run import run

    _, job = _job(rank, world, None, "--seed", "7")
    outcome, _ = run(job, False)
    assert outcome.status == "finished" and (job.options.out / "journal.jsonl").exists()
    return found(job.model, [outcome.steps, outcome.lost_steps], job.plan.epsilon(outcome.steps))


def finetune_resumed(rank: int, world: int) -> None:
    """A process that fails ends the run of all; taken up, it counts the steps that are lost, with new keys."""
    from fastdp.finetune import run

    folder, job = _job(rank, world, None, "--checkpoint-every", "3")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(FastDPError, match="spoilt"):
        if rank:
            patch.setattr(run.Between, "on_step_begin", _fails_at(5), raising=False)
        run.run(job, False)
    dist.barrier()
    _, again = _job(rank, world, folder, "--checkpoint-every", "3")
    outcome, _ = run.run(again, True)
    assert outcome.steps + outcome.lost_steps == 8 and outcome.lost_steps == 2  # the checkpoint is that of step 3
    told = found(again.model, [outcome.steps, outcome.lost_steps], again.plan.epsilon(8))
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, told)
    assert everywhere[0] == everywhere[1]


def _fails_at(step: int) -> Any:
    def on_step_begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            raise FinetuneError("the run is spoilt")

    return on_step_begin


def finetune_refused(rank: int, world: int) -> None:
    """What one process finds out before the first step, the first one says, and all end with exit code 1."""

    def refuse(options: Namespace) -> Any:
        if rank:
            raise FinetuneError("the data is not here")
        return Namespace(job=Namespace(plan=Namespace(), fingerprint={}))

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(command, "prepare", refuse)
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world))  # which Lightning, in the cases before, has deleted
        words = ["finetune", "gpt2", "none.csv", "--task", "lm", "--epsilon", "1", "--device", "cpu"]
        options = parsed([*words, "--out", str(shared_folder(world) / "out")])
        assert command.main(options) == 1
    assert ("rank 1 refused" in said.getvalue() and "the data is not here" in said.getvalue()) == (rank == 0)


CASES = {"finetune": finetune, "finetune_resumed": finetune_resumed, "finetune_refused": finetune_refused}
