"""Who was trained on? Membership inference of Bu et al. (2023) against a network trained with and without privacy.

    python examples/papers/membership.py --data DIR [--quick] [--epsilon 8] [--records 2000] [--epochs 40] [--seed 0]

A small convolutional network learns so many CIFAR-10 images; as many others are left out. The attacker sees logits and
labels of both, learns on half of them who is who, and is tested on the other half; then the same again, seeing the
loss of each image, too. 0.5 is a coin.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import private_bugs_networks as networks
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.audit.membership import Membership, attack_model
from fastdp.utils.progress_bar import Bar

DELTA, BATCH = 1e-5, 100


def network(width: int) -> nn.Module:
    """One convolution and two linear layers: quick to learn its images by heart."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=3), nn.GroupNorm(8, 32), nn.ReLU(), nn.Flatten(),
        nn.Linear(3200, width), nn.Tanh(), nn.Linear(width, 10),
    )  # fmt: skip


def train(x: Tensor, y: Tensor, options: argparse.Namespace, private: bool, width: int) -> tuple[nn.Module, float]:
    """The network, trained, and the epsilon it cost. Both ways take the same number of steps."""
    torch.manual_seed(options.seed)
    model = network(width)
    loader = fastdp.poisson_loader(TensorDataset(x, y), expected_batch_size=min(BATCH, len(x) // 2),
                                   seed=None if private else options.seed)  # fmt: skip
    steps = options.epochs * loader.steps_per_epoch
    optimizer: torch.optim.Optimizer
    if private:
        sigma = fastdp.noise_multiplier_for(target_epsilon=options.epsilon, delta=DELTA, steps=steps,
                                            sample_rate=loader.sample_rate)  # fmt: skip
        optimizer = fastdp.DPAdam(model, lr=options.lr, noise_multiplier=sigma, max_grad_norm=1.0)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    done, bar = 0, Bar(steps)
    for _ in range(options.epochs):
        for images, labels in loader:
            if private or len(labels):
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            bar.at(done, "private" if private else "not private")
    spent = float("inf")
    if isinstance(optimizer, fastdp.DPAdam):
        spent = optimizer.epsilon(DELTA)
        optimizer.detach()
    return model.eval(), spent


def attack(
    model: nn.Module, members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], **options: Any
) -> Membership:
    """The attacker of the paper, or with_loss=True one who sees more."""

    def ask(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    return attack_model(ask, members, others, **options)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(torch.cat([model(part) for part in x.split(256)]).argmax(1).eq(y).double().mean())


def main(arguments: Sequence[str] | None = None, width: int = 128) -> dict[str, Membership]:
    """Train both ways, attack, print."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--data", type=Path, help="the folder with the data (without it, a message says where to get it)")
    made.add_argument("--quick", action="store_true", help="600 images, 30 epochs: a minute on two CPU cores")
    made.add_argument("--epsilon", type=float, default=8.0)
    made.add_argument("--records", type=int, help="to train on; as many are left out (default: 2000)")
    made.add_argument("--epochs", type=int, help="default: 40")
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--seed", type=int, default=0, help="of weights, images and attacker; noise is always fresh")
    options = made.parse_args(arguments)
    options.records = options.records or (600 if options.quick else 2000)
    options.epochs = options.epochs or (30 if options.quick else 40)
    networks.need_images(options)
    task = networks.images(options.data, 2 * options.records, options.seed, 1)
    x, y = task.x, task.labels
    members, others = (x[: options.records], y[: options.records]), (x[options.records :], y[options.records :])
    found = {}
    for private in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, spent = train(*members, options, private, width)
        name = f"epsilon {spent:.2f}" if private else "not private"
        print(
            f"\n{name}: accuracy {accuracy(model, *members):.3f} on members, {accuracy(model, *others):.3f} on others"
        )
        for with_loss in (False, True):
            seeing = "logits, label, loss" if with_loss else "logits, label"
            result = attack(model, members, others, with_loss=with_loss, seed=options.seed)
            found[f"{name}: {seeing}"] = result
            print(f"seeing {seeing}: {result}")
    return found


if __name__ == "__main__":
    main()
