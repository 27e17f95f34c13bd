"""MiniLM (22.7M) on SST-2 by `fastdp.hf.DPTrainer`: all parameters, or LoRA adapters.

    python examples/hf_trainer.py --data DIR --target_epsilon 3
    python examples/hf_trainer.py --data DIR --lora 8 --quick
    python examples/hf_trainer.py --data DIR --target_epsilon 3 --resume_from_checkpoint out/checkpoint-20

Every field of TrainingArguments and PrivacyArguments is an option too. DIR holds sst2_train.tsv and sst2_dev.tsv, lines
"sentence TAB label" with label 0 or 1.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from fastdp.hf import DPTrainer, PrivacyArguments

WHERE = (
    "no sst2_train.tsv and sst2_dev.tsv in --data. With a network: the Stanford Sentiment Treebank with two labels "
    "(https://nlp.stanford.edu/sentiment, 6,920 and 872 sentences), or datasets.load_dataset('glue', 'sst2'); write "
    "lines of sentence, tab, label (0 negative, 1 positive)."
)


@dataclass
class Options:
    """What is not an argument of training."""

    data: str = field(default="data", metadata={"help": "Folder with sst2_train.tsv and sst2_dev.tsv."})
    model: str = field(default="sentence-transformers/all-MiniLM-L6-v2", metadata={"help": "Hub name or folder."})
    lora: int = field(default=0, metadata={"help": "Rank of LoRA adapters; 0: train all parameters."})
    quick: bool = field(default=False, metadata={"help": "Four steps on 200 sentences."})


def read(folder: str, name: str, tokenizer: Any, limit: int | None) -> list[dict[str, Any]]:
    """Records of token ids and label."""
    path = Path(folder) / name
    if not path.is_file():
        raise SystemExit(WHERE)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:limit]
    tokens = tokenizer([row[0] for row in rows], truncation=True, max_length=64)["input_ids"]
    return [{"input_ids": ids, "labels": int(row[1])} for ids, row in zip(tokens, rows, strict=True)]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = transformers.HfArgumentParser((Options, transformers.TrainingArguments, PrivacyArguments))
    parser.set_defaults(
        output_dir="out", per_device_train_batch_size=64, gradient_accumulation_steps=12, num_train_epochs=4,
        learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=5, eval_strategy="epoch", report_to="none",
        target_epsilon=3.0, delta=1e-5,
    )  # fmt: skip
    options, arguments, privacy = parser.parse_args_into_dataclasses()
    if options.quick:
        arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = 16, 2
        arguments.max_steps = 4
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    if options.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=options.lora, task_type="SEQ_CLS"))
    data = [
        read(options.data, f"sst2_{part}.tsv", tokenizer, 200 if options.quick else None) for part in ("train", "dev")
    ]
    trainer = DPTrainer(
        model=model, args=arguments, train_dataset=data[0], eval_dataset=data[1], processing_class=tokenizer,
        compute_metrics=accuracy, privacy=privacy,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    found = trainer.evaluate()
    trainer.save_model()
    print(
        f"accuracy {found['eval_accuracy']:.3f} on dev at epsilon {trainer.epsilon():.2f}, delta {trainer.delta():g}, "
        f"after {trainer.state.global_step} noised steps; model and privacy.json are in {arguments.output_dir}"
    )


if __name__ == "__main__":
    main()
