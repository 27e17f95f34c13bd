"""The operators as they run on a GPU, on the CPU: Triton's kernels in its interpreter, in place of the C++ ones."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fastdp.ops import extension
from fastdp.ops.registry import OPERATORS

TILED = ("tiles", "linear", "clipped", "conv", "depthwise", "embedding", "lookup", "norm")  # of fastdp.kernels


def serve_by_triton(patch: pytest.MonkeyPatch, every: bool = False) -> None:
    """Every operator that has a Triton kernel runs by it, and kernels find products by their addresses.

    every: so do those whose Triton kernel stands in for one of CUDA C++, which takes the interpreter long; and those
    without a kernel for a GPU run by their reference.
    """
    patch.setattr(extension, "BY_TRITON", {"cpu"})
    for operator in OPERATORS.values():
        kernel = operator.kernels.get("cuda")
        if kernel is not None and (kernel.serves() if every else kernel.backend) == "Triton":
            patch.setitem(operator.kernels, "cpu", kernel)
        elif kernel is None and every:
            patch.delitem(operator.kernels, "cpu", raising=False)


def small_tiles(patch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, so that small sizes have several; sums over groups of samples that are added up at the end; and of
    float32 as where cuBLAS would round it to tf32."""
    for name in TILED:
        patch.setattr(importlib.import_module(f"fastdp.kernels.{name}"), "extent", lambda size, largest: 16)
    for name in ("linear", "clipped", "many"):
        patch.setattr(f"fastdp.kernels.{name}.float32_is_exact", lambda: False)
    patch.setattr("fastdp.kernels.clipped.PART_ROWS", 0)


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Counts launches of kernels, by name."""
    from triton.runtime import interpreter

    found: Counter[str] = Counter()
    own = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] += 1
        return own(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", counted)
        yield found
