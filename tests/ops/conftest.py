"""Fixtures of the operators' tests: each backend that serves here, and memory that is not what it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.ops import extension, registry

NATIVE = not isinstance(registry.native(), str)


@pytest.fixture(params=["reference", "native"] if NATIVE else ["reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every operator in plain PyTorch, then by the compiled kernels if they are built."""
    with registry.forced("reference" if request.param == "reference" else "auto"):
        yield request.param


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN, or bytes that no kernel left."""
    monkeypatch.setattr(extension, "doubles", lambda size: torch.full((size,), math.nan, dtype=torch.float64))
    monkeypatch.setattr(extension, "scratch", lambda size: torch.full((size,), 255, dtype=torch.uint8))
    empty = torch.empty

    def nan(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nan)
