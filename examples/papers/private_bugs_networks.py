"""What private_bugs.py trains: ResNet-20 with GroupNorm on CIFAR-10, a small BERT on SST-2; and how, rightly or not.

Each loop here is a training script as `fastdp.audit.TorchTrainable(train=...)` takes it. One is right, three have the
paper's bugs.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.audit.torch_step import TorchTrainable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import finetune_cifar10 as cifar10
import finetune_sst2 as sst2
from common import need_data

# Adam's step is proportional to the gradient only far below its eps of 1e-8, and is seen there only at a large rate
RATES = {"sgd": 0.1, "adam": 0.1}
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
    """A BERT of few layers, its weights random, without dropout: ids [B,T], 0 where there is no word -> [B,2]."""

    def __init__(self, words: int, layers: int = 2, width: int = 128) -> None:
        super().__init__()
        try:
            from transformers import BertConfig, BertForSequenceClassification
        except ImportError:
            raise SystemExit("the BERT needs transformers: pip install 'fastdp[hf]'") from None
        self.body = BertForSequenceClassification(
            BertConfig(
                vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(1, width // 64),
                intermediate_size=4 * width, max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
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


def need_images(options: Any) -> Path:
    """The folder --data, where it has the images; else exits with where to get them."""
    exact = options.data and (options.data / "cifar10.npz").exists()
    return need_data(options, ["cifar10.npz" if exact else cifar10.FILE], cifar10.WHERE)


def need_sentences(options: Any) -> Path:
    """The same of the sentences."""
    return need_data(options, [sst2.FILES[0]], sst2.WHERE)


def images(folder: Path, count: int, seed: int, blocks: int, width: int = 16) -> Task:
    """`count` random images, of [0, 1] less their mean and over their deviation, and a ResNet."""
    exact = folder / "cifar10.npz"
    with np.load(exact if exact.exists() else folder / cifar10.FILE) as file:
        labels = file["y_train"].astype(np.int64).ravel()
        rows = np.random.default_rng(seed).permutation(len(labels))[:count]
        if exact.exists():
            found = torch.from_numpy(file["x_train"][rows]).permute(0, 3, 1, 2)
        else:
            lengths, data = file["len_train"], file["jpeg_train"]
            ends = np.cumsum(lengths)
            chosen = np.concatenate([data[ends[r] - lengths[r] : ends[r]] for r in rows])
            found = cifar10.decode(chosen, lengths[rows])
    x = (found.float() / 255 - 0.5) / 0.25
    name = f"ResNet-{6 * blocks + 2}, CIFAR-10" + ("" if exact.exists() else " (JPEG)")
    return Task(name, lambda: resnet(blocks, width), x, torch.from_numpy(labels[rows]), 10)


def sentences(folder: Path, count: int, seed: int, layers: int, width: int = 128) -> Task:
    """`count` random sentences as numbers of words (1: a word met once), and a BERT."""
    with (folder / sst2.FILES[0]).open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    often = Counter(word for text, _ in lines for word in text.split())
    number = {word: 2 + k for k, word in enumerate(sorted(word for word, times in often.items() if times > 1))}
    rows = np.random.default_rng(seed).permutation(len(lines))[:count]
    x = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for place, row in enumerate(rows):
        ids = [number.get(word, 1) for word in lines[row][0].split()[:LENGTH]]
        x[place, : len(ids)] = torch.tensor(ids)
    labels = torch.tensor([int(lines[row][1]) for row in rows])
    make = lambda: Bert(len(number) + 2, layers, width)
    return Task(f"BERT ({layers} x {width}), SST-2", make, x, labels, 2)


# ---------------------------------------------------------------------- implementations

KINDS = {
    "per-example": "each example's gradient clipped by fastdp, noise sigma C",
    "no clipping": "the mean gradient as it is, noise sigma C / B",
    "mini-batch": "the mean gradient clipped, noise sigma C / B",
    "uncalibrated": "each example's gradient clipped by fastdp, noise sigma whatever C",
    "mini-batch, uncalibrated": "the mean gradient clipped, noise sigma / B whatever C",
}


Batches = list[tuple[Tensor, Tensor]]


def implementation(task: Task, kind: str, optimizer: str) -> TorchTrainable:
    """One of KINDS with "sgd" or "adam" on a task's network."""
    rate = RATES[optimizer]
    loop = private if kind in ("per-example", "uncalibrated") else ordinary

    def train(model: nn.Module, batches: Batches, *, clipping_norm: float, noise_multiplier: float, seed: int) -> None:
        if batches:  # else the audit only wants to read the weights
            loop(model, batches, kind, optimizer, rate, clipping_norm, noise_multiplier, seed)

    def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
        among = len(task.labels)
        rows = torch.from_numpy(np.random.default_rng(seed).choice(among, size, replace=size > among))
        return task.x[rows], task.labels[rows]

    return TorchTrainable(
        task.make, loss=F.cross_entropy, make_batch=make_batch, train=train, loss_kind="cross_entropy",
        optimizer=optimizer, learning_rate=rate,
    )  # fmt: skip


def private(model: nn.Module, batches: Batches, kind: str, optimizer: str, rate: float, norm: float, noise: float,
            seed: int) -> None:  # fmt: skip
    """fastdp's optimizer. The bug: the noise's deviation is given where its multiple of the norm is asked for."""
    made = fastdp.DPSGD if optimizer == "sgd" else fastdp.DPAdam
    multiplier = noise / norm if kind == "uncalibrated" else noise
    stepper = made(model, lr=rate, noise_multiplier=multiplier, max_grad_norm=norm, seed=seed,
                   expected_batch_size=len(batches[0][1]))  # fmt: skip
    try:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            stepper.step()
            stepper.zero_grad()
    finally:
        stepper.detach()


def ordinary(model: nn.Module, batches: Batches, kind: str, optimizer: str, rate: float, norm: float, noise: float,
             seed: int) -> None:  # fmt: skip
    """torch's optimizer on the mean gradient. The bugs: it is clipped after the mean, or not at all; noise as above."""
    made = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    stepper = made(model.parameters(), lr=rate)
    generator, deviation = torch.Generator().manual_seed(seed), noise * (1 if "uncalibrated" in kind else norm)
    for x, y in batches:
        stepper.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if "mini-batch" in kind:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        for p in model.parameters():
            if p.grad is not None and noise:
                p.grad += torch.randn(p.shape, generator=generator) * (deviation / len(x))
        stepper.step()
