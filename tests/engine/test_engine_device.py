"""The engine on a GPU: every kind of use against one-sample truth, and whole private steps against those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp

from .. import cases
from ..truth import norms_of, truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's convolutions and recurrent layers otherwise use tf32, which the truth does not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: moved(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item) for item in value)
    return value


@pytest.mark.parametrize("name", cases.CASES)
def test_exact(name: str) -> None:
    model, batch, losses = cases.build(name)
    exact = truth(model, batch, losses)
    model, batch = model.cuda(), moved(batch)
    engine = fastdp.PerSampleGradients(model)
    losses(model, batch).mean().backward()
    norms = engine.norms().cpu().double()
    torch.testing.assert_close(norms, norms_of(exact), rtol=1e-4, atol=1e-6)
    factors = torch.linspace(0.2, 1.0, len(norms))
    factors[0] = 0
    for key, total in engine.clipped_sum(factors.cuda()).items():
        wanted = torch.einsum("b,b...->...", factors.double(), exact[key])
        error = (total.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-6)
        assert error < 1e-4, (key, float(error))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))


@pytest.mark.parametrize("base", ["DPSGD", "DPAdam", "DPAdamW"])
@pytest.mark.parametrize("clipping", ["local", "global", "automatic"])
def test_whole_steps_equal_those_of_the_cpu(base: str, clipping: str) -> None:
    """With a seed the noise is a function of step and index alone, whatever the device."""
    ids = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(1))
    found = []
    for device in ("cpu", "cuda"):
        model = net().to(device)
        optimizer = getattr(fastdp, base)(
            model, lr=0.01, noise_multiplier=0.7, max_grad_norm=0.5, expected_batch_size=8, clipping=clipping, seed=3
        )
        for _ in range(3):
            out = model(ids.to(device)).flatten(0, 1)
            F.cross_entropy(out, ids.to(device).flatten(), reduction="none").view(8, 16).mean(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().cpu() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_no_backward_waits_for_the_device() -> None:
    """From the loss to the end of the step nothing reads a value on the host."""
    model = net().cuda()
    optimizer = fastdp.DPAdamW(model, lr=1e-3, noise_multiplier=1.0, expected_batch_size=8)
    ids = torch.randint(0, 50, (8, 16), device="cuda")

    def step() -> None:
        losses = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none").view(8, 16).mean(1)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # layouts are found, kernels compiled, routes calibrated
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
