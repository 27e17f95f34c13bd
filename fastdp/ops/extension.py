"""What the compiled kernels are passed (strided arrays, scratch memory) and which types they take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .common import DTYPES
from .registry import WITH_OWN, Kernel, is_forced, is_watched, native, triton, triton_module

TYPES = {dtype: code for dtype, code in DTYPES.items() if dtype != torch.float64}  # of matrices
KEPT = 32 * 2**20  # scratch of at most so many bytes waits for the next call: fresh pages cost more than a small kernel

BY_TRITON = {"cuda"}  # kinds of devices that Triton's kernels serve

_memory = threading.local()


def module() -> ModuleType:
    """The compiled module; for kernels, which are loaded only where it is there."""
    found = native()
    assert not isinstance(found, str), found
    if is_watched():
        raise RuntimeError("a kernel was called past the dispatcher, which somebody watches: call its operator")
    return found


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels take these types, all of one device."""
    return all(t.dtype in TYPES and t.device == tensors[0].device for t in tensors)


def on_device(name: str, *tensors: Tensor) -> ModuleType | None:
    """The Triton kernels of this stem, where they serve such tensors beside an operator's own; else None: also where a
    user's kernel serves any operator of the device, past which nothing may run."""
    kind = tensors[0].device.type
    if kind not in BY_TRITON or is_watched() or is_forced() or kind in WITH_OWN or not takes(*tensors):
        return None
    found = triton_module(name)
    return None if isinstance(found, str) else found


def matrix(t: Tensor) -> tuple[int, int, int, int, int, int]:
    """[B,T,I] in any strides, as the kernels want it."""
    return (t.data_ptr(), TYPES[t.dtype], t.size(2), *t.stride())  # type: ignore[return-value]


def scratch(size: int) -> Tensor:
    """At least `size` bytes, aligned to 64, of this thread; contents are lost at the next call."""
    kept: Tensor | None = getattr(_memory, "kept", None)
    if kept is None or kept.numel() < size:
        kept = torch.empty(size, dtype=torch.uint8)
        if size <= KEPT:
            _memory.kept = kept
    return kept


def doubles(size: int) -> Tensor:
    """Results or partial sums."""
    return torch.empty(size, dtype=torch.float64)


def on_cuda(name: str, function: str, reference: Callable[..., Any]) -> Kernel:
    """The Triton kernel for the types it takes; the reference for the others (float64, complex)."""
    kernel = triton(name, function)

    def load() -> Callable[..., Any] | str:
        found = kernel.load()
        if isinstance(found, str):
            return found

        def serve(first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (found if takes(first, second) else reference)(first, second, *args, **kwargs)

        return serve

    return Kernel("Triton", load)
