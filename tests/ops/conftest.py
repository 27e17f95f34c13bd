"""Fixtures of the operators' tests: each backend that serves here, and memory that is not what it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastdp.ops import extension
from fastdp.ops.registry import forced

from .backends import BACKENDS, poisoned
from .by_triton import serve_by_triton, small_tiles


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every operator in plain PyTorch, by the compiled kernels, and by Triton's; new memory holds NaN."""
    name: str = request.param
    if name.startswith("Triton"):
        serve_by_triton(monkeypatch, every=True)
    if name.endswith("small tiles"):
        small_tiles(monkeypatch)
    monkeypatch.setattr(extension, "scratch", lambda size: torch.full((size,), 255, dtype=torch.uint8))
    with poisoned(), forced("reference" if name == "reference" else "auto"):
        yield name
