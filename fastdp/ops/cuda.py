"""The CUDA C++ kernels (csrc/cuda) on torch tensors: checks, memory, stream; the arithmetic is in the kernels.

Everything runs on the current stream of the first tensor's device, waits for nothing and copies nothing from the
host, so a CUDA graph may hold it. Noise drawn under capture would be the same at every replay: it is refused, but
for the steps given a `counter` on the device; `advance_(counter)` once a step belongs into the same graph.

The noise is that of `fastdp.ops.noise` (same key stream, same bits of it for each normal). For float64
tensors the normals are computed in double, for all others in float: each is within 7e-7 of its pair's radius
of the exact one.

Raises TypeError or ValueError on wrong arguments, RuntimeError where fastdp._CUDA is absent, a kernel is not
launched, or noise would repeat.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import check_earlier, check_out, check_single_std, check_table_sum, refuse_repetition, rows_of
from .clip import check as check_clipping
from .common import DTYPES, GAMMA, KINDS, MARGIN, norm_type, sum_type
from .registry import native_cuda
from .updates import SGD, Adam, Draw, Step, implementation

__all__ = [
    "DTYPES",
    "add_scaled_",
    "advance_",
    "clip_factors",
    "embedding_clipped_sum",
    "embedding_norm_sq",
    "noise_",
    "noisy_adamw_step_",
    "noisy_sgd_step_",
]

NULL = 0


# ---------------------------------------------------------------------- noise


def noise_(out: Tensor, std: float, key: Sequence[int], step: int, offset: int = 0) -> Tensor:
    """out = std * N(0, 1), in place; returns out.

    Args: out contiguous, float32, bfloat16, float16 or float64; std >= 0; key 8 words of 32 bits; step in
    [0, 2^48); offset >= 0 the global index of out's first element. Source: RFC 8439; Box & Muller 1958.
    """
    return _noise(out, Draw(key, step, std, 1.0), offset, keep=False)


def add_scaled_(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int = 0,
                earlier_steps: Sequence[int] = (), earlier_weights: Sequence[float] = ()) -> Tensor:  # fmt: skip
    """tensor = (tensor + std * N(0, 1)) * scale, in place, rounded once; returns tensor. Arguments as of `noise_`.

    earlier_steps, earlier_weights: of correlated noise, as of `add_noise_`.
    """
    check_earlier(earlier_steps, earlier_weights)
    return _noise(tensor, Draw(key, step, std, scale, True, earlier_steps, earlier_weights), offset, keep=True)


def _noise(tensor: Tensor, draw: Draw, offset: int, *, keep: bool) -> Tensor:
    check_out(tensor, draw.key, draw.step, draw.std, offset)
    check_single_std(draw.std, tensor.dtype)
    native, pointer, kind, place = _native(), tensor.data_ptr(), DTYPES[tensor.dtype], _place(tensor.device)
    workspace = _workspace(0, draw, tensor.device) if draw.earlier_steps else None
    memory = NULL if workspace is None else workspace.data_ptr()
    native.noise(pointer, kind, tensor.numel(), offset, draw, keep, memory, *place)
    torch.autograd.graph.increment_version(tensor)
    return tensor


# ---------------------------------------------------------------------- noise and step


def _step(step: Step) -> None:
    """All parameters of a type, and with states of a type, in one launch."""
    if not step.params:
        return
    device = step.params[0].device
    if step.counter is None:
        refuse_repetition(device)
    groups: dict[tuple[torch.dtype, torch.dtype], array[int]] = {}  # six numbers of each parameter, by type
    for i, ((param, total, *states), offset) in enumerate(step.rows()):
        exact, kind = sum_type(param), states[0].dtype if states else param.dtype
        check_single_std(step.draw.std, param.dtype)
        if total.dtype != exact:
            raise ValueError(f"sum {i} must be {exact}, not {total.dtype}")
        if kind not in (param.dtype, exact) or any(state.dtype != kind for state in states):
            raise ValueError(f"states of parameter {i} must all be {param.dtype}, or all {exact}")
        if param.numel():
            pointers = [tensor.data_ptr() for tensor in (param, total, *states)] + [NULL, NULL]
            groups.setdefault((param.dtype, kind), array("q")).extend([*pointers[:4], param.numel(), offset])
    native, counter = _native(), NULL if step.counter is None else step.counter.data_ptr()
    run = native.noisy_sgd if isinstance(step.update, SGD) else native.noisy_adamw
    for kinds, rows in groups.items():
        workspace = _workspace(len(rows) // 6, step.draw, device)
        codes = [DTYPES[kind] for kind in kinds]
        run(rows, workspace.data_ptr(), *codes, step.draw, counter, step.update, *_place(device))
    step.changed()


noisy_sgd_step_ = implementation(SGD, _step, on_device=True)
noisy_adamw_step_ = implementation(Adam, _step, on_device=True)


def advance_(counter: Tensor) -> Tensor:
    """Count a step: counter += 1. Once a step, after all of its launches; captured with them, at every replay."""
    return counter.add_(1)


# ---------------------------------------------------------------------- clip factors


def clip_factors(norm_sq: Tensor, max_grad_norm: float, kind: str = "local", gamma: float = GAMMA) -> Tensor:
    """Factors c with c * norm <= max_grad_norm, [B] float32, 0 where the norm is not finite; in one launch.

    norm_sq: float32 or float64, [B]. local: min(1, R/n); global: 1[n <= R]; automatic: R / (n + gamma). See
    `fastdp.ops.clip`.
    """
    check_clipping(norm_sq, max_grad_norm, kind, gamma)
    norm_sq = norm_sq.contiguous()
    factors = torch.empty(norm_sq.shape, dtype=torch.float32, device=norm_sq.device)
    if factors.numel():
        sizes = (DTYPES[norm_sq.dtype], 1, norm_sq.numel())  # of one use
        options = (float(max_grad_norm), KINDS.index(kind), float(gamma), MARGIN)
        _native().clip_factors(norm_sq.data_ptr(), *sizes, *options, factors.data_ptr(), *_place(norm_sq.device))
    return factors


# ---------------------------------------------------------------------- embedding


def embedding_norm_sq(
    ids: Tensor, g: Tensor, padding_idx: int | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Squared norm of each sample's table gradient: ids [B,...] integers, g [B,...,d] -> [B].

    Rows of one sample with equal ids are added first, in double; rows of `padding_idx` are not read. dtype of the
    result: float32 (float64 for float64 g) unless given.
    """
    kind = norm_type(g, dtype)
    ids, g = rows_of(ids, g, padding_idx)
    batch, k, d = g.shape
    norm_sq = torch.empty(batch, dtype=torch.float64, device=g.device)
    if batch:
        ordered, order = ids.sort(dim=1, stable=True)
        native = _native()
        partial = torch.empty(batch * native.embedding_partials(k, d), dtype=torch.float64, device=g.device)
        rows = (ordered.data_ptr(), order.data_ptr(), g.data_ptr(), DTYPES[g.dtype], batch, k, d, *g.stride()[:2])
        padding = -1 if padding_idx is None else padding_idx
        native.embedding_norm_sq(*rows, padding, partial.data_ptr(), norm_sq.data_ptr(), *_place(g.device))
    return norm_sq.to(kind)


def embedding_clipped_sum(
    ids: Tensor,
    g: Tensor,
    c: Tensor,
    num_embeddings: int,
    padding_idx: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """sum_b c_b (table gradient of sample b), [num_embeddings, d] float32; added to `out` if given.

    ids [B,...] integers, g [B,...,d], c [B] factors: rows of samples with c_b = 0 and of `padding_idx` are not read.
    The same bits every time. An id outside the table is a device assertion, as in torch's own look-up.
    """
    ids, g = rows_of(ids, g, padding_idx)
    batch, k, d = g.shape
    if batch * k >= 1 << 31:
        raise ValueError(f"at most 2^31 - 1 positions, not {batch * k}")
    check_table_sum(g, c, num_embeddings, out)
    kind = sum_type(g)
    direct = out is not None and out.dtype == kind and out.is_contiguous()
    table = out if direct else torch.zeros(num_embeddings, d, dtype=kind, device=g.device)
    assert table is not None
    if g.numel():
        ordered, order = ids.flatten().sort(stable=True)
        native, factors = _native(), c.float().contiguous()
        heads = torch.empty(native.embedding_chunks(batch * k), d, dtype=kind, device=g.device)
        rows = (ordered.data_ptr(), order.data_ptr(), g.data_ptr(), DTYPES[g.dtype], factors.data_ptr())
        sizes = (batch, k, d, *g.stride()[:2], num_embeddings, -1 if padding_idx is None else padding_idx)
        native.embedding_clipped_sum(*rows, *sizes, table.data_ptr(), heads.data_ptr(), *_place(g.device))
        if direct:
            torch.autograd.graph.increment_version(table)
    return table if out is None or direct else out.add_(table)


# ---------------------------------------------------------------------- what they share


def _workspace(entries: int, draw: Draw, device: torch.device) -> Tensor:
    size = _native().workspace(entries, len(draw.earlier_steps))
    return torch.empty(size, dtype=torch.uint8, device=device)


def _native() -> Any:
    module = native_cuda()
    if isinstance(module, str):
        raise RuntimeError(f"no CUDA kernels: {module}")
    return module


def _place(device: torch.device) -> tuple[int, int]:
    """The device's index and its current stream, for the end of a call."""
    stream = torch.cuda.current_stream(device)
    return stream.device_index, stream.cuda_stream
