"""What private_bugs.py trains: ResNet-20 with GroupNorm on CIFAR-10, a small BERT on SST-2; and how, rightly or not.

Each optimizer here is made as `fastdp.audit.TorchTrainable` takes it. One is right, the others have the paper's bugs.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from examples.papers.images import cifar10, need
from fastdp.audit.torch_step import TorchTrainable

SENTENCES = "sst2_train.tsv"
WHERE = (
    "Lines of sentence, tab, label (0 or 1). With a network: the Stanford Sentiment Treebank with two labels, 6,920 "
    "sentences, from https://nlp.stanford.edu/sentiment; or GLUE's SST-2: datasets.load_dataset('glue', 'sst2')."
)

# Adam's step is proportional to the gradient only far below its eps of 1e-8, and is seen there only at a large rate:
# there fastdp's tests look. The paper's take ordinary steps of Adam; it names no rate.
RATES = {("fastdp", "sgd"): 0.1, ("fastdp", "adam"): 0.1, ("paper", "sgd"): 0.1, ("paper", "adam"): 1e-3}
LENGTH = 32  # words; a longer sentence loses its end

# ---------------------------------------------------------------------- networks


class Block(nn.Module):
    """Two 3x3 convolutions beside the input, which is halved and padded with zero channels where the width doubles."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, width)
        self.stride, self.more = stride, width - width_in

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(y + short)


def resnet(blocks: int = 3, width: int = 16) -> nn.Module:
    """ResNet-(6 blocks + 2) for 32x32 images (He et al. 2016), with GroupNorm of 8 groups in the place of BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
    for stage in range(3):
        for k in range(blocks):
            half = stage > 0 and k == 0
            layers.append(Block(width * 2**stage // (2 if half else 1), width * 2**stage, 2 if half else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


class Bert(nn.Module):
    """A BERT of few layers, its weights random: ids [B,T], 0 where there is no word -> [B,2]."""

    def __init__(self, words: int, layers: int = 2, width: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        try:
            from transformers import BertConfig, BertForSequenceClassification
        except ImportError:
            raise SystemExit("the BERT needs transformers: pip install transformers") from None
        self.body = BertForSequenceClassification(
            BertConfig(
                vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(1, width // 64),
                intermediate_size=4 * width, max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(input_ids=ids, attention_mask=(ids > 0).long()).logits


# ---------------------------------------------------------------------- data


class Task(NamedTuple):
    """A network and its data, x [N,...] and labels [N]."""

    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    labels: Tensor
    classes: int
    dropout: bool = False


def images(folder: Path | None, count: int, seed: int, blocks: int, width: int = 16) -> Task:
    """`count` random images, of [0, 1] less their mean and over their deviation, and a ResNet."""
    data = cifar10(folder)
    rows = torch.from_numpy(np.random.default_rng(seed).permutation(len(data.y))[:count])
    name = f"ResNet-{6 * blocks + 2}, {data.name}"
    return Task(name, lambda: resnet(blocks, width), data.x[rows], data.y[rows], 10)


def sentences(folder: Path | None, count: int, seed: int, layers: int, width: int = 128, dropout: float = 0.0) -> Task:
    """`count` random sentences as numbers of words (1: a word met once), and a BERT."""
    with need([folder / SENTENCES] if folder else [], WHERE).open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    often = Counter(word for text, _ in lines for word in text.split())
    number = {word: 2 + k for k, word in enumerate(sorted(word for word, times in often.items() if times > 1))}
    rows = np.random.default_rng(seed).permutation(len(lines))[:count]
    x = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for place, row in enumerate(rows):
        ids = [number.get(word, 1) for word in lines[row][0].split()[:LENGTH]]
        x[place, : len(ids)] = torch.tensor(ids)
    labels = torch.tensor([int(lines[row][1]) for row in rows])
    make = lambda: Bert(len(number) + 2, layers, width, dropout)
    name = f"BERT ({layers} x {width}), SST-2" + (f", dropout {dropout:g}" if dropout else "")
    return Task(name, make, x, labels, 2, bool(dropout))


# ---------------------------------------------------------------------- implementations

KINDS = {
    "per-example": "each example's gradient clipped by fastdp, noise sigma C",
    "no clipping": "the mean gradient as it is, noise sigma C / B",
    "mini-batch": "the mean gradient clipped, noise sigma C / B",
    "per-example, uncalibrated": "each example's gradient clipped by fastdp, noise sigma whatever C",
    "no clipping, uncalibrated": "the mean gradient as it is, noise sigma / B whatever C",
    "mini-batch, uncalibrated": "the mean gradient clipped, noise sigma / B whatever C",
    "per-example, no noise": "each example's gradient clipped by fastdp, no noise",
    "no clipping, no noise": "the mean gradient as it is, no noise",
    "mini-batch, no noise": "the mean gradient clipped, no noise",
}


def implementation(task: Task, kind: str, optimizer: str, statistics: str = "fastdp") -> TorchTrainable:
    """One of KINDS with "sgd" or "adam" on a task's network, at the learning rate that the tests of these statistics
    need: fastdp's look at Adam where it is linear, the paper's where it is used."""
    rate = RATES[statistics, optimizer]
    given = {"lr": rate, "kind": kind, "adam": optimizer == "adam"}

    def make_optimizer(model: nn.Module, **settings: Any) -> Any:
        return (private if kind.startswith("per-example") else Mistaken)(model, **given, **settings)

    def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
        among = len(task.labels)
        rows = torch.from_numpy(np.random.default_rng(seed).choice(among, size, replace=size > among))
        return task.x[rows], task.labels[rows]

    return TorchTrainable(
        task.make, make_optimizer, F.cross_entropy, make_batch=make_batch, loss_kind="cross_entropy",
        optimizer=optimizer, learning_rate=rate, dropout=task.dropout, seeded=not task.dropout,
    )  # fmt: skip


def private(model: nn.Module, *, lr: float, kind: str, adam: bool, clipping_norm: float, noise_multiplier: float,
            expected_batch_size: float, seed: int) -> Any:  # fmt: skip
    """fastdp's optimizer. The bug: the noise's deviation is given where its multiple of the norm is asked for."""
    noise = 0.0 if "no noise" in kind else noise_multiplier
    return (fastdp.DPAdam if adam else fastdp.DPSGD)(
        model, lr=lr, noise_multiplier=noise / clipping_norm if "uncalibrated" in kind else noise,
        max_grad_norm=clipping_norm, seed=seed, expected_batch_size=expected_batch_size,
    )  # fmt: skip


class Mistaken:
    """torch's optimizer on the mean gradient. The bugs: it is clipped after the mean, or not at all; noise as above."""

    def __init__(self, model: nn.Module, *, lr: float, kind: str, adam: bool, clipping_norm: float,
                 noise_multiplier: float, expected_batch_size: float, seed: int) -> None:  # fmt: skip
        self.parameters, self.kind = [p for p in model.parameters() if p.requires_grad], kind
        self.inner = (torch.optim.Adam if adam else torch.optim.SGD)(self.parameters, lr=lr)
        self.max_grad_norm, self.noise_multiplier = clipping_norm, noise_multiplier  # the audit may change these
        self.expected_batch_size = expected_batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        if "mini-batch" in self.kind:
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        deviation = self.noise_multiplier * (1 if "uncalibrated" in self.kind else self.max_grad_norm)
        if deviation and "no noise" not in self.kind:
            for p in self.parameters:
                if p.grad is not None:
                    noise = torch.randn(p.shape, generator=self.generator)
                    p.grad += noise * (deviation / self.expected_batch_size)
        self.inner.step()
