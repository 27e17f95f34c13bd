"""What operators refuse before a kernel runs: kernels trust their arguments."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .common import DTYPES, check_padding

MASK = 0xFFFFFFFF
MAX_STEP = 1 << 48


# ---------------------------------------------------------------------- noise


def words_of(key: bytes | Sequence[int]) -> list[int]:
    """A key as the 8 words of ChaCha20's state, as operators take it. Raises ValueError on anything else."""
    if isinstance(key, bytes) and len(key) == 32:
        return list(struct.unpack("<8I", key))
    words = list(key) if isinstance(key, list | tuple) else []
    if len(words) != 8 or not all(isinstance(word, int) and 0 <= word <= MASK for word in words):
        raise ValueError("key must be 32 bytes, or a list of 8 words of 32 bits")
    return words


def check_draw(key: Sequence[int], step: int, std: float) -> None:
    """What every draw must satisfy. Raises ValueError."""
    words_of(list(key))
    if not 0 <= step < MAX_STEP:
        raise ValueError(f"step must lie in [0, 2^48), not {step}")
    if not (std == 0 or 2.0**-500 <= std <= 2.0**500):
        raise ValueError(f"std must be 0, or lie between 2^-500 and 2^500, not {std!r}")


MOST_WEIGHT = 1024.0


def check_earlier(steps: Sequence[int], weights: Sequence[float]) -> None:
    """Earlier draws, and what each is multiplied by. Raises ValueError."""
    if len(steps) != len(weights):
        raise ValueError(f"a weight for each earlier step: got {len(steps)} steps and {len(weights)} weights")
    if steps and not 0 <= min(steps) <= max(steps) < MAX_STEP:
        raise ValueError(f"earlier steps must lie in [0, 2^48), not {min(steps)} .. {max(steps)}")
    if not sum(map(abs, weights)) <= MOST_WEIGHT:
        raise ValueError(f"the sizes of weights of earlier steps must add up to {MOST_WEIGHT:g} at most")


def check_single_std(std: float, dtype: torch.dtype) -> None:
    """Noise of all types but float64 is computed in float32 on a GPU. Raises ValueError."""
    if dtype != torch.float64 and std != 0 and not 2.0**-60 <= std <= 2.0**60:
        raise ValueError(f"std must be 0 or lie between 2^-60 and 2^60 for noise of {dtype} on a GPU, not {std!r}")


def check_range(offset: int, count: int) -> None:
    """Global indices must be counted by the generator. Raises ValueError."""
    if offset < 0 or offset + count > 1 << 62:
        raise ValueError(f"global indices must lie in [0, 2^62): offset {offset} with {count} elements")


def capturing(device: torch.device) -> bool:
    """Whether what is queued on the device becomes a part of a graph now, as within `torch.cuda.graph`."""
    if device.type == "cpu":
        return False
    ask = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def refuse_repetition(device: torch.device) -> None:
    """Raises RuntimeError where noise is drawn for a graph, every replay of which would add the same."""
    if capturing(device):
        raise RuntimeError(
            "noise captured in a CUDA graph would be the same at every replay. Replay steps by optimizer.graphed, "
            "which draws anew; or give a fused update a counter= on the device, and capture advance_(counter) with it"
        )


def check_out(tensor: Tensor, key: Sequence[int], step: int, std: float, offset: int) -> None:
    """A tensor that noise is drawn into. Raises ValueError, TypeError or RuntimeError."""
    check_draw(key, step, std)
    refuse_repetition(tensor.device)
    check_range(offset, tensor.numel())
    if tensor.dtype not in DTYPES:
        raise TypeError(f"noise is drawn in float32, float64, bfloat16 or float16, not {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError("noise is drawn into contiguous memory: call contiguous() first")
    refuse_graph(tensor)


def refuse_graph(tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "noise is drawn in place, which autograd does not see: detach() the tensor, or run under torch.no_grad()"
        )


# ---------------------------------------------------------------------- factors


def check_factors(c: Tensor, batch: int) -> None:
    """One factor a sample. Raises ValueError or TypeError."""
    if c.shape != (batch,):
        raise ValueError(f"c must hold the factor of each of {batch} samples, [{batch}], not {list(c.shape)}")
    if c.is_complex():
        raise TypeError(f"factors are real numbers, not {c.dtype}")


def added(total: Tensor, out: Tensor | None) -> Tensor:
    """The sum, or `out` with the sum added to it. Raises ValueError if it has another shape."""
    if out is not None and out.shape != total.shape:
        raise ValueError(f"out must have the sum's shape, {list(total.shape)}, not {list(out.shape)}")
    return total if out is None else out.add_(total)


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


def check_table_sum(g: Tensor, c: Tensor, rows: int, out: Tensor | None) -> None:
    """The factors c of g [B,K,d], and the table [rows,d] that sums are added to. Raises ValueError."""
    check_factors(c, g.size(0))
    if out is not None and out.shape != (rows, g.size(-1)):
        raise ValueError(f"expected out [{rows}, {g.size(-1)}]; got {tuple(out.shape)}")
