"""What the tests of the kernels share: float64 truth by plain loops and autograd, and the rule errors are judged by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def linear_gradients(a: Tensor, g: Tensor) -> Tensor:
    """[B,O,I] float64, a sample and a position at a time."""
    a, g = a.double(), g.double()
    if a.dim() == 2:
        a, g = a.unsqueeze(1), g.unsqueeze(1)
    rows = []
    for b in range(a.size(0)):
        total = a.new_zeros(g.size(2), a.size(2))
        for t in range(a.size(1)):
            total += torch.outer(g[b, t], a[b, t])
        rows.append(total)
    return torch.stack(rows) if rows else a.new_zeros(0, g.size(2), a.size(2))


def conv_gradients(x: Tensor, g: Tensor, weight: tuple[int, ...], *geometry: object) -> Tensor:
    """[B, *weight] float64, a sample at a time by autograd; geometry: stride, padding, dilation, groups."""
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    w = torch.zeros(weight, dtype=torch.float64, requires_grad=True)
    rows = []
    for b in range(x.size(0)):
        y = conv(x[b : b + 1].double().cpu(), w, None, *geometry)  # type: ignore[operator]
        rows.append(torch.autograd.grad(y, w, g[b : b + 1].double().cpu())[0])
    return torch.stack(rows).to(x.device)


def weighted(gradients: Tensor, c: Tensor) -> Tensor:
    """sum_b c_b G_b in float64, samples with c_b = 0 left out."""
    total = torch.zeros_like(gradients[0])
    for b in range(gradients.size(0)):
        if c[b] != 0:
            total += c[b].double() * gradients[b]
    return total


def check_norms(found: Tensor, gradients: Tensor, plain: Tensor) -> None:
    """Never too small by more than 1e-6; |found - truth| <= 4 |plain - truth| + 1e-5 truth (norms, not squares)."""
    truth = gradients.flatten(1).double().norm(dim=1)
    norm = found.double().sqrt()
    assert found.shape == truth.shape
    error = (norm - truth).abs()
    limit = 4 * (plain.double().sqrt() - truth).abs() + 1e-5 * truth
    assert (error <= limit).all(), f"errors {(error / truth).tolist()}"
    assert (norm >= truth * (1 - 1e-6)).all(), f"norms too small: {(norm / truth - 1).tolist()}"


def check_close(found: Tensor, truth: Tensor, plain: Tensor) -> None:
    """The same rule for tensors, by their largest element."""
    assert found.shape == truth.shape
    error = (found.double() - truth).abs().max()
    limit = 4 * (plain.double() - truth).abs().max() + 1e-5 * truth.abs().max()
    assert error <= limit, f"error {error:.3g}, largest allowed {limit:.3g}"
