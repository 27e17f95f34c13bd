"""What `DPTrainer` does with each field of TrainingArguments. Made for transformers 5; a test keeps it complete.

The trainer enforces `check`. `python -m fastdp.hf.arguments` prints the table of docs/huggingface.md.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

from ..errors import FastDPError
from . import more_arguments
from .combining import NOT_PRIVATE
from .fields import Field, no_effect, refused, supported


class ArgumentError(FastDPError, ValueError):
    """A field of TrainingArguments has a value that private training refuses."""


def _lays_exactly(config: dict[str, Any]) -> bool:
    """Whether parts by this fsdp_config are those that private training knows. Words are those of a file, too."""
    said = {name.removeprefix("fsdp_"): str(value).lower() for name, value in config.items()}
    unknown = ("cpu_offload", "offload_params", "cpu_ram_efficient_loading", "xla", "activation_checkpointing_offload")
    return said.get("version", "2") == "2" and all(said.get(name, "false") in ("false", "none") for name in unknown)


_SCRIPT, _EVAL = "read by scripts only", "evaluation is the ordinary trainer's"
_TRACK, _HUB = "reporting", "the hub gets the model and privacy.json, never a key"
_ONE = "fastdp sums over processes by itself, once a step"
_RANKS = "of the processes that torchrun starts"
_LOADER = "passed to the loader"

OPTIMIZERS = {
    "adamw_torch": "",
    "adamw_torch_fused": "",
    "sgd": "",
    "adagrad": "",
    "rmsprop": "",
    "adafactor": "its relative step sizes follow the noisy weights and gradients",
}

FIELDS: dict[str, Field] = {
    "output_dir": supported("privacy.json, which records what has been spent, is kept there"),
    "per_device_train_batch_size": supported(
        "the largest physical batch of a process; times accumulation and processes, the expected batch size"
    ),
    "num_train_epochs": supported("an epoch is ceil(1 / sample rate) noised steps"),
    "max_steps": supported("noised steps"),
    "learning_rate": supported(),
    "lr_scheduler_type": supported(
        "counts noised steps; reduce_lr_on_plateau and greedy follow a metric, which the guarantee does not cover"
    ),
    "lr_scheduler_kwargs": supported(),
    "warmup_steps": supported("noised steps"),
    "optim": refused(
        "private: " + ", ".join(OPTIMIZERS) + ". Others need a package, or take gradients apart before they are "
        "clipped; any torch optimizer goes in as optimizers=(optimizer, None)",
        "lomo",
        lambda value: str(getattr(value, "value", value)) in OPTIMIZERS,
    ),
    "optim_args": supported(),
    "weight_decay": supported(),
    "adam_beta1": supported(),
    "adam_beta2": supported(),
    "adam_epsilon": supported(),
    "optim_target_modules": refused("for GaLore and APOLLO, which are refused", ["attn"]),
    "gradient_accumulation_steps": supported("multiplies the expected batch size; one noise, one step for all"),
    "average_tokens_across_devices": no_effect("every sample's loss is a mean over its own tokens"),
    "max_grad_norm": refused(
        "clips the summed gradient after the noise. It is off here; leave the default, or set 0. The clipping norm of "
        "samples is PrivacyArguments.per_sample_max_grad_norm",
        0.5,
        lambda value: value in (0, 1.0, None),
    ),
    "label_smoothing_factor": supported("within each sample; refused for regression, several labels and answers"),
    "bf16": supported("autocast"),
    "fp16": refused("the gradient scaler skips steps by what the data's gradients are; use bf16", True),
    "bf16_full_eval": no_effect(_EVAL),
    "fp16_full_eval": no_effect(_EVAL),
    "tf32": supported("norms and sums keep float32's accuracy"),
    "activation_checkpointing": supported(),
    "activation_checkpointing_kwargs": refused(
        "offload moves saved tensors in a way that private training has not been tried with",
        {"offload": True},
        lambda value: not isinstance(value, dict) or not value.get("offload"),
    ),
    "gradient_checkpointing": supported("reentrant or not"),
    "gradient_checkpointing_kwargs": refused(
        "offload moves saved tensors in a way that private training has not been tried with",
        {"offload": True},
        lambda value: not isinstance(value, dict) or not value.get("offload"),
    ),
    "torch_compile": supported("the model is compiled before it is made private"),
    "torch_compile_backend": supported(),
    "torch_compile_mode": supported(),
    "use_liger_kernel": refused("its fused loss is a mean over the batch's tokens", True),
    "liger_kernel_config": no_effect("use_liger_kernel is refused"),
    "use_cache": supported(),
    "neftune_noise_alpha": refused(
        "its noise is scaled by the length to which the batch is padded, so a sample's gradient depends on the others",
        5.0,
    ),
    "torch_empty_cache_steps": supported(),
    "auto_find_batch_size": refused(
        "it begins the run anew after steps that were noised and seen; choose per_device_train_batch_size (it does not "
        "change the result: raise gradient_accumulation_steps instead)",
        True,
    ),
    "logging_strategy": supported("the logged loss is a plain mean over private data: not covered by the guarantee"),
    "logging_steps": supported("noised steps"),
    "logging_first_step": supported(),
    "log_on_each_node": no_effect(_TRACK),
    "logging_nan_inf_filter": no_effect("only on what is logged; samples without a finite gradient count 0"),
    "include_num_input_tokens_seen": supported("not covered by the guarantee"),
    "log_level": no_effect(_TRACK),
    "log_level_replica": no_effect(_TRACK),
    "disable_tqdm": no_effect(_TRACK),
    "report_to": no_effect(_TRACK),
    "run_name": no_effect(_TRACK),
    "project": no_effect(_TRACK),
    "trackio_space_id": no_effect(_TRACK),
    "trackio_bucket_id": no_effect(_TRACK),
    "trackio_static_space_id": no_effect(_TRACK),
    "eval_strategy": no_effect(_EVAL),
    "eval_steps": no_effect(_EVAL + "; noised steps"),
    "eval_delay": no_effect(_EVAL),
    "per_device_eval_batch_size": no_effect(_EVAL),
    "prediction_loss_only": no_effect(_EVAL),
    "eval_on_start": no_effect(_EVAL),
    "eval_do_concat_batches": no_effect(_EVAL),
    "eval_use_gather_object": no_effect(_EVAL),
    "eval_accumulation_steps": no_effect(_EVAL),
    "include_for_metrics": no_effect(_EVAL),
    "batch_eval_metrics": no_effect(_EVAL),
    "save_only_model": supported("such a checkpoint cannot be resumed from"),
    "save_strategy": supported("every checkpoint holds the accountant and no key"),
    "save_steps": supported("noised steps"),
    "save_on_each_node": supported("by default the first process saves"),
    "save_total_limit": supported(),
    "enable_jit_checkpoint": supported(),
    "push_to_hub": supported(_HUB),
    "hub_token": no_effect(_HUB),
    "hub_private_repo": no_effect(_HUB),
    "hub_model_id": no_effect(_HUB),
    "hub_strategy": no_effect(_HUB),
    "hub_always_push": no_effect(_HUB),
    "hub_revision": no_effect(_HUB),
    "load_best_model_at_end": supported("the choice is covered only if the evaluation data is public"),
    "metric_for_best_model": supported("the choice is covered only if the evaluation data is public"),
    "greater_is_better": supported(),
    "ignore_data_skip": no_effect("the loader restores its place by itself"),
    "restore_callback_states_from_checkpoint": no_effect("callbacks"),
    "full_determinism": supported(),
    "seed": supported("dropout and new weights; never noise or sampling, which are secret"),
    "data_seed": refused(
        "sampling must be secret; for experiments PrivacyArguments.noise_seed repeats sampling and noise", 3
    ),
    "use_cpu": supported(),
    "accelerator_config": no_effect("the training loader is not Accelerate's"),
    "parallelism_config": refused("DPTrainer takes whole copies, or fsdp; a loop of your own takes more", object()),
    "dataloader_drop_last": no_effect("Poisson batches have no last one that is smaller"),
    "dataloader_num_workers": supported(_LOADER),
    "dataloader_pin_memory": supported(_LOADER),
    "dataloader_persistent_workers": supported(_LOADER),
    "dataloader_prefetch_factor": supported(_LOADER),
    "dataloader_multiprocessing_context": supported(_LOADER),
    "dataloader_in_order": refused("physical batches would be mixed up", False, lambda value: value is not False),
    "remove_unused_columns": supported(),
    "label_names": supported("for evaluation; training takes labels, or start_positions and end_positions"),
    "train_sampling_strategy": refused(
        "Poisson sampling takes its place: batches of like lengths, or in order, have no accountant",
        "group_by_length",
        lambda value: value == "random",
    ),
    "length_column_name": no_effect("for grouping by length, which is refused"),
    "ddp_find_unused_parameters": no_effect(_ONE),
    "ddp_bucket_cap_mb": no_effect(_ONE),
    "ddp_broadcast_buffers": no_effect(_ONE),
    "ddp_static_graph": refused("it counts gradients that never come", True),
    "ddp_backend": supported(_RANKS),
    "ddp_timeout": supported(_RANKS),
    "fsdp": supported("FSDP2, of several processes; True, or the older words"),
    "fsdp_config": refused(
        "version 1 (FSDP1) joins parameters into flat ones; of version 2, cpu_offload, cpu_ram_efficient_loading and "
        "xla are refused: the checks before the first step take a model that is whole on every process",
        {"version": 1},
        lambda value: not isinstance(value, dict) or _lays_exactly(value),
    ),
    "deepspeed": refused("its engine averages gradients and steps by itself", {"zero_optimization": {"stage": 2}}),
    "debug": refused("hooks for underflow read every activation; not tried", ["underflow_overflow"]),
    "skip_memory_metrics": no_effect(_TRACK),
    "do_train": no_effect(_SCRIPT),
    "do_eval": no_effect(_SCRIPT),
    "do_predict": no_effect(_SCRIPT),
    "resume_from_checkpoint": no_effect(_SCRIPT + "; trainer.train(resume_from_checkpoint=...) resumes"),
    "local_rank": supported(_RANKS),
}


def check(args: Any, taken: Iterable[str] = more_arguments.TABLES) -> None:
    """Raise ArgumentError, with the field, its value and the reason, if private training refuses a field.

    Subclasses' fields have tables of their own (`more_arguments`), of which the trainer takes some. A field that none
    of them contains (of a newer transformers, or another subclass) must have its class's default.
    """
    kinds = {parent.__name__ for parent in type(args).__mro__}
    for trainer, why in NOT_PRIVATE.items():
        if trainer.replace("Trainer", "Config") in kinds:
            raise ArgumentError(f"{type(args).__name__} is for {trainer}, which is not made private: {why}")
    fields = FIELDS | more_arguments.of(type(args), taken)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        known = fields.get(field.name)
        if known is None:
            if value != _default(field) and value != _made_by_default(args, field.name):
                reader = more_arguments.reader_of(type(args), field.name)
                raise ArgumentError(
                    f"{type(args).__name__}.{field.name}={_short(value)}: "
                    + (
                        f"this trainer does not read the field, fastdp.hf.{reader} does"
                        if reader
                        else "fastdp.hf does not know this field, so it does not know what it means for privacy; leave "
                        "its default"
                    )
                )
        elif not known.accepts(value):
            raise ArgumentError(f"{type(args).__name__}.{field.name}={_short(value)} is refused: {known.why}")
    if getattr(args, "n_gpu", 0) > 1:
        raise ArgumentError(
            f"one process with {args.n_gpu} GPUs: gradients of several devices would be added up before they are "
            "private. Start one process a GPU (torchrun), or show it one (CUDA_VISIBLE_DEVICES=0)"
        )
    if getattr(args, "world_size", 1) > 1 and getattr(args, "torch_compile", False):
        raise ArgumentError(
            f"torch_compile=True with {args.world_size} processes: the wrapper around the model would be compiled with "
            "it. Leave it out"
        )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _made_by_default(args: Any, name: str) -> Any:
    """What an object of this class has there if nothing is said: __post_init__ may replace a field's default."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(type(args)(output_dir=args.output_dir), name, None)
    except (TypeError, ValueError, RuntimeError):
        return None


def _short(value: Any) -> str:
    text = repr(getattr(value, "value", value))
    return text if len(text) <= 60 else text[:57] + "..."


def table(fields: dict[str, Field] = FIELDS) -> str:
    """Return the fields as a table in Markdown, with the refused ones first and those of one remark together."""
    order = ("refused", "supported", "no effect")
    rows: dict[tuple[str, str], list[str]] = {}
    for name, field in fields.items():
        rows.setdefault((field.status, field.why), []).append(f"`{name}`")
    lines = ["| field | | remark |", "| --- | --- | --- |"]
    for status in order:
        lines += [f"| {', '.join(names)} | {kind} | {why} |" for (kind, why), names in rows.items() if kind == status]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    for kind, more in more_arguments.TABLES.items():
        print(f"\n{kind}:\n\n{table(more)}")
