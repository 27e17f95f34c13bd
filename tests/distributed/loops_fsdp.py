"""Accelerate and Trainer lay a model in parts (FSDP2): the steps of one process, by two."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.distributed.sharded import is_sharded

from ..by_hand import network, records
from .fsdp_on_cpu import allow
from .models import whole
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
    assert (private._privacy.replica.shards is not None) == (world > 1) and private._privacy.waits is None
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


def _trained(rank: int, world: int, make: Any, config: Any, files: str = "full", **options: Any) -> Any:
    """A run, and one that is taken up from its checkpoint."""
    folder, saved = shared_folder(world), "optimizer.bin" if files == "full" else "optimizer_0"
    run = _trainer(rank, world, folder, make(), config, **options)
    run.train()
    assert is_sharded(run.model) == (world > 1)
    logs = [{k: v for k, v in e.items() if k in ("loss", "epsilon", "eval_loss")} for e in run.state.log_history]
    assert (folder / "privacy.json").exists() and (folder / "checkpoint-2" / "privacy.json").exists()
    again = _trainer(rank, world, folder, make(), config, **options)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert again.history == run.history and again.epsilon() == run.epsilon()
    for p, q in zip(again.model.parameters(), run.model.parameters(), strict=True):
        assert torch.allclose(whole(p), whole(q), atol=1e-6)
    run.save_model(str(folder / "last"))
    result = found(run.model, run.history, run.epsilon())  # by then the first process has saved it
    assert world == 1 or (folder / "checkpoint-4" / saved).exists()
    assert {"privacy.json", *(["model.safetensors"] if files == "full" else [])} <= {
        path.name for path in (folder / "last").iterdir()
    }
    return *result, [e for e in logs if e]


def trainer_parts(rank: int, world: int) -> Any:
    from ..hf_models import bert

    return _trained(rank, world, lambda: bert(num_labels=3), FULL)


def trainer_sharded_files(rank: int, world: int) -> Any:
    """Checkpoints in parts, layers that are computed again, a sample rate at which some processes have no record."""
    from ..hf_models import bert

    options = {"privacy": {"sample_rate": 0.06}, "weight_decay": 0.1}
    return _trained(rank, world, lambda: bert(num_labels=3), PARTS, "sharded", **options)


CASES: dict[str, Any] = {case.__name__: case for case in (accelerated_parts, trainer_parts, trainer_sharded_files)}
