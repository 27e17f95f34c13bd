"""Arguments of the CUDA C++ kernels: which types they take, and what is refused before a launch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .common import DTYPES, check_padding

MAX_STEP = 1 << 48


# ---------------------------------------------------------------------- noise and step


def check_draw(dtype: torch.dtype, std: float, key: Sequence[int], step: int) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"noise is added to float32, bfloat16, float16 or float64, not {dtype}")
    if not 0 <= std < math.inf or (dtype != torch.float64 and std > torch.finfo(torch.float32).max):
        raise ValueError(f"std must be 0 or larger and finite, not {std!r}")
    if len(key) != 8 or not all(0 <= word < 1 << 32 for word in key):
        raise ValueError("key must be 8 words of 32 bits")
    if not 0 <= step < MAX_STEP:
        raise ValueError(f"step must lie in [0, 2^48), not {step}")


def check_tensor(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, others on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous: elements are counted in memory order")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} is written in place, which autograd does not see: run under torch.no_grad()")


def check_row(i: int, param: Tensor, total: Tensor, held: list[Tensor], offset: int, device: torch.device) -> None:
    exact = torch.float64 if param.dtype == torch.float64 else torch.float32
    check_tensor(f"parameter {i}", param, device)
    check_tensor(f"sum {i}", total, device)
    if total.dtype != exact or total.numel() != param.numel():
        raise ValueError(f"sum {i} must be {exact} with {param.numel()} elements: {total.dtype}, {total.numel()}")
    for state in held:
        check_tensor(f"a state of parameter {i}", state, device)
        if state.dtype != held[0].dtype or state.dtype not in (param.dtype, exact):
            raise ValueError(f"states of parameter {i} must all be {param.dtype}, or all {exact}, not {state.dtype}")
        if state.numel() != param.numel():
            raise ValueError(f"states of parameter {i} must have {param.numel()} elements, not {state.numel()}")
    if offset < 0 or offset + param.numel() > 1 << 62:
        raise ValueError(f"global indices must lie in [0, 2^62): offset {offset} with {param.numel()} elements")


def words_of(key: bytes | Iterable[int]) -> list[int]:
    """A 32-byte key as the 8 words of the kernels."""
    if not isinstance(key, bytes):
        return list(key)
    return [int.from_bytes(key[k : k + 4], "little") for k in range(0, len(key), 4)]


# ---------------------------------------------------------------------- embedding


def rows_of(ids: Tensor, g: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """ids [B,K] int64, g [B,K,d] with its last dimension contiguous."""
    check_padding(padding_idx)
    if ids.dim() == 0 or ids.shape != g.shape[:-1] or ids.device != g.device:
        raise ValueError(f"expected ids [B,...] and g [B,...,d]; got {tuple(ids.shape)} and {tuple(g.shape)}")
    if g.dtype not in DTYPES or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, g a floating-point type: {ids.dtype}, {g.dtype}")
    k = math.prod(ids.shape[1:])
    g = g.reshape(ids.size(0), k, g.size(-1))
    return ids.reshape(ids.size(0), k).long().contiguous(), g if g.stride(2) == 1 else g.contiguous()
