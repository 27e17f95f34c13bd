"""Accelerate and Trainer lay a model in parts (FSDP2): the steps of one process, by two."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from fastdp.distributed.sharded import is_sharded
from fastdp.errors import FastDPError, ParameterError, StepError

from ..by_hand import network, records
from .fsdp_on_cpu import allow
from .models import adamw, whole
from .parts import Found, accelerator, found, loader, no_accelerator, sgd, shared_folder


def plugin(world: int, **options: Any) -> dict[str, Any]:
    """For one process there is none."""
    if world == 1:
        return {}
    from accelerate.utils import FullyShardedDataParallelPlugin

    allow()
    given = {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 10, **options}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**given)}


def accelerated_parts(rank: int, world: int) -> Found:
    """`prepare` lays the model in parts once the optimizer was made; every batch makes a forward."""
    prepared = accelerator(rank, step_scheduler_with_optimizer=False, **plugin(world))
    plain = network()
    with torch.no_grad():
        plain(records()[:2][0])
    private, batches = sgd(plain), loader()
    schedule = torch.optim.lr_scheduler.StepLR(private, 2, 0.5)
    wholes = [weakref.ref(p) for p in plain.parameters()]
    model, optimizer, schedule = prepared.prepare(plain, private, schedule)
    gc.collect()
    assert all(p() is None for p in wholes) == (world > 1)  # nothing holds the whole model beside its parts
    for _ in range(2):
        for x, y in batches:
            with prepared.accumulate(model):
                if len(x) or world > 1:
                    prepared.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                if private.stepped:
                    schedule.step()
                optimizer.zero_grad()
    assert (private._privacy.replica.shards is not None) == (world > 1) and private._privacy.deferred_setup is None
    result = found(model, private.history, private.epsilon(1e-3))
    private.detach()
    return result


FULL = {"transformer_layer_cls_to_wrap": ["BertLayer"]}
PARTS = {
    **FULL,
    "state_dict_type": "SHARDED_STATE_DICT",
    "activation_checkpointing": True,
    "reshard_after_forward": True,
}


def _trainer(rank: int, world: int, folder: Path, model: Any, config: Any, **options: Any) -> Any:
    from ..hf_models import private, texts, trainer_of, transformers

    transformers.utils.logging.set_verbosity_error()
    accelerator(rank)
    no_accelerator()
    if world > 1:
        allow()
        options |= {"fsdp": True, "fsdp_config": dict(config)}
    privacy = private(noise_multiplier=1.0, noise_seed=3, verify=True, **options.pop("privacy", {}))
    labels = options.pop("labels", "class")
    given = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // world, "lr_scheduler_type": "linear",
        "logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, **options,
    }  # fmt: skip
    data = texts(40, labels)
    return trainer_of(folder, model, data, privacy, more={"eval_dataset": data[:10]}, **given)


def _trained(
    rank: int, world: int, make: Any, config: Any, files: str = "full", resumes: bool = True, **options: Any
) -> Any:
    """A run, and one that is taken up from its checkpoint."""
    folder, saved = shared_folder(world), "optimizer.bin" if files == "full" else "optimizer_0"
    run = _trainer(rank, world, folder, make(), config, **options)
    run.train()
    assert is_sharded(run.model) == (world > 1)
    logs = [{k: v for k, v in e.items() if k in ("loss", "epsilon")} for e in run.state.log_history]
    assert (folder / "privacy.json").exists() and (folder / "checkpoint-2" / "privacy.json").exists()
    if resumes:
        again = _trainer(rank, world, folder, make(), config, **options)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert again.history == run.history and again.epsilon() == run.epsilon()
        for p, q in zip(again.model.parameters(), run.model.parameters(), strict=True):
            assert torch.allclose(whole(p), whole(q), atol=1e-6)
    run.save_model(str(folder / "last"))
    result = found(run.model, run.history, run.epsilon())  # by then the first process has saved it
    assert world == 1 or (folder / "checkpoint-4" / saved).exists()
    weights = "adapter_model.safetensors" if hasattr(run.model, "peft_config") else "model.safetensors"
    last = {path.name for path in (folder / "last").iterdir()}
    assert "privacy.json" in last and (weights in last) == (world == 1 or files == "full")
    return *result, [e for e in logs if e]


def trainer_parts(rank: int, world: int) -> Any:
    from ..hf_models import bert

    return _trained(rank, world, lambda: bert(num_labels=3), FULL)


def trainer_sharded_files(rank: int, world: int) -> Any:
    """Checkpoints in parts, layers that are computed again, a sample rate at which some processes have no record."""
    from fastdp.hf.parts import InParts

    from ..hf_models import bert

    stood_in = torch.zeros(1)
    stand_in = InParts._stand_in
    InParts._stand_in = lambda *given: (stood_in.add_(1), stand_in(*given))[1]
    try:
        options = {"privacy": {"sample_rate": 0.06}, "weight_decay": 0.1}
        result = _trained(rank, world, lambda: bert(num_labels=3), PARTS, "sharded", **options)
    finally:
        InParts._stand_in = stand_in
    dist.all_reduce(stood_in)
    assert (float(stood_in) > 0) == (world > 1)
    return result


def accelerated_files(rank: int, world: int) -> Any:
    """Clipping groups, and a run that is taken up from Accelerate's files, of both kinds, before its first forward."""
    results = []
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        folder, parts = shared_folder(world), {"state_dict_type": kind}
        for begun in (False, True):
            prepared = accelerator(rank, **plugin(world, **parts))
            plain = network()
            groups = [{"params": list(part.parameters()), "max_grad_norm": 0.2} for part in (plain[0], plain[2])]
            private = adamw(plain, seed=3, expected_batch_size=None, sample_rate=None, style=groups)
            model, optimizer = prepared.prepare(plain, private)
            batches = loader(None)
            prepared.register_for_checkpointing(batches)
            if begun:
                prepared.load_state(str(folder))
                assert [steps for *_, steps in private.history] == [4]
            for x, y in batches:
                prepared.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if not begun:
                prepared.save_state(str(folder))
                private.detach()
        results.append(found(model, private.history, private.epsilon(1e-3)))
        private.detach()
    assert results[0] == results[1]
    return results[0]


def accelerate_parts_refused(rank: int, world: int) -> None:
    prepared = accelerator(rank, **plugin(world))
    plain = network()
    private = sgd(plain, expected_batch_size=4, sample_rate=0.1)
    x, y = records()[:4]
    model, optimizer = prepared.prepare(plain, private)
    with pytest.raises(StepError, match="if the model itself is called next"):
        model[0](x)
    private.detach()
    prepared = accelerator(rank, **plugin(world))
    plain = network()
    private = sgd(plain, expected_batch_size=4, sample_rate=0.1)
    F.cross_entropy(plain(x), y).backward()
    private.step()
    model, optimizer = prepared.prepare(plain, private)
    with pytest.raises(StepError, match="it has trained the whole model before"):
        model(x)
    private.detach()
    prepared = accelerator(rank, **plugin(world))
    plain, private = network(), None
    private = sgd(plain, expected_batch_size=4, sample_rate=0.1)
    fully_shard(plain)
    with pytest.raises(ParameterError, match="the parts are not the optimizer's parameters"):
        plain(x)
    private.detach()
    plain = network()
    if rank:
        nn.init.zeros_(plain[0].weight)
    with pytest.raises(StepError, match="weights"):  # Accelerate makes parts of each process's own weights
        sgd(plain)
    prepared = accelerator(rank, **plugin(world, fsdp_version=1, auto_wrap_policy="no_wrap"))
    with pytest.raises(StepError, match="fsdp_version=2"):
        sgd(network())
    accelerator(rank)


def trainer_parts_refused(rank: int, world: int) -> None:
    from fastdp.hf.arguments import ArgumentError

    from ..hf_models import bert

    folder = shared_folder(world)
    for config in ({"version": 1}, {**FULL, "cpu_offload": True}, {**FULL, "cpu_ram_efficient_loading": True}):
        with pytest.raises(ArgumentError, match="fsdp_config=.*refused"):
            _trainer(rank, world, folder, bert(num_labels=3), config)
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    made = _trainer(rank, world, folder, bert(num_labels=3, seed=rank), FULL)
    with pytest.raises(StepError, match="weights"):
        made.train()
    made = _trainer(rank, world, folder, bert(num_labels=3), FULL, max_steps=2, eval_strategy="no")
    made.train()
    sharded = _trainer(rank, world, folder, bert(num_labels=3), PARTS)
    with pytest.raises(FastDPError, match="other settings of fsdp"):
        sharded.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


CASES: dict[str, Any] = {
    case.__name__: case
    for case in (
        accelerated_parts,
        accelerated_files,
        accelerate_parts_refused,
        trainer_parts,
        trainer_sharded_files,
        trainer_parts_refused,
    )
}
