"""Encoders and recurrent networks for text: BERT, RoBERTa, LoRA on BERT, an LSTM; plain PyTorch.

Positions are looked up for each sample (Opacus has no rule for a look-up without a batch dimension).
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .models import LoRALinear

PADDING = 1  # RoBERTa's padding id; its positions are counted from the next number


class EncoderBlock(nn.Module):
    """A post-norm block with separate projections, as BERT has."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, T, d]; mask [B, 1, 1, T], True where a token may be attended to."""
        b, t, d = x.shape
        q, k, v = (m(x).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.out(y.transpose(1, 2).reshape(b, t, d)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT-base's shape (Devlin et al. 2019) with a classifier on the pooled first token: 109.5M parameters.

    padded: RoBERTa-base's (Liu et al. 2019; 124.6M): texts with padding, positions counted from the padding id.
    """

    def __init__(self, layers: int = 12, d: int = 768, heads: int = 12, t: int = 512, vocabulary: int = 30522,
                 padded: bool = False) -> None:  # fmt: skip
        super().__init__()
        skipped = PADDING if padded else None
        self.tokens = nn.Embedding(vocabulary, d, padding_idx=skipped)
        self.positions = nn.Embedding(t + PADDING + 1 if padded else t, d, padding_idx=skipped)
        self.segments = nn.Embedding(1 if padded else 2, d)
        self.norm, self.padded = nn.LayerNorm(d, eps=1e-5 if padded else 1e-12), padded
        self.blocks = nn.ModuleList(EncoderBlock(d, heads) for _ in range(layers))
        self.pooler, self.head = nn.Linear(d, d), nn.Linear(d, 2)

    def forward(self, ids: Tensor) -> Tensor:
        positions, mask = torch.arange(ids.size(1), device=ids.device).repeat(ids.size(0), 1), None
        if self.padded:
            real = ids.ne(PADDING)
            positions, mask = real.cumsum(1) * real + PADDING, real[:, None, None, :]
        x = self.norm(self.tokens(ids) + self.positions(positions) + self.segments(torch.zeros_like(ids)))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


def with_adapters(model: Encoder, rank: int = 8) -> Encoder:
    """LoRA on query and value; the classifier is trained too."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        block.query, block.value = LoRALinear(block.query, rank), LoRALinear(block.value, rank)
    return model


class LSTM(nn.Module):
    """A word language model (Zaremba et al. 2014): an embedding, two layers of LSTM, a projection."""

    def __init__(self, vocabulary: int = 10000, d: int = 256, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.lstm = nn.LSTM(d, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])
