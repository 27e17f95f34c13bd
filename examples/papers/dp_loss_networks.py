"""The networks of the loss paper's Tables 1 to 4, and ScatterNet features of images.

The features are those of fixed wavelets (kymatio, J = 2, eight angles), so they learn nothing and cost no privacy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.papers.images import Images

SCALES = 2  # J: images become a quarter as wide
PATHS = 81  # 1 + 8 J + 8^2 J (J - 1) / 2 features of each place and channel
KYMATIO = (
    "ScatterNet features need kymatio (pip install kymatio). Its 2-d part is all that is used, so the SciPy that it "
    "asks for may be newer."
)


def _tanh(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """An activation after each layer."""
    return [module for layer in layers for module in (layer, nn.Tanh())]


def end_to_end() -> nn.Sequential:
    """Table 1, 26,010 parameters, for images [1, 28, 28]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def end_to_end_cifar() -> nn.Sequential:
    """Table 2, 550,570 parameters, for images [3, 32, 32]."""
    layers: list[nn.Module] = []
    for before, channels in ((3, 32), (32, 64), (64, 128)):
        layers += _tanh([nn.Conv2d(before, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)])
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), *_tanh([nn.Linear(2048, 128)]), nn.Linear(128, 10))


def on_features() -> nn.Sequential:
    """Table 3, for features [81, 7, 7]."""
    return nn.Sequential(
        nn.Conv2d(PATHS, 16, 3, stride=2, padding=1), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def on_features_cifar() -> nn.Sequential:
    """Table 4, for features [243, 8, 8]."""
    layers: list[nn.Module] = []
    for before in (3 * PATHS, 64):
        layers += _tanh([nn.Conv2d(before, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)])
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def scattered(images: Images, cache: Path | None, chunk: int = 500) -> Images:
    """Features [N, 81 C, H / 4, W / 4], each group of 81 / 3 (per channel: 27) normalised per image.

    Args: cache, a folder in which the features are kept (1.1 GB of MNIST, 3.7 GB of CIFAR-10), or None.

    Exits with what to install if kymatio is missing.
    """
    kept = None
    if cache is not None:
        seen = hashlib.sha256(images.x[::997].numpy().tobytes() + str(len(images.x)).encode()).hexdigest()[:12]
        kept = cache / f"scatter_{seen}.pt"
    if kept is not None and kept.exists():
        x, x_test = torch.load(kept)
        return Images(x, images.y, x_test, images.y_test, f"{images.name}, ScatterNet")
    try:
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise SystemExit(KYMATIO) from error
    made = ScatteringTorch2D(J=SCALES, shape=tuple(images.x.shape[2:]))

    def features(x: Tensor) -> Tensor:
        found = [made(part.contiguous()).flatten(1, 2) for part in x.split(chunk)]  # [n, C, 81, h, w] -> [n, 81 C, ...]
        return torch.cat([nn.functional.group_norm(part, part.shape[1] // 27) for part in found])

    x, x_test = features(images.x), features(images.x_test)
    if kept is not None:
        cache.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
        torch.save((x, x_test), kept)
    return Images(x, images.y, x_test, images.y_test, f"{images.name}, ScatterNet")
