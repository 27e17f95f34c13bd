"""RMS norms by the kernel for them: exact in every shape and type, and without copies of the input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastdp
from fastdp import ops

from ..truth import norms_of, truth

B = 4


class Net(nn.Module):
    def __init__(self, shape: tuple[int, ...], eps: float | None = 1e-6, transpose: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.transpose = nn.RMSNorm(shape, eps=eps), transpose
        self.norm.weight.data.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.transpose:
            x = x.transpose(0, 1)
        out = self.norm(x).tanh()
        return out.transpose(0, 1) if self.transpose else out


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * torch.linspace(-1, 2, x.size(-1), dtype=x.dtype)).flatten(1).sum(1)


CASES = {
    "a row a sample": (Net((6,)), (6,)), "rows": (Net((6,)), (5, 6)), "grid": (Net((6,)), (2, 3, 6)),
    "two dimensions": (Net((3, 6)), (5, 3, 6)), "torch's own eps": (Net((6,), None), (5, 6)),
    "samples second": (Net((6,), transpose=True), (5, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact(name: str, dtype: torch.dtype) -> None:
    model, shape = CASES[name]
    model, x = model.to(dtype), torch.randn(B, *shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    exact, factors = truth(model, x, losses), torch.tensor([0.3, 0.0, 1.7, 1.0])
    engine = fastdp.PerSampleGradients(model)
    losses(model, x).mean().backward()
    norms, sums = engine.norms(), engine.clipped_sum(factors)
    engine.detach()
    tight = 1e-5 if dtype == torch.float32 else 1e-6  # norms are of float32
    torch.testing.assert_close(norms.double(), norms_of(exact), rtol=tight, atol=0)
    want = torch.einsum("b,b...->...", factors.double(), exact["norm.weight"])
    torch.testing.assert_close(sums["norm.weight"].double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    """Against float64 on the same rounded numbers, but for the output gradient, which is of 16 bits."""
    model = Net((16,)).to(dtype)
    x = torch.randn(B, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    engine = fastdp.PerSampleGradients(model)
    kept: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, out: out.register_hook(kept.append) and None)
    losses(model, x).mean().backward()
    norms = engine.norms()
    engine.detach()
    xhat = x.double() / (x.double().square().mean(2, keepdim=True) + 1e-6).sqrt()
    want = (kept[0].double() * B * xhat).sum(1).norm(dim=1)
    torch.testing.assert_close(norms.double(), want, rtol=1e-5, atol=0)


class Copies(TorchDispatchMode):
    """Counts numbers that are written in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += out.numel()
        return out


def test_nothing_is_copied_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the input nothing but its rows' sizes is made: the rule asks for the kernel."""
    asked: list[tuple[int, ...]] = []
    own = ops.rms_affine_per_sample
    monkeypatch.setattr(ops, "rms_affine_per_sample", lambda *args: asked.append(args[0].shape) or own(*args))
    model = Net((16,)).to(torch.bfloat16)
    engine = fastdp.PerSampleGradients(model)
    x = torch.randn(B, 50, 16).bfloat16()
    loss = losses(model, x).float().mean()
    with Copies() as copies:
        loss.backward()
    assert asked == [(B, 50, 16)]
    assert copies.count <= B * 50 * 16 + B, "the gradient that leaves the loss, and nothing of the norm"
    assert engine.norms().isfinite().all()


def test_other_uses_take_the_general_way() -> None:
    """A weight made of parameters, and a norm without one."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.linspace(-0.5, 0.5, 6)), nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(F.rms_norm(x, (6,), 1 + self.weight, 1e-6) * self.scale, (6,)).tanh()

    model, x = Other(), torch.randn(B, 5, 6)
    exact = truth(model, x, losses)
    engine = fastdp.PerSampleGradients(model)
    losses(model, x).mean().backward()
    torch.testing.assert_close(engine.norms().double(), norms_of(exact), rtol=1e-5, atol=0)
