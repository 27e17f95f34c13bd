"""RMS norms by the kernel for them: also where samples lie second, and without copies of the input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastdp
from fastdp import ops

from ..cases import Net, square
from ..truth import compare

B = 4
FORWARDS = {
    "rows": lambda m, x: m.norm(x).tanh(),
    "samples second": lambda m, x: m.norm(x.transpose(0, 1)).tanh().transpose(0, 1),
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS.keys())
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)], ids=str)
def test_exact(shape: tuple[int, ...], eps: float | None, forward: Any) -> None:
    if forward is FORWARDS["samples second"] and shape == (6,):
        pytest.skip("no other dimension")
    torch.manual_seed(0)
    model = Net(forward, norm=nn.RMSNorm(6, eps=eps))
    model.norm.weight.data.uniform_(0.5, 1.5)
    assert compare(model, torch.randn(B, *shape), square).worst < 1e-5


class Copies(TorchDispatchMode):
    """Counts numbers that are written in another type."""

    count = 0

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
    model = Net(FORWARDS["rows"], norm=nn.RMSNorm(16, eps=1e-6)).to(torch.bfloat16)
    engine = fastdp.PerSampleGradients(model)
    loss = square(model, torch.randn(B, 50, 16).bfloat16()).float().mean()
    with Copies() as copies:
        loss.backward()
    assert asked == [(B, 50, 16)]
    assert copies.count <= B * 50 * 16 + B, "the gradient that leaves the loss, and nothing of the norm"
    assert engine.norms().isfinite().all()
