"""The treatment of each field of TrainingArguments, and of the fields that its subclasses add.

Made for transformers 5, TRL 1.16 and sentence-transformers 6.2; tests keep the tables complete for those installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Field(NamedTuple):
    """The treatment of a field.

    status: "supported" (part of training, and works), "no effect" (on training steps and on privacy), or "refused" (for
    values that `accepts` rejects; `example` is one of them). why: a remark, or the reason.
    """

    status: str
    why: str = ""
    accepts: Callable[[Any], bool] = lambda value: True
    example: Any = None


def off(value: Any) -> bool:
    """Whether a value asks for nothing."""
    return value is None or value is False or value in ("", [], {})


def supported(why: str = "") -> Field:
    """A field that works as it does without privacy."""
    return Field("supported", why)


def no_effect(why: str) -> Field:
    """A field that changes neither training nor privacy."""
    return Field("no effect", why)


def refused(why: str, example: Any, accepts: Callable[[Any], bool] = off) -> Field:
    """A field whose other values are refused."""
    return Field("refused", why, accepts, example)


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
PACKED = (
    "it joins several records into one block, so that the block would become the protected record: no person could be "
    "told how many of their records, and what parts of them, one epsilon covers. Leave it off; fastdp batches records "
    "of different lengths exactly"
)
_LOADS = "loads the model"
_TEXT = "how a record becomes tokens"
_OFFLOADED = refused(
    "offload moves saved tensors in a way that private training has not been tried with",
    {"offload": True},
    lambda value: not isinstance(value, dict) or not value.get("offload"),
)

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
    "activation_checkpointing_kwargs": _OFFLOADED,
    "gradient_checkpointing": supported("reentrant or not"),
    "gradient_checkpointing_kwargs": _OFFLOADED,
    "torch_compile": supported("for evaluation; training runs the model as it is"),
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

SEQ2SEQ: dict[str, Field] = {
    "sortish_sampler": refused("Poisson sampling takes its place: batches of like lengths have no accountant", True),
    "predict_with_generate": no_effect(_EVAL),
    "generation_max_length": no_effect(_EVAL),
    "generation_num_beams": no_effect(_EVAL),
    "generation_config": no_effect(_EVAL),
}

_TRL: dict[str, Field] = {
    "model_init_kwargs": supported(_LOADS),
    "trust_remote_code": supported(_LOADS),
    "router_aux_loss_coef": refused(
        "the auxiliary loss of routers balances experts over the whole batch, which couples samples; set it to 0.0",
        0.01,
        lambda value: not value,
    ),
    "dataset_num_proc": supported(_TEXT),
    "max_length": supported("records are cut one by one"),
    "truncation_mode": supported("records are cut one by one"),
    "pad_to_multiple_of": supported("gives batches few sizes, for graphed"),
    "activation_offloading": refused(
        "it moves saved tensors in a way that private training has not been tried with; gradient_checkpointing saves "
        "memory",
        True,
    ),
    "pad_token": supported(_TEXT),
    "padding_free": refused(
        "it joins the samples of a batch into one row, in which no sample has a gradient of its own; leave it off", True
    ),
}

SFT: dict[str, Field] = {
    **_TRL,
    "chat_template_path": supported(_TEXT),
    "dataset_text_field": supported(_TEXT),
    "dataset_kwargs": supported("skip_prepare_dataset: the records have input_ids and labels"),
    "eos_token": supported(_TEXT),
    "shuffle_dataset": no_effect("Poisson sampling takes its place"),
    "packing": refused(PACKED, True),
    "packing_strategy": no_effect("packing is refused"),
    "eval_packing": no_effect(_EVAL),
    "completion_only_loss": supported("a sample's loss is the mean over its own completion's tokens"),
    "assistant_only_loss": supported("a sample's loss is the mean over its own assistant turns' tokens"),
    "loss_type": refused(
        "nll is the mean over a sample's own tokens; of another, fastdp does not know a sample's part",
        "dft",
        lambda value: value in ("nll", "chunked_nll"),
    ),
}

COUPLING_PAIRS = ("aot", "aot_unpaired")
PAIR_LOSSES = (
    "sigmoid", "hinge", "ipo", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sft",
    "sigmoid_norm",
)  # fmt: skip
_UNKNOWN = "the losses that fastdp knows have no such weight; leave its default"


DPO: dict[str, Field] = {
    **_TRL,
    "disable_dropout": supported(),
    "precompute_ref_log_probs": supported(
        "each pair's log probabilities are computed from that pair alone, and kept in the dataset's cache, which is as "
        "private as the data"
    ),
    "precompute_ref_batch_size": supported(),
    "loss_type": refused(
        f"a pair's loss must be its own, as those of {', '.join(PAIR_LOSSES)} are; {' and '.join(COUPLING_PAIRS)} sort "
        "the log ratios of the whole batch, which couples pairs",
        ["aot"],
        lambda value: ({value} if isinstance(value, str) else set(value)) <= set(PAIR_LOSSES),
    ),
    "loss_weights": supported(),
    "ld_alpha": refused(_UNKNOWN, 0.3),
    "f_divergence_type": refused(
        "fastdp's losses are of the reverse KL divergence",
        "js_divergence",
        lambda value: getattr(value, "value", value) == "reverse_kl",
    ),
    "f_alpha_divergence_coef": no_effect("f_divergence_type is reverse_kl"),
    "label_smoothing": supported("of robust"),
    "beta": supported(),
    "use_weighting": refused(_UNKNOWN, True),
    "discopop_tau": no_effect("discopop is refused"),
    "sync_ref_model": supported("the reference is made of weights that are private already"),
    "ref_model_mixup_alpha": supported(),
    "ref_model_sync_steps": supported("noised steps"),
}

SENTENCES: dict[str, Field] = {
    "prompts": supported("one text, or one for each column"),
    "batch_sampler": refused(
        "Poisson sampling takes its place: a sampler that looks at the records, for duplicates or labels, has no "
        "accountant",
        "no_duplicates",
        lambda value: getattr(value, "value", value) == "batch_sampler",
    ),
    "multi_dataset_batch_sampler": no_effect("one training dataset; several are refused"),
    "router_mapping": supported(),
    "learning_rate_mapping": supported(),
    "warmup_ratio": supported("noised steps"),
}

# by the class that declares the fields: the fields, and the trainer that reads them
TABLES: dict[str, dict[str, Field]] = {
    "TrainingArguments": FIELDS,
    "Seq2SeqTrainingArguments": SEQ2SEQ,
    "SFTConfig": SFT,
    "DPOConfig": DPO,
    "BaseTrainingArguments": SENTENCES,  # of sentence-transformers
}
READERS = {
    "Seq2SeqTrainingArguments": "DPSeq2SeqTrainer",
    "SFTConfig": "DPSFTTrainer",
    "DPOConfig": "DPDPOTrainer",
    "BaseTrainingArguments": "DPSentenceTransformerTrainer",
}


def fields_of(arguments: type, read: Iterable[str] = READERS) -> dict[str, Field]:
    """The known fields of a class of arguments. read: the subclasses whose fields the trainer at hand reads."""
    found: dict[str, Field] = {}
    for parent in reversed(arguments.__mro__):
        if parent.__name__ in ("TrainingArguments", *read):
            found |= TABLES.get(parent.__name__, {})
    return found


def reader_of(arguments: type, name: str) -> str | None:
    """The private trainer that reads a field which this class of arguments adds, if there is one."""
    kinds = (parent.__name__ for parent in arguments.__mro__)
    return next((READERS[kind] for kind in kinds if kind in READERS and name in TABLES[kind]), None)
