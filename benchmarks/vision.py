"""Networks for images: ResNet-18 and -50 with GroupNorm, ConvNeXt-T, and the small networks of the private papers.

Plain PyTorch, in the layouts that the papers and the usual implementations have; what they have beyond them (stochastic
depth) is random and left out. Activations are not in place, as Opacus's hooks refuse those behind a layer of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

GROUPS = 32  # of GroupNorm (Wu and He 2018)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, padding: int | None = None) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2 if padding is None else padding, bias=False)


class Basic(nn.Module):
    """Two 3x3 convolutions and a shortcut (ResNet-18)."""

    widening = 1

    def __init__(self, inputs: int, width: int, stride: int, groups: int = GROUPS) -> None:
        super().__init__()
        self.conv1, self.conv2 = convolution(inputs, width, 3, stride), convolution(width, width, 3)
        self.norm1, self.norm2 = nn.GroupNorm(groups, width), nn.GroupNorm(groups, width)
        self.short = shortcut(inputs, width, stride, groups)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which strides) and 1x1 convolutions and a shortcut (ResNet-50)."""

    widening = 4

    def __init__(self, inputs: int, width: int, stride: int, groups: int = GROUPS) -> None:
        super().__init__()
        outputs = width * self.widening
        self.conv1, self.conv2 = convolution(inputs, width, 1), convolution(width, width, 3, stride)
        self.conv3 = convolution(width, outputs, 1)
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(groups, n) for n in (width, width, outputs))
        self.short = shortcut(inputs, outputs, stride, groups)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(self.norm3(self.conv3(y)) + self.short(x))


def shortcut(inputs: int, outputs: int, stride: int, groups: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, 1, stride), nn.GroupNorm(groups, outputs))


class DeepResNet(nn.Module):
    """ResNet for photographs (He et al. 2016), torchvision's layout, GroupNorm instead of BatchNorm."""

    def __init__(self, block: type[Basic] | type[Bottleneck], depths: Sequence[int], width: int = 64,
                 classes: int = 1000, groups: int = GROUPS) -> None:  # fmt: skip
        super().__init__()
        self.stem, self.norm = convolution(3, width, 7, 2), nn.GroupNorm(groups, width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages, inputs = [], width
        for number, depth in enumerate(depths):
            outputs = width * 2**number
            for k in range(depth):
                stages.append(block(inputs, outputs, 2 if number and k == 0 else 1, groups))
                inputs = outputs * block.widening
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(x))))
        return self.head(self.stages(x).mean((2, 3)))


def resnet18(width: int = 64, classes: int = 1000, groups: int = GROUPS) -> DeepResNet:
    return DeepResNet(Basic, (2, 2, 2, 2), width, classes, groups)


def resnet50(width: int = 64, classes: int = 1000, groups: int = GROUPS) -> DeepResNet:
    return DeepResNet(Bottleneck, (3, 4, 6, 3), width, classes, groups)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm, two projections over channels, and a trained scale of each channel."""

    def __init__(self, d: int, scale: float) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(d, d, 7, padding=3, groups=d), nn.LayerNorm(d, eps=1e-6)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.scale = nn.Parameter(torch.full((d,), scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt-T by default (Liu et al. 2022); scale: what its trained scales begin at."""

    def __init__(self, depths: Sequence[int] = (3, 3, 9, 3), widths: Sequence[int] = (96, 192, 384, 768),
                 classes: int = 1000, scale: float = 1e-6) -> None:  # fmt: skip
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0], eps=1e-6)]
        for number, (depth, d) in enumerate(zip(depths, widths, strict=True)):
            if number:
                parts += [ChannelNorm(widths[number - 1], eps=1e-6), nn.Conv2d(widths[number - 1], d, 2, 2)]
            parts += [ConvNeXtBlock(d, scale) for _ in range(depth)]
        self.body, self.norm = nn.Sequential(*parts), nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).mean((2, 3))))


def mnist_cnn() -> nn.Sequential:
    """The network for MNIST of Papernot et al. 2020 (also of Bu et al.), tanh: 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def cifar_cnn(widths: Sequence[int] = (32, 64, 128)) -> nn.Sequential:
    """The network for CIFAR-10 of Papernot et al. 2020 (also of Tramer and Boneh 2021), tanh: 550,570 parameters."""
    parts: list[nn.Module] = []
    for i, o in zip((3, *widths), widths, strict=False):
        parts += [nn.Conv2d(i, o, 3, padding=1), nn.Tanh(), nn.Conv2d(o, o, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(widths[-1] * 16, 128), nn.Tanh(), nn.Linear(128, 10))
