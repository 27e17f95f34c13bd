"""The loops that people have, run by one process (`world` 1) or two: each case returns what must be equal."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastdp.errors import FastDPError, ParameterError, StepError

from ..by_hand import network, records
from .loops_finetune import CASES as FINETUNE
from .loops_fsdp import CASES as FSDP
from .loops_lightning import CASES as LIGHTNING
from .loops_lightning_parts import CASES as IN_PARTS
from .loops_opacus import CASES as OPACUS
from .loops_opacus_fsdp import CASES as OPACUS_FSDP
from .parts import Found, accelerator, found, loader, no_accelerator, sgd, shared_folder
from .ranks import check

# --------------------------------------------------------------------------- Accelerate


def accelerated(rank: int, world: int) -> Found:
    """`prepare` wraps the model after the optimizer was made; batches without samples make no forward."""
    prepared = accelerator(rank, step_scheduler_with_optimizer=False)
    torch.manual_seed(rank)  # the weights of rank 1 are others until `prepare`
    plain = network() if rank == 0 else nn.Sequential(*(_drawn_anew(module) for module in network()))
    private, batches = sgd(plain), loader()
    schedule = torch.optim.lr_scheduler.StepLR(private, 2, 0.5)
    model, optimizer, same, schedule = prepared.prepare(plain, private, batches, schedule)
    assert same is batches and isinstance(model, DistributedDataParallel) == (world > 1)
    for _ in range(2):
        for x, y in batches:
            with prepared.accumulate(model):
                if len(x):
                    prepared.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                if private.stepped:
                    schedule.step()
                optimizer.zero_grad()
    result = found(prepared.unwrap_model(model), private.history, private.epsilon(1e-3))
    private.detach()
    return result


def _drawn_anew(module: nn.Module) -> nn.Module:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    return module


def accelerate_refused(rank: int, world: int) -> None:
    prepared = accelerator(rank)
    plain = network()
    private, batches = sgd(plain), loader(None)
    schedule = torch.optim.lr_scheduler.StepLR(private, 2, 0.5)
    model, optimizer, schedule = prepared.prepare(plain, private, schedule)
    with pytest.raises(StepError, match="steps 2 times where it is called once"):
        for x, y in batches:
            prepared.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    private.detach()
    del schedule
    private = sgd(plain)  # `prepare` was left out, and the weights are not the same
    if rank:
        nn.init.zeros_(plain[0].weight)
    with pytest.raises(StepError, match="weights"):
        for x, y in loader(None):
            prepared.backward(F.cross_entropy(plain(x), y))
            private.step()
    private.detach()
    private = sgd(model.module)
    wrapped = DistributedDataParallel(model.module, static_graph=True)
    with pytest.raises(ParameterError, match="static_graph"):
        wrapped(records()[:2][0])
    private.detach()
    for kind, match in (("FSDP", "Accelerate with FSDP1"), ("MEGATRON_LM", "distributed_type MEGATRON_LM")):
        prepared.state._shared_state["distributed_type"] = kind
        with pytest.raises(StepError, match=match):
            sgd(network())
    accelerator(rank)


def wrapped_later(rank: int, world: int) -> Found:
    """DistributedDataParallel by hand around a model with a buffer, after the optimizer; at first in no_sync()."""
    model = network()
    model.register_buffer("counted", torch.zeros(1))
    private, batches = sgd(model), loader()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if world > 1 else model
    for number, (x, y) in enumerate(batches):
        if len(x):
            if world > 1 and number == 0:
                with wrapped.no_sync():
                    F.cross_entropy(wrapped(x), y).backward()
            else:
                F.cross_entropy(wrapped(x), y).backward()
        private.step()
    result = found(model, private.history, private.epsilon(1e-3))
    private.detach()
    assert "_ddp_params_and_buffers_to_ignore" not in vars(model)
    return result


# --------------------------------------------------------------------------- Trainer of transformers


def _trainer(rank: int, world: int, folder: Path, **options: Any) -> Any:
    from ..hf_models import bert, private, texts, trainer_of, transformers

    transformers.trainer_callback.logger.setLevel(logging.ERROR)
    accelerator(rank)
    no_accelerator()  # the trainer makes its own
    privacy = private(noise_multiplier=1.0, noise_seed=3, verify=True, **options.pop("privacy", {}))
    given = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "learning_rate": 0.01,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // world, "lr_scheduler_type": "linear",
        "logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, **options,
    }  # fmt: skip
    data = texts(40, "each")  # of different lengths: the logged loss is a mean over the tokens of all processes
    model = bert("TokenClassification", num_labels=3)
    return trainer_of(folder, model, data, privacy, more={"eval_dataset": data[:10]}, **given)


def trainer(rank: int, world: int) -> Any:
    """A run, and one that is taken up from its checkpoint: the same weights, logs and files, by the first process."""
    folder = shared_folder(world)
    whole = _trainer(rank, world, folder)
    whole.train()
    logs = [{k: v for k, v in e.items() if k in ("loss", "epsilon")} for e in whole.state.log_history]
    assert isinstance(whole.model_wrapped, DistributedDataParallel) == (world > 1)
    again = _trainer(rank, world, folder)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert again.history == whole.history
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(again.model.parameters(), whole.model.parameters(),
                                                              strict=True))  # fmt: skip
    assert (folder / "privacy.json").exists() and (folder / "checkpoint-6" / "optimizer.pt").exists()
    assert sorted(each.name for each in folder.glob("checkpoint-6/rng*")) == (
        ["rng_state.pth"] if world == 1 else [f"rng_state_{r}.pth" for r in range(world)]
    )
    return *found(whole.model, whole.history, whole.epsilon()), [e for e in logs if e]


def trainer_refused(rank: int, world: int) -> None:
    """What one process refuses before the first step, all refuse; and so in a step."""
    from fastdp.hf.arguments import ArgumentError

    folder = shared_folder(world)
    with pytest.raises(ArgumentError, match="torch_compile=True with 2 processes"):
        _trainer(rank, world, folder, torch_compile=True)
    with pytest.raises(StepError, match="graphed works in one process"):
        _trainer(rank, world, folder, privacy={"graphed": True}).train()
    made = _trainer(rank, world, folder)
    if rank:
        made.train_dataset = iter(())
    with pytest.raises(FastDPError, match="iterable only"):
        made.train()
    made = _trainer(rank, world, folder)
    if rank:
        made.add_callback(_Poisons(made))
    with pytest.raises(FastDPError, match="spoilt"):
        made.train()
    assert made.history in ([], [(1.0, 0.2, 2)])


def _Poisons(made: Any) -> Any:
    """From the third step on, the loss of this process is refused."""
    from transformers import TrainerCallback

    class Poisons(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                made._losses = self.refuse

        def refuse(self, *_: Any, **__: Any) -> Any:
            raise StepError("the loss is spoilt")

    return Poisons()


CASES: dict[str, Any] = {
    case.__name__: case for case in (accelerated, accelerate_refused, wrapped_later, trainer, trainer_refused)
}
CASES.update(LIGHTNING)
CASES.update(IN_PARTS)
CASES.update(OPACUS)
CASES.update(OPACUS_FSDP)
CASES.update(FINETUNE)
CASES.update(FSDP)


def check_loop(name: str, one: Any, two: list[Any]) -> str:
    """Two ranks have done what one process has. Returns the largest error of a weight, if it is compared."""
    check(two, name)
    if name not in ALONE:
        return "ok"
    check([one], name)
    weights, history, epsilon, *more = one[name]
    worst = 0.0
    for mine, spent, theirs, *others in (by_case[name] for by_case in two):
        assert spent == history and theirs == epsilon
        worst = max(worst, *(float(np.abs(np.subtract(p, q)).max()) for p, q in zip(mine, weights, strict=True)))
        assert mine == two[0][name][0]  # all processes hold the same, bit for bit
        for logs, truth in zip(others, more, strict=True):
            assert [log.keys() for log in logs] == [log.keys() for log in truth]
            for log, true in zip(logs, truth, strict=True):
                assert all(log[key] == pytest.approx(value, abs=1e-3) for key, value in true.items())
    assert worst < 1e-5
    return f"weights {worst:.0e}"


ALONE = [
    name for name in CASES if not {"refused", "secure", "resumed", "bits", "exact"} & set(name.split("_"))
]  # what one process runs, too

warnings.filterwarnings("ignore", message="noise_seed")
