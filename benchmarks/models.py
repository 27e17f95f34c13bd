"""What a workload is, and the small models that are only here: a GPT, a ResNet, LoRA's layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Block(nn.Module):
    """A pre-norm transformer block with separate modules only, so that every peer can take it."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Causal language model; untied head (no Opacus mode takes a tied one)."""

    def __init__(self, layers: int = 6, d: int = 384, heads: int = 6, t: int = 128, vocabulary: int = 8192) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
        self.blocks = nn.Sequential(*[Block(d, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        # positions for every sample: Opacus has no rule for a look-up without a batch dimension
        positions = torch.arange(ids.size(1), device=ids.device).repeat(ids.size(0), 1)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(positions))))


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained product of two thin ones (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), 2.0
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scale


class Residual(nn.Module):
    """Two 3x3 convolutions with GroupNorm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


class ResNet(nn.Module):
    """3-32-64-128-256 channels on 32x32 images."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 10) -> None:
        super().__init__()
        stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        blocks = [
            Residual(i, o, 1 if n == 0 else 2)
            for n, (i, o) in enumerate(zip((widths[0], *widths), widths, strict=False))
        ]
        self.body = nn.Sequential(stem, nn.GroupNorm(8, widths[0]), nn.ReLU(), *blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Logits(nn.Module):
    """A transformers model as one from token ids to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


class Workload(NamedTuple):
    """A model, its batches, and the loss of each sample.

    small: the same code at a size at which samples are quickly taken one at a time; None: the workload itself is.
    whole: how many samples of its own size are checked instead of the small variant. length: tokens, or the side of
    images. at: the same workload of another length.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    losses: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    small: Workload | None = None
    whole: int = 0
    length: int = 0
    at: Callable[[int], Workload] | None = None


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Each sample's mean over its own tokens, [B], in float32 or better."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)


def class_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Each sample's loss, [B], in float32 or better."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels, reduction="none")
