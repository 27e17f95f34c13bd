"""Which trainers a private one may be combined with, as in `class Mine(DPTrainer, Other)`, and why others are refused.

A trainer behind DPTrainer makes the model, the data and evaluation; its training loss and its batches are replaced.
Where it has its own, which nobody has looked at, the replacement would be silent.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers

from ..errors import StepError

_ONLINE = (
    "it samples completions of the prompts from the model that is being trained, and normalizes rewards over a batch. "
    "The prompts are the records: what is generated from them, the rewards, and their group's mean and deviation "
    "would each have to be a function of one record, which TRL's batches are not. Train on the private data by "
    "DPSFTTrainer or DPDPOTrainer; GRPO on public prompts afterwards costs no privacy (docs/huggingface.md)"
)
NOT_PRIVATE = {
    "GRPOTrainer": _ONLINE,
    "RLOOTrainer": _ONLINE,
    "OnlineDPOTrainer": _ONLINE,
    "KTOTrainer": "its loss subtracts a divergence that is estimated over the batch, which couples samples; pairs of "
    "preferences train by DPDPOTrainer, and good completions alone by DPSFTTrainer",
    "RewardTrainer": "fastdp has no trainer for it yet: in a loop of your own, a pair is a sample of two rows "
    "(rows_per_sample=2, docs/rows.md)",
    "DistillationTrainer": "it generates from the student on the batch's prompts; nobody has looked at its batches yet",
}
REFUSED = NOT_PRIVATE | {
    "SFTTrainer": "use fastdp.hf.DPSFTTrainer",
    "DPOTrainer": "use fastdp.hf.DPDPOTrainer",
    "SentenceTransformerTrainer": "use fastdp.hf.DPSentenceTransformerTrainer",
    "CrossEncoderTrainer": "fastdp has no trainer for it: a cross-encoder is a sequence classifier of transformers, "
    "which DPTrainer trains",
}
# what DPTrainer replaces, so that another trainer's would be dropped without a word
REPLACED = ("compute_loss", "training_step", "get_train_dataloader", "get_batch_samples", "num_examples")


class Combining:
    """The part of `DPTrainer` that looks at the classes it is combined with."""

    _reads: tuple[str, ...] = ()  # subclasses of TrainingArguments whose fields it reads (argument_table.py)
    _looked_at: tuple[str, ...] = ()  # trainers behind this class whose replaced methods are known

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        order = [c for c in cls.__mro__ if issubclass(c, transformers.Trainer)]
        mine = max(i for i, c in enumerate(order) if issubclass(c, Combining))
        for place, other in enumerate(order):
            if other is transformers.Trainer or _is_ours(other):
                continue
            if other.__name__ in cls._looked_at:
                if place < mine:
                    raise TypeError(
                        f"class {cls.__name__}: the private trainer must stand before {other.__name__} among its bases"
                    )
                continue
            kinds = [c.__name__ for c in other.__mro__]
            if not any(kind in cls._looked_at for kind in kinds):
                for kind in kinds:
                    if kind in REFUSED:
                        raise StepError(f"class {cls.__name__}: {kind} is not made private this way: {REFUSED[kind]}")
            own = [name for name in REPLACED if name in vars(other)]
            if own and place > mine:
                raise StepError(
                    f"class {cls.__name__}: {other.__name__} has its own {', '.join(own)}, which DPTrainer would "
                    "replace without a word. Derive from DPTrainer and override compute_loss there (it returns one "
                    "loss a sample [B]), or give it compute_loss_func="
                )

    def _named(self, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the ordinary trainer that this one makes private, by their names."""
        behind = (c for c in type(self).__mro__ if issubclass(c, transformers.Trainer) and not _is_ours(c))
        made_by = next(c for c in behind if not issubclass(c, Combining) and "__init__" in vars(c))
        signature = inspect.signature(made_by.__init__)  # type: ignore[misc]
        found = dict(signature.bind(self, *positional, **named).arguments)
        for name, kind in signature.parameters.items():
            if kind.kind is inspect.Parameter.VAR_KEYWORD:
                found |= found.pop(name, {})
            elif kind.kind is inspect.Parameter.VAR_POSITIONAL:
                found.pop(name, None)
        return found


def _is_ours(trainer: type) -> bool:
    return trainer.__module__.startswith("fastdp.")
