"""The workloads of each suite, at the sizes it runs them; random weights and data.

cpu: an ordinary step takes 0.1 to 3 s on two cores. gpu: sizes that fill one. quick: all in a few minutes. Every
workload has a small variant of the same code, on which samples are taken one at a time; those that are quick enough
are checked at the very size at which they are timed, on as many samples as `whole` says.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .finetuning_models import FINETUNING
from .language import LSTM, PADDING, Encoder, with_adapters
from .large import GPT2, Llama, ViT, with_lora
from .models import GPT, ResNet, Workload, class_losses, token_losses
from .vision import ConvNeXt, cifar_cnn, mnist_cnn, resnet18, resnet50

Build = Callable[[], nn.Module]


def words(build: Callable[[int], nn.Module], t: int, vocabulary: int, batch_size: int, small: Workload | None = None,
          whole: int = 0) -> Workload:  # fmt: skip
    """A language model; build takes the number of tokens, which is the workload's knob."""

    def batch(b: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, vocabulary, (b, t)), torch.randint(0, vocabulary, (b, t))

    def at(length: int) -> Workload:
        return words(build, length, vocabulary, batch_size, small, whole)

    return Workload(lambda: build(t), batch, token_losses, batch_size, small, whole, t, at)


def texts(build: Build, t: int, vocabulary: int, batch_size: int, small: Workload | None = None, padded: bool = False,
          ) -> Workload:  # fmt: skip
    """A classifier of texts of t tokens; padded: of three quarters of that to all of it, the rest padding."""

    def batch(b: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(PADDING + 1, vocabulary, (b, t))
        if padded:
            lengths = torch.linspace(t, 3 * t // 4, b).long()
            ids.masked_fill_(torch.arange(t) >= lengths[:, None], PADDING)
        return ids, torch.randint(0, 2, (b,))

    def at(length: int) -> Workload:
        return texts(build, length, vocabulary, batch_size, small, padded)

    return Workload(build, batch, class_losses, batch_size, small, 0, t, at)


def images(build: Build, side: int, classes: int, batch_size: int, small: Workload | None = None, channels: int = 3,
           whole: int = 0) -> Workload:  # fmt: skip
    """A classifier of images."""

    def batch(b: int) -> tuple[Tensor, Tensor]:
        return torch.randn(b, channels, side, side), torch.randint(0, classes, (b,))

    return Workload(build, batch, class_losses, batch_size, small, whole, side)


def roberta() -> nn.Module:
    return Encoder(vocabulary=50265, padded=True)


def _gpt(t: int) -> nn.Module:
    return GPT(t=t)


def _small_gpt2(t: int) -> nn.Module:
    return GPT2(2, 32, 4, 16, 97)


def _small_llama(t: int) -> nn.Module:
    return Llama(2, 64, 8, 2, 112, 101)


SMALL: dict[str, Workload] = {
    "gpt": words(lambda t: GPT(2, 32, 4, t, 97), 13, 97, 3),
    "gpt2": words(_small_gpt2, 13, 97, 3),
    "gpt2-large": words(lambda t: GPT2(3, 40, 5, 16, 97), 13, 97, 3),
    "llama-1b": words(_small_llama, 13, 101, 3),
    "gpt2-lora": words(lambda t: with_lora(_small_gpt2(t), 4), 13, 97, 3),
    "llama-lora": words(lambda t: with_lora(_small_llama(t), 4), 13, 101, 3),
    "bert": texts(lambda: Encoder(2, 32, 4, 16, 97), 13, 97, 4),
    "roberta": texts(lambda: Encoder(2, 32, 4, 16, 97, padded=True), 13, 97, 4, padded=True),
    "bert-lora": texts(lambda: with_adapters(Encoder(2, 32, 4, 16, 97), 4), 13, 97, 4),
    "vit-b16": images(lambda: ViT(32, 8, 2, 32, 4, 10), 32, 10, 3),
    "convnext-t": images(lambda: ConvNeXt((1, 1, 1), (8, 16, 24), 10, 0.1), 32, 10, 3),
    "resnet18": images(lambda: resnet18(8, 10, 2), 64, 10, 3),
    "resnet50": images(lambda: resnet50(8, 10, 2), 64, 10, 3),
    "mnist-cnn": images(mnist_cnn, 28, 10, 6, channels=1),
    "cifar-cnn": images(lambda: cifar_cnn((8, 12, 16)), 32, 10, 6),
    "lstm": words(lambda t: LSTM(97, 12, 16), 9, 97, 3),
}
CPU: dict[str, Workload] = {
    "gpt": words(_gpt, 128, 8192, 8, SMALL["gpt"], whole=4),
    "gpt2": words(lambda t: GPT2(), 128, 50257, 2, SMALL["gpt2"]),
    "gpt2-lora": words(lambda t: with_lora(GPT2()), 128, 50257, 2, SMALL["gpt2-lora"]),
    "bert": texts(Encoder, 128, 30522, 8, SMALL["bert"]),
    "roberta": texts(roberta, 128, 50265, 4, SMALL["roberta"], padded=True),
    "bert-lora": texts(lambda: with_adapters(Encoder()), 128, 30522, 8, SMALL["bert-lora"]),
    "vit-b16": images(ViT, 224, 1000, 4, SMALL["vit-b16"]),
    "convnext-t": images(ConvNeXt, 224, 1000, 4, SMALL["convnext-t"]),
    "resnet18": images(resnet18, 128, 1000, 16, SMALL["resnet18"], whole=6),
    "resnet50": images(resnet50, 224, 1000, 4, SMALL["resnet50"]),
    "mnist-cnn": images(mnist_cnn, 28, 10, 256, SMALL["mnist-cnn"], 1, whole=256),
    "cifar-cnn": images(cifar_cnn, 32, 10, 250, SMALL["cifar-cnn"], whole=64),
    "lstm": words(lambda t: LSTM(), 64, 10000, 16, SMALL["lstm"], whole=3),
}
GPU: dict[str, Workload] = {
    "gpt2": words(lambda t: GPT2(), 1024, 50257, 16, SMALL["gpt2"]),
    "gpt2-large": words(lambda t: GPT2(36, 1280, 20), 512, 50257, 8, SMALL["gpt2-large"]),
    "llama-1b": words(lambda t: Llama(), 1024, 32000, 4, SMALL["llama-1b"]),
    "gpt2-lora": words(lambda t: with_lora(GPT2()), 1024, 50257, 16, SMALL["gpt2-lora"]),
    "llama-lora": words(lambda t: with_lora(Llama()), 1024, 32000, 4, SMALL["llama-lora"]),
    "bert": texts(Encoder, 512, 30522, 32, SMALL["bert"]),
    "roberta": texts(roberta, 512, 50265, 32, SMALL["roberta"], padded=True),
    "bert-lora": texts(lambda: with_adapters(Encoder()), 512, 30522, 32, SMALL["bert-lora"]),
    "vit-b16": images(ViT, 224, 1000, 64, SMALL["vit-b16"]),
    "convnext-t": images(ConvNeXt, 224, 1000, 64, SMALL["convnext-t"]),
    "resnet50": images(resnet50, 224, 1000, 64, SMALL["resnet50"]),
}
QUICK: dict[str, Workload] = {
    "gpt": words(lambda t: GPT(3, 192, 4, t, 2048), 64, 2048, 8, SMALL["gpt"], whole=8),
    "bert-lora": texts(lambda: with_adapters(Encoder(3, 256, 4, 64, 2048)), 64, 2048, 8, SMALL["bert-lora"]),
    "resnet18": images(lambda: resnet18(32, 10, 8), 64, 10, 8, SMALL["resnet18"], whole=4),
    "mnist-cnn": images(mnist_cnn, 28, 10, 64, SMALL["mnist-cnn"], 1, whole=64),
    "lstm": words(lambda t: LSTM(1000, 64, 128), 32, 1000, 8, SMALL["lstm"], whole=4),
}
OTHERS: dict[str, Workload] = {"resnet": images(ResNet, 32, 10, 32, whole=8), **FINETUNING}  # asked for by name
SUITES = {"cpu": CPU, "gpu": GPU, "quick": QUICK}
SWEPT = {"batch": ("gpt", "gpt2", "resnet18", "resnet50"), "length": ("gpt", "gpt2")}
BATCHES = {"cpu": (1, 2, 4, 8, 16, 32), "gpu": (1, 2, 4, 8, 16, 32, 64), "quick": (1, 2, 4)}
LENGTHS = {"cpu": (64, 128, 256, 512), "gpu": (128, 256, 512, 1024), "quick": (16, 32, 64)}
FLOORLESS = set(FINETUNING)  # models whose forward needs values, where the floor has shapes alone


def find(suite: str, name: str, small: bool = False, batch_size: int = 0, length: int = 0) -> Workload:
    """A workload by name, of its suite or else of the first that has it, at other sizes if told."""
    places = [SUITES[suite], *SUITES.values(), OTHERS]
    work = next((place[name] for place in places if name in place), None)
    if work is None:
        raise KeyError(f"no workload is called {name}")
    if small and work.small:
        work = work.small
    if length and length != work.length:
        if work.at is None:
            raise ValueError(f"{name} has no other length than {work.length}")
        work = work.at(length)
    return work._replace(batch_size=batch_size) if batch_size else work
