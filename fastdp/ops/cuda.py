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

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import check_draw, check_row, check_tensor, rows_of, words_of
from .common import DTYPES, GAMMA, KINDS, MARGIN, norm_type
from .registry import native_cuda

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
    "words_of",
]

NULL = 0
_TypePair = tuple[torch.dtype, torch.dtype]


# ---------------------------------------------------------------------- noise


def noise_(out: Tensor, std: float, key: Sequence[int], step: int, offset: int = 0) -> Tensor:
    """out = std * N(0, 1), in place; returns out.

    Args: out contiguous, float32, bfloat16, float16 or float64; std >= 0; key 8 words of 32 bits; step in
    [0, 2^48); offset >= 0 the global index of out's first element. Source: RFC 8439; Box & Muller 1958.
    """
    return _noise(out, std, 1.0, key, step, offset, keep=False)


def add_scaled_(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int = 0) -> Tensor:
    """tensor = (tensor + std * N(0, 1)) * scale, in place, rounded once; returns tensor. Arguments as of `noise_`."""
    return _noise(tensor, std, scale, key, step, offset, keep=True)


def _noise(
    tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int, *, keep: bool
) -> Tensor:
    check_draw(tensor.dtype, std, key, step)
    check_tensor("the tensor", tensor, tensor.device)
    if offset < 0 or offset + tensor.numel() > 1 << 62:
        raise ValueError(f"global indices must lie in [0, 2^62): offset {offset} with {tensor.numel()} elements")
    _refuse_repetition(tensor.device)
    pointer, kind, place = tensor.data_ptr(), DTYPES[tensor.dtype], _place(tensor.device)
    _native().noise(pointer, kind, tensor.numel(), offset, list(key), step, std, scale, keep, *place)
    torch.autograd.graph.increment_version(tensor)
    return tensor


# ---------------------------------------------------------------------- noise and step


def noisy_sgd_step_(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    offsets: Sequence[int],
    *,
    key: Sequence[int],
    step: int,
    std: float,
    scale: float,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool = False,
    keep_grads: bool = True,
    counter: Tensor | None = None,
) -> None:
    """n = (sum + std * N(0, 1)) * scale, then torch.optim.SGD's rule with gradient n, all in one launch a type.

    Args: params, sums, momentum_buffers (empty where momentum is 0): contiguous, sums float32 (float64 for float64
    parameters), buffers of the parameter's type or float32; offsets: the global index of each parameter's first
    element; key 8 words of 32 bits; first: buffers are written, not read; keep_grads: n is written into sums;
    counter: int64 [1] on the device, added to step when the kernel runs (see `advance_`).
    """
    groups = _table(params, sums, [momentum_buffers] if momentum else [], offsets, std, key, step, counter)
    options = (lr, momentum, dampening, weight_decay, nesterov, maximize, first)
    _launch("noisy_sgd", groups, params, key, step, std, scale, keep_grads, counter, options)
    written = [params, sums if keep_grads else (), momentum_buffers if momentum else ()]
    torch.autograd.graph.increment_version([tensor for tensors in written for tensor in tensors])


def noisy_adamw_step_(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    offsets: Sequence[int],
    *,
    key: Sequence[int],
    step: int,
    std: float,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    t: int,
    decoupled: bool = True,
    maximize: bool = False,
    keep_grads: bool = True,
    counter: Tensor | None = None,
) -> None:
    """n = (sum + std * N(0, 1)) * scale, then torch.optim.AdamW's rule with gradient n, all in one launch a type.

    Args: as of `noisy_sgd_step_`; t: torch's step count after this step, 1 at the first; decoupled: AdamW's weight
    decay, else Adam's (L2); counter is added to step and to t. Source: Loshchilov & Hutter 2019; Kingma & Ba 2015.
    """
    if t < 1:
        raise ValueError(f"t counts steps from 1, not {t}")
    groups = _table(params, sums, [exp_avgs, exp_avg_sqs], offsets, std, key, step, counter)
    options = (lr, beta1, beta2, eps, weight_decay, t, decoupled, maximize)
    _launch("noisy_adamw", groups, params, key, step, std, scale, keep_grads, counter, options)
    written = [params, sums if keep_grads else (), exp_avgs, exp_avg_sqs]
    torch.autograd.graph.increment_version([tensor for tensors in written for tensor in tensors])


def advance_(counter: Tensor) -> Tensor:
    """Count a step: counter += 1. Once a step, after all of its launches; captured with them, at every replay."""
    return counter.add_(1)


def _table(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    offsets: Sequence[int],
    std: float,
    key: Sequence[int],
    step: int,
    counter: Tensor | None,
) -> dict[_TypePair, array[int]]:
    """What the kernels need of each parameter, six numbers, by type of parameter and state."""
    if any(len(other) != len(params) for other in (sums, offsets, *states)):
        lengths = [len(params), len(sums), *map(len, states), len(offsets)]
        raise ValueError(f"a sum, each state and an offset for every parameter: got lists of {lengths}")
    if counter is None:
        if params:
            _refuse_repetition(params[0].device)
    elif counter.dtype != torch.int64 or counter.numel() != 1 or (params and counter.device != params[0].device):
        raise ValueError("counter must be an int64 tensor of one element on the parameters' device")
    groups: dict[_TypePair, array[int]] = {}
    no_state = (NULL, NULL)
    for i, (param, total, offset) in enumerate(zip(params, sums, offsets, strict=True)):
        held = [state[i] for state in states]
        pair = (param.dtype, held[0].dtype if held else param.dtype)
        if pair not in groups:
            check_draw(param.dtype, std, key, step)
            groups[pair] = array("q")
        check_row(i, param, total, held, offset, params[0].device)
        if param.numel():
            pointers = (*(state.data_ptr() for state in held), *no_state)[:2]
            groups[pair].extend((param.data_ptr(), total.data_ptr(), *pointers, param.numel(), offset))
    return groups


def _launch(
    name: str,
    groups: dict[_TypePair, array[int]],
    params: Sequence[Tensor],
    key: Sequence[int],
    step: int,
    std: float,
    scale: float,
    keep_grads: bool,
    counter: Tensor | None,
    options: tuple[Any, ...],
) -> None:
    native, words = _native(), list(key)
    address = NULL if counter is None else counter.data_ptr()
    for (param_type, state_type), rows in groups.items():
        if not rows:
            continue
        device = params[0].device
        workspace = torch.empty(native.workspace(len(rows) // 6), dtype=torch.uint8, device=device)
        draw = (words, step, std, scale, keep_grads, address)
        kinds = (DTYPES[param_type], DTYPES[state_type])
        getattr(native, name)(rows, workspace.data_ptr(), *kinds, *draw, *options, *_place(device))


# ---------------------------------------------------------------------- clip factors


def clip_factors(norm_sq: Tensor, max_grad_norm: float, kind: str = "local", gamma: float = GAMMA) -> Tensor:
    """Factors c with c * norm <= max_grad_norm, [B] float32, 0 where the norm is not finite; in one launch.

    norm_sq: float32 or float64, [B], or [U,B] squared norms of U uses, which are added first. local: min(1, R/n);
    global: 1[n <= R]; automatic: R / (n + gamma). See `fastdp.ops.clip`.
    """
    if kind not in KINDS:
        raise ValueError(f"clipping must be one of {', '.join(KINDS)}, not {kind!r}")
    if norm_sq.dim() not in (1, 2) or norm_sq.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"norm_sq must be [B] or [U,B], float32 or float64: {norm_sq.dtype} {tuple(norm_sq.shape)}")
    if not (0 < max_grad_norm < math.inf and 0 <= gamma < math.inf):
        raise ValueError(f"max_grad_norm > 0 and gamma >= 0 must be finite: {max_grad_norm!r}, {gamma!r}")
    rows = (norm_sq if norm_sq.dim() == 2 else norm_sq.unsqueeze(0)).contiguous()
    factors = torch.empty(rows.size(1), dtype=torch.float32, device=rows.device)
    if factors.numel():
        sizes = (DTYPES[rows.dtype], rows.size(0), rows.size(1))
        options = (float(max_grad_norm), KINDS.index(kind), float(gamma), MARGIN)
        _native().clip_factors(rows.data_ptr(), *sizes, *options, factors.data_ptr(), *_place(rows.device))
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
    if c.shape != (batch,) or c.device != g.device:
        raise ValueError(f"c must be [{batch}] on {g.device}: {tuple(c.shape)} on {c.device}")
    kind = torch.float64 if g.dtype == torch.float64 else torch.float32
    if out is not None and out.shape != (num_embeddings, d):
        raise ValueError(f"out must be [{num_embeddings}, {d}], not {tuple(out.shape)}")
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


def _native() -> Any:
    module = native_cuda()
    if isinstance(module, str):
        raise RuntimeError(f"no CUDA kernels: {module}")
    return module


def _place(device: torch.device) -> tuple[int, int]:
    """The device's index and its current stream, for the end of a call."""
    stream = torch.cuda.current_stream(device)
    return stream.device_index, stream.cuda_stream


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _refuse_repetition(device: torch.device) -> None:
    if _capturing(device):
        raise RuntimeError(
            "noise captured in a CUDA graph would be the same at every replay: give the step a counter= on the device "
            "and capture advance_(counter) with it"
        )
