"""A small language model whose layers torch.distributed.tensor.parallel can split, and the ways of splitting it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

D, HEADS, HIDDEN, WORDS, LENGTH = 12, 6, 30, 37, 6


class Attention(nn.Module):
    """rotary: with positions as rotations, of DTensors too; torch has no attention of these on the CPU."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.q, self.k, self.v = (nn.Linear(D, D, bias=bias) for bias in (True, False, True))
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        if not self.rotary:
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        q = q + torch.cat([-q[..., 1:], q[..., :1]], dim=-1)
        k = torch.view_as_real(torch.view_as_complex(k.contiguous()) * 0.6j)
        return self.out((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN, bias=False), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, rms: bool, rotary: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.first, self.attention, self.second, self.mlp = norm(D), Attention(rotary), norm(D), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Scaled(nn.Module):
    """An RMS norm written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


class Words(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D, padding_idx=3)
        self.blocks = nn.ModuleList(Block(rms="rms" in kind, rotary="rotary" in kind) for _ in range(2))
        self.norm = Scaled() if "rms" in kind else nn.LayerNorm(D)
        self.head = nn.Linear(D, WORDS, bias=False)
        self.checkpointed = "checkpointed" in kind

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A linear layer with low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def build(kind: str = "") -> Words:
    torch.manual_seed(0)
    model = Words(kind)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):  # splitting leaves copied parameters as they are
                module.bias.add_(0.1)
    if "lora" in kind:
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ("gate", "up"):
                adapted = Adapted(getattr(block.mlp, name))
                adapted.a.requires_grad_(True), adapted.b.requires_grad_(True)
                setattr(block.mlp, name, adapted)
    return freeze(model, kind)


def freeze(model: Words, kind: str) -> Words:
    """Also after splitting, as SequenceParallel makes a module's parameters trainable."""
    if "frozen" in kind:
        model.words.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model.blocks[1].mlp.down.weight.requires_grad_(False)
    return model


def split(model: Words, mesh: Any, how: str = "") -> Words:
    """how: of "sequence" (norms on a part of the tokens), "words" (embedding and head), "columns" (the embedding by
    columns), "whole" (DTensors in attention) and "loss" (logits stay split) what its words say."""
    sequence, last = "sequence" in how, Shard(1) if "sequence" in how else Replicate()
    colwise = lambda: ColwiseParallel()
    apart = lambda: ColwiseParallel(use_local_output="whole" not in how)
    plan: dict[str, Any] = {}
    for number in range(len(model.blocks)):
        at = f"blocks.{number}."
        lora = isinstance(model.blocks[number].mlp.gate, Adapted)
        for name in ("attention.q", "attention.k", "attention.v"):
            plan[at + name] = apart()
        for name in ("mlp.gate", "mlp.up"):
            plan |= {at + name + ".base": colwise(), at + name + ".b": colwise()} if lora else {at + name: colwise()}
        for name in ("attention.out", "mlp.down"):
            plan[at + name] = RowwiseParallel(output_layouts=last)
        if sequence:
            plan[at + "first"] = plan[at + "second"] = SequenceParallel()
            for name in ("attention", "mlp"):
                plan[at + name] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    if sequence:
        plan["norm"] = SequenceParallel()
    if "words" in how:
        plan["words"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=last)
    elif "columns" in how:
        plan["words"] = ColwiseParallel(output_layouts=last)
    elif sequence:
        plan["words"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=last)
    if "words" in how or sequence:
        plan["head"] = ColwiseParallel(
            input_layouts=last,
            output_layouts=Shard(-1) if "loss" in how else Replicate(),
            use_local_output="loss" not in how,
        )
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    model = parallelize_module(model, mesh, plan)
    for name, parameter in model.named_parameters():  # that of torch 2.9 makes frozen weights trainable
        parameter.requires_grad_(trained[name])
    return model
