"""`DPSeq2SeqTrainer`: DPTrainer for encoder-decoder models, whose evaluation may generate."""

from __future__ import annotations

import transformers

from .trainer import DPTrainer


class DPSeq2SeqTrainer(DPTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """A `transformers.Seq2SeqTrainer` that trains with differential privacy, as `DPTrainer` does.

    With predict_with_generate and the generation fields of Seq2SeqTrainingArguments, evaluation and prediction
    generate as they do there. Training does not.

    Args:
        privacy: a `PrivacyArguments`. All other arguments are those of Seq2SeqTrainer.
    """

    _reads = ("Seq2SeqTrainingArguments",)
