"""Models that tests compile, the ways of compiling them, and the comparison with one sample at a time."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fastdp import PerSampleGradients

from .truth import norms_of, truth

B, T, D, V = 3, 5, 8, 11
Losses = Callable[[nn.Module, Any], Tensor]
Way = Callable[[nn.Module], nn.Module]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled yet, and no warning of what is slower."""
    torch._dynamo.reset()
    logging.getLogger("torch.__trace").propagate = False  # pytest would keep all of torch's traces
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.compile under fastdp.*")
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)  # RMS norm by hand

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(F.gelu(self.up(y)))


class Language(nn.Module):
    """A small GPT with a tied head."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D))
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Images(nn.Module):
    """Convolutions with GroupNorm, sums and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.short, self.norm = nn.Conv2d(8, 8, 1, 2), nn.GroupNorm(4, 8)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        y = self.norm(self.conv2(x))
        y += self.short(x)
        return self.head(self.relu(y).mean((2, 3)))


class Raw(nn.Module):
    """Raw parameters and functions of them: 1 + w, a product, a transpose, weight norm, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.left, self.right = (nn.Parameter(0.3 * torch.randn(*s)) for s in ((D,), (D, 2), (2, 6)))
        self.token, self.normed = nn.Parameter(torch.randn(1, 1, 6)), parametrizations.weight_norm(nn.Linear(6, D))
        self.base = nn.Linear(D, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * (1 + self.scale))
        y = F.linear(y, (self.left @ self.right).t()) + self.base(y)
        y = torch.cat([self.token.expand(len(y), -1, -1), y], 1)
        return self.normed(torch.tanh(y))


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.base = nn.Embedding(V, D).requires_grad_(False), nn.Linear(D, D).requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False), nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(torch.tanh(self.base(x) + 2 * self.up(self.down(x))).mean(1))


def tokens(b: int = B) -> Tensor:
    return torch.randint(0, V, (b, T))


def rows(b: int = B) -> Tensor:
    return torch.randn(b, T, D)


def images(b: int = B) -> Tensor:
    return torch.randn(b, 3, 8, 8)


MODELS: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "language": (Language, tokens), "images": (Images, images), "raw": (Raw, rows), "lora": (LoRA, tokens),
}  # fmt: skip


def whole(backend: str, **options: Any) -> Way:
    return lambda model: torch.compile(model, backend=backend, **options)  # type: ignore[return-value]


def in_place(backend: str, **options: Any) -> Way:
    def way(model: nn.Module) -> nn.Module:
        model.compile(backend=backend, **options)
        return model

    return way


def parts(backend: str) -> Way:
    """Some submodules as compiled modules, others in place."""

    def way(model: nn.Module) -> nn.Module:
        if isinstance(model, Language):  # of two layers
            model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
            model.blocks[1].compile(backend=backend)
        else:
            for name, child in list(model.named_children())[:2]:
                setattr(model, name, torch.compile(child, backend=backend))
        return model

    return way


def losses(model: nn.Module, batch: Any) -> Tensor:
    """One loss a sample, different for every output."""
    out = (model(*batch) if isinstance(batch, tuple) else model(batch)).flatten(1)
    return (out * torch.linspace(0.5, 1.5, out.size(1), dtype=out.dtype)).square().mean(1)


def build(name: str, **options: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(3)
    kind, batch = MODELS[name]
    return kind(**options), batch


def assert_exact(
    engine: PerSampleGradients,
    run: nn.Module,
    plain: nn.Module,
    batch: Any,
    loss: Losses = losses,
    digits: float = 1e-5,
) -> None:
    """One step of the compiled model against the plain one, a sample at a time, in float64."""
    exact = truth(plain, batch, loss)
    norms = norms_of(exact)
    factors = (norms.median() / norms).clamp(max=1)
    loss(run, batch).mean().backward()
    torch.testing.assert_close(engine.norms().double(), norms, rtol=digits, atol=0)
    found = {name.replace("_orig_mod.", ""): g.double() for name, g in engine.clipped_sum(factors.float()).items()}
    assert set(found) == set(exact)
    size = sum(float(torch.einsum("b,b...->...", factors, g).square().sum()) for g in exact.values()) ** 0.5
    for name, g in exact.items():
        wanted = torch.einsum("b,b...->...", factors, g)
        assert float((found[name] - wanted).norm()) <= digits * size, name
    assert all(p.grad is None for p in run.parameters())
