"""DPTrainer against transformers.Trainer: seconds of a training step in the whole loop, with batches and logs.

    python -m benchmarks.hf_trainer [--models full lora] [--steps 12] [--rounds 5] [--out FILE.csv]

MiniLM's shape with random weights on random sentences of 32 tokens; 64 records a step, in expectation for the Poisson
batches, in physical batches of 16; AdamW. Each round trains both for the same number of steps, one after the other. A
step's time is that of 64 records: from the beginning of the first step to the end of the last, by the records that were
fetched. Planning the noise and verification happen before (set_up_s).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fastdp.hf import DPTrainer, PrivacyArguments

from .timing import Row, append, show, versions

COLUMNS = ("model", "contender", "ratio", "step_ms", "set_up_s", "rounds", "steps")
RECORDS, BATCH, PHYSICAL, LENGTH = 4096, 64, 16, 32


def model(name: str) -> nn.Module:
    """A classifier of MiniLM's shape: all parameters train, or adapters of rank 8."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    made = transformers.BertForSequenceClassification(config)
    if name == "lora":
        import peft

        return peft.get_peft_model(made, peft.LoraConfig(r=8, task_type="SEQ_CLS"))
    return made


def records() -> list[dict[str, Any]]:
    """Sentences of one length, so that nothing is padded."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (RECORDS, LENGTH), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": i % 2} for i, row in enumerate(ids)]


class Counted:
    """Collates, and counts the records."""

    def __init__(self) -> None:
        self.records = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        self.records += len(rows)
        return transformers.default_data_collator(rows)


class Clock(transformers.TrainerCallback):
    """When the first step began and the last one ended."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = self.began or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended = time.perf_counter()


def train(name: str, private: bool, steps: int, folder: str) -> tuple[float, float]:
    """(seconds of 64 records, seconds before the first step) of a training."""
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=PHYSICAL, gradient_accumulation_steps=BATCH // PHYSICAL, max_steps=steps,
        report_to="none", save_strategy="no", logging_steps=5, use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True, dataloader_pin_memory=False, max_grad_norm=0.0, optim="adamw_torch",
    )  # fmt: skip
    clock, counted, made, data = Clock(), Counted(), model(name), records()
    start = time.perf_counter()
    more = {"privacy": PrivacyArguments(target_epsilon=3.0, delta=1e-5)} if private else {}
    kind = DPTrainer if private else transformers.Trainer
    trainer = kind(model=made, args=arguments, train_dataset=data, data_collator=counted, callbacks=[clock], **more)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return (clock.ended - clock.began) / counted.records * BATCH, clock.began - start


def measure(name: str, steps: int, rounds: int) -> list[Row]:
    """A row a trainer: medians over rounds."""
    found: dict[str, list[tuple[float, float]]] = {"Trainer": [], "DPTrainer": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for title, times in found.items():
                times.append(train(name, title == "DPTrainer", steps, f"{folder}/{title}{len(times)}"))
    step = {title: statistics.median(spent for spent, _ in times) for title, times in found.items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        {"model": name, "contender": title, "ratio": f"{step[title] / step['Trainer']:.2f}",
         "step_ms": f"{1e3 * step[title]:.0f}", "set_up_s": f"{statistics.median(s for _, s in times):.1f}",
         "rounds": rounds, "steps": steps, **versions(device)}
        for title, times in found.items()
    ]  # fmt: skip


def main() -> None:
    """Measure, print, and add the rows to a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = [row for name in options.models for row in measure(name, options.steps, options.rounds)]
    show(rows, COLUMNS)
    append(options.out, rows, [*COLUMNS, *versions()])


if __name__ == "__main__":
    main()
