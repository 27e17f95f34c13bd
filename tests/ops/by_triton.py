"""The operators as they run on a GPU, on the CPU: Triton's kernels in its interpreter, in place of the C++ ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fastdp.ops import extension
from fastdp.ops.registry import OPERATORS


def serve_by_triton(patch: pytest.MonkeyPatch) -> None:
    """Every operator that has a Triton kernel runs by it, and kernels find products by their addresses. (Those that
    stand in for CUDA C++ are slow here: they have tests of their own.)"""
    patch.setattr(extension, "BY_TRITON", {"cpu"})
    for operator in OPERATORS.values():
        kernel = operator.kernels.get("cuda")
        if kernel is not None and kernel.backend == "Triton":
            patch.setitem(operator.kernels, "cpu", kernel)


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
