"""What the private trainers do with the fields that subclasses of TrainingArguments add, class by class.

Made for transformers 5, TRL 1.16 and sentence-transformers 6.2; a test keeps the tables complete for those installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .fields import Field, no_effect, refused, supported

PACKED = (
    "it joins several records into one block, so that the block would become the protected record: no person could be "
    "told how many of their records, and what parts of them, one epsilon covers. Leave it off; fastdp batches records "
    "of different lengths exactly"
)
JOINED = "it joins the samples of a batch into one row, in which no sample has a gradient of its own; leave it off"
_ONLY_EVAL = "evaluation is the ordinary trainer's"
_LOADS = "loads the model"
_TEXT = "how a record becomes tokens"
_LIGER = "leave it off"
_OFFLOAD = (
    "it moves saved tensors in a way that private training has not been tried with; gradient_checkpointing saves memory"
)
_ROUTERS = "the auxiliary loss of routers balances experts over the whole batch, which couples samples; set it to 0.0"

SEQ2SEQ: dict[str, Field] = {
    "sortish_sampler": refused("Poisson sampling takes its place: batches of like lengths have no accountant", True),
    "predict_with_generate": no_effect(_ONLY_EVAL),
    "generation_max_length": no_effect(_ONLY_EVAL),
    "generation_num_beams": no_effect(_ONLY_EVAL),
    "generation_config": no_effect(_ONLY_EVAL),
}

_TRL: dict[str, Field] = {
    "model_init_kwargs": supported(_LOADS),
    "trust_remote_code": supported(_LOADS),
    "router_aux_loss_coef": refused(_ROUTERS, 0.01, lambda value: not value),
    "dataset_num_proc": supported(_TEXT),
    "max_length": supported("records are cut one by one"),
    "truncation_mode": supported("records are cut one by one"),
    "pad_to_multiple_of": supported("gives batches few sizes, for torch_compile and graphed"),
    "activation_offloading": refused(_OFFLOAD, True),
    "pad_token": supported(_TEXT),
    "padding_free": refused(JOINED, True),
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
    "eval_packing": no_effect(_ONLY_EVAL),
    "completion_only_loss": supported("a sample's loss is the mean over its own completion's tokens"),
    "assistant_only_loss": supported("a sample's loss is the mean over its own assistant turns' tokens"),
    "loss_type": refused(
        "nll and dft have a loss of each sample; of another, fastdp does not know it",
        "unknown",
        lambda value: value in ("nll", "dft", "chunked_nll"),
    ),
}

COUPLING_PAIRS = ("aot", "aot_unpaired")
PAIR_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sft", "sigmoid_norm",
)  # fmt: skip


def _uncoupled(value: Any) -> bool:
    return all(name in PAIR_LOSSES for name in ([value] if isinstance(value, str) else value))


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
        _uncoupled,
    ),
    "loss_weights": supported(),
    "ld_alpha": supported("counts the tokens of its own pair"),
    "f_divergence_type": supported(),
    "f_alpha_divergence_coef": supported(),
    "label_smoothing": supported("of robust and exo_pair"),
    "beta": supported(),
    "use_weighting": supported("a pair's weight is of its own log probabilities"),
    "discopop_tau": supported(),
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

TABLES = {
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


def of(arguments: type, taken: Iterable[str] = TABLES) -> dict[str, Field]:
    """The fields that a class of arguments, or one it derives from, adds to TrainingArguments.

    taken: the classes whose fields the trainer at hand reads.
    """
    found: dict[str, Field] = {}
    for parent in reversed(arguments.__mro__):
        if parent.__name__ in taken:
            found |= TABLES.get(parent.__name__, {})
    return found


def reader_of(arguments: type, name: str) -> str | None:
    """The private trainer that reads a field which this class of arguments adds, if there is one."""
    kinds = (parent.__name__ for parent in arguments.__mro__)
    return next((READERS[kind] for kind in kinds if name in TABLES.get(kind, {})), None)
