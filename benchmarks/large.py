"""Transformers of real sizes: ViT-B/16, GPT-2, GPT-2-large, a Llama-shaped 1.1B, and LoRA on them.

Plain PyTorch with the modules that the usual implementations have: raw class token and positions (ViT), a table of
positions and a head tied to the tokens (GPT-2), RMSNorm, rotary positions, grouped heads and SwiGLU (Llama). Attention
is torch's fused one. Positions are looked up for each sample, as Opacus has no rule for a look-up without a batch.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .models import LoRALinear


class Attention(nn.Module):
    """Separate projections, fused attention; `groups` heads of keys and values, shared by the queries' heads."""

    def __init__(self, d: int, heads: int, groups: int = 0, bias: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups or heads, causal
        narrow = d // heads * self.groups
        self.query, self.out = nn.Linear(d, d, bias), nn.Linear(d, d, bias)
        self.key, self.value = nn.Linear(d, narrow, bias), nn.Linear(d, narrow, bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        b, t, d = x.shape
        q = self.query(x).view(b, t, self.heads, -1).transpose(1, 2)  # [B, heads, T, D]
        k, v = (m(x).view(b, t, self.groups, -1).transpose(1, 2) for m in (self.key, self.value))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.groups < self.heads:
            k, v = (m.repeat_interleave(self.heads // self.groups, 1) for m in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves paired; x [B, heads, T, D], cos and sin [T, D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    """A pre-norm layer with a GELU between two projections (ViT, GPT-2)."""

    def __init__(self, d: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, heads, causal=causal)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ViT(nn.Module):
    """Vision transformer, ViT-B/16 by default (Dosovitskiy et al. 2021)."""

    def __init__(self, side: int = 224, patch: int = 16, layers: int = 12, d: int = 768, heads: int = 12,
                 classes: int = 1000) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, d) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, d) * 0.02)
        self.layers = nn.ModuleList(Layer(d, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.size(0), -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019), small by default; the head is the token table."""

    def __init__(self, layers: int = 12, d: int = 768, heads: int = 12, t: int = 1024, vocabulary: int = 50257) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
        self.layers = nn.ModuleList(Layer(d, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device).repeat(ids.size(0), 1))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LlamaLayer(nn.Module):
    """A pre-norm layer with grouped heads and SwiGLU, without biases."""

    def __init__(self, d: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.attention = Attention(d, heads, groups, bias=False, causal=True)
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), rotary)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama-shaped model (Touvron et al. 2023) of 1.1 billion parameters by default; the head is its own."""

    def __init__(self, layers: int = 22, d: int = 2048, heads: int = 32, groups: int = 4, hidden: int = 5632,
                 vocabulary: int = 32000) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.width = nn.Embedding(vocabulary, d), d // heads
        self.layers = nn.ModuleList(LlamaLayer(d, heads, groups, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        rotary = self.rotary(ids.size(1), x)
        for layer in self.layers:
            x = layer(x, rotary)
        return self.head(self.norm(x))

    def rotary(self, t: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D] of position times 10000^(-2j/D), each for both halves."""
        exponents = torch.arange(0, self.width, 2, device=like.device, dtype=torch.float32) / self.width
        angles = torch.arange(t, device=like.device, dtype=torch.float32)[:, None] * 10000.0**-exponents
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def with_lora(model: nn.Module, rank: int = 8) -> nn.Module:
    """Adapters on query and value, nothing else trained. Both factors random: beside a zero one gradients are zero."""
    model.requires_grad_(False)
    for layer in model.layers:
        attention = layer.attention
        attention.query, attention.value = (LoRALinear(m, rank) for m in (attention.query, attention.value))
    return model
