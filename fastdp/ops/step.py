"""Noise and the optimizer's update in one pass over all parameters.

    n = (sum + std * N(0, 1)) * scale            the private gradient, in float32 or better, of the sum's type
    state, weight = update(n, state, weight)     as torch.optim.SGD, Adam or AdamW, in float32 or better

The noise is that of `noise_` for the same key, step and global index. On the CPU csrc/cpu/step.cpp does all
tensors in one parallel region; results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .common import DTYPES
from .noise import check_draw, check_range, on_cuda, reference_chunks, words_of
from .registry import cpp, define, native

_Update = Callable[[int, Tensor, Tensor], None]  # (number of the tensor, gradient, parameter), in place


def _checked(params: Sequence[Tensor], sums: Sequence[Tensor], states: Sequence[Sequence[Tensor]],
             offsets: Sequence[int]) -> None:  # fmt: skip
    """Raises ValueError or TypeError where the lists do not fit: the kernel trusts them."""
    if any(len(x) != len(params) for x in (sums, offsets, *states)):
        raise ValueError(
            f"one sum, offset and state a parameter: {len(params)} parameters, {len(sums)} sums, {len(offsets)} "
            f"offsets, states {[len(x) for x in states]}"
        )
    for k, (param, total, offset) in enumerate(zip(params, sums, offsets, strict=True)):
        check_range(offset, param.numel())
        if total.dtype != torch.float64 and (total.dtype != torch.float32 or param.dtype == torch.float64):
            raise TypeError(f"sum {k}: float32, or float64 for a float64 parameter, not {total.dtype}")
        for tensor in (param, total, *(x[k] for x in states)):
            if tensor.dtype not in DTYPES:
                raise TypeError(f"parameter {k}: float32, float64, bfloat16 or float16, not {tensor.dtype}")
            if tensor.shape != param.shape or tensor.device != params[0].device:
                raise ValueError(f"parameter {k}: its sum and states must have its shape, and one device serve all")
            if not tensor.is_contiguous():
                raise ValueError(f"parameter {k}: it, its sum and its states must be contiguous")
    ranges = sorted((offset, offset + p.numel()) for offset, p in zip(offsets, params, strict=True) if p.numel())
    if any(low < end for (_, end), (low, _) in zip(ranges, ranges[1:], strict=False)):
        raise ValueError("ranges of global indices overlap: two parameters would get the same noise")


def _counted(counter: Tensor | None, step: int, t: int = 1) -> tuple[int, int]:
    more = 0 if counter is None else int(counter)
    if t + more < 1:
        raise ValueError(f"t counts this step: 1 or more, not {t + more}")
    return step + more, t + more


# ---------------------------------------------------------------------- reference


def _noised(params: Sequence[Tensor], sums: Sequence[Tensor], offsets: Sequence[int], key: Sequence[int], step: int,
            std: float, scale: float, keep_grads: bool, update: _Update) -> None:  # fmt: skip
    check_draw(key, step, std)
    for k, (param, total) in enumerate(zip(params, sums, strict=True)):
        grad = torch.empty_like(total)
        flat, source = grad.view(-1), total.view(-1)
        if std == 0:
            torch.mul(total, scale, out=grad)
        chunks = reference_chunks(flat.numel() if std else 0, key, step, offsets[k], total.device)
        for low, high, normal in chunks:
            flat[low:high] = normal.mul_(std).add_(source[low:high]).mul_(scale)
        if keep_grads:
            total.copy_(grad)
        kind = torch.float64 if param.dtype == torch.float64 else torch.float32
        weight = param.to(kind, copy=True)
        update(k, grad.to(kind), weight)
        param.copy_(weight)


def _sgd(
    params: Sequence[Tensor], sums: Sequence[Tensor], momentum_buffers: Sequence[Tensor], offsets: Sequence[int], *,
    key: Sequence[int], step: int, std: float, scale: float, lr: float, momentum: float = 0.0, dampening: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False, first: bool = False,
    keep_grads: bool = True, counter: Tensor | None = None,
) -> None:  # fmt: skip
    _checked(params, sums, [momentum_buffers] if momentum else [], offsets)

    def update(k: int, grad: Tensor, weight: Tensor) -> None:
        grad = (-grad if maximize else grad).add_(weight, alpha=weight_decay)
        if momentum:
            old = momentum_buffers[k].to(grad.dtype)
            buffer = grad if first else old * momentum + grad * (1 - dampening)
            momentum_buffers[k].copy_(buffer)
            grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
        weight.add_(grad, alpha=-lr)

    step, _ = _counted(counter, step)
    _noised(params, sums, offsets, key, step, std, scale, keep_grads, update)


def _adamw(
    params: Sequence[Tensor], sums: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    offsets: Sequence[int], *, key: Sequence[int], step: int, std: float, scale: float, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, t: int, decoupled: bool = True, maximize: bool = False,
    keep_grads: bool = True, counter: Tensor | None = None,
) -> None:  # fmt: skip
    _checked(params, sums, [exp_avgs, exp_avg_sqs], offsets)
    step, t = _counted(counter, step, t)

    def update(k: int, grad: Tensor, weight: Tensor) -> None:
        if maximize:
            grad = -grad
        if decoupled:
            weight.sub_(weight, alpha=lr * weight_decay)
        elif weight_decay:
            grad = grad.add(weight, alpha=weight_decay)
        average, square = exp_avgs[k].to(grad.dtype), exp_avg_sqs[k].to(grad.dtype)
        average = average + (grad - average) * (1 - beta1)
        square = square + (grad * grad - square) * (1 - beta2)
        denominator = square.sqrt().mul_((1 - beta2**t) ** -0.5).add_(eps)
        weight.addcdiv_(average, denominator, value=-lr / (1 - beta1**t))
        exp_avgs[k].copy_(average)
        exp_avg_sqs[k].copy_(square)

    _noised(params, sums, offsets, key, step, std, scale, keep_grads, update)


# ---------------------------------------------------------------------- C++


def _by_arithmetic(params: Sequence[Tensor], sums: Sequence[Tensor], states: Sequence[Sequence[Tensor]],
                   offsets: Sequence[int]) -> list[list[list[int]]]:  # fmt: skip
    """What csrc/bind_stream.cpp takes of each tensor, those of float64 apart."""
    lists: list[list[list[int]]] = [[], []]
    for k, (param, total) in enumerate(zip(params, sums, strict=True)):
        tensors = [param, total, *(x[k] for x in states)]
        absent = [0] * (4 - len(tensors))
        lists[param.dtype == torch.float64].append(
            [t.data_ptr() for t in tensors] + absent + [param.numel(), offsets[k]]
            + [DTYPES[t.dtype] for t in tensors] + absent
        )  # fmt: skip
    return [x for x in lists if x]


def _native_sgd(
    params: Sequence[Tensor], sums: Sequence[Tensor], momentum_buffers: Sequence[Tensor], offsets: Sequence[int], *,
    key: Sequence[int], step: int, std: float, scale: float, lr: float, momentum: float = 0.0, dampening: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False, first: bool = False,
    keep_grads: bool = True, counter: Tensor | None = None,
) -> None:  # fmt: skip
    states = [momentum_buffers] if momentum else []
    _checked(params, sums, states, offsets)
    step, _ = _counted(counter, step)
    check_draw(key, step, std)
    module: Any = native()
    for tensors in _by_arithmetic(params, sums, states, offsets):
        module.sgd_step(tensors, list(key), step, std, scale, lr, momentum, dampening, weight_decay, nesterov, maximize,
                        first, keep_grads, torch.get_num_threads())  # fmt: skip
    _changed(params, sums if keep_grads else (), *states)


def _native_adamw(
    params: Sequence[Tensor], sums: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    offsets: Sequence[int], *, key: Sequence[int], step: int, std: float, scale: float, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, t: int, decoupled: bool = True, maximize: bool = False,
    keep_grads: bool = True, counter: Tensor | None = None,
) -> None:  # fmt: skip
    _checked(params, sums, [exp_avgs, exp_avg_sqs], offsets)
    step, t = _counted(counter, step, t)
    check_draw(key, step, std)
    module: Any = native()
    for tensors in _by_arithmetic(params, sums, [exp_avgs, exp_avg_sqs], offsets):
        module.adam_step(tensors, list(key), step, std, scale, lr, beta1, beta2, eps, weight_decay, t, decoupled,
                         maximize, keep_grads, torch.get_num_threads())  # fmt: skip
    _changed(params, sums if keep_grads else (), exp_avgs, exp_avg_sqs)


def _changed(*lists: Iterable[Tensor]) -> None:
    """Let autograd see what the kernel wrote."""
    torch.autograd.graph.increment_version([tensor for tensors in lists for tensor in tensors])


# ---------------------------------------------------------------------- operators

_nothing: Callable[..., None] = lambda *args, **options: None
_sgd_op = define(
    "noisy_sgd_step_(Tensor(a!)[] params, Tensor(b!)[] sums, Tensor(c!)[] momentum_buffers, int[] offsets, *, "
    "int[] key, int step, float std, float scale, float lr, float momentum=0.0, float dampening=0.0, "
    "float weight_decay=0.0, bool nesterov=False, bool maximize=False, bool first=False, bool keep_grads=True, "
    "Tensor? counter=None) -> ()",
    _sgd, _nothing, CPU=cpp(_native_sgd), CUDA=on_cuda("noisy_sgd_step_", False),
)  # fmt: skip
_adamw_op = define(
    "noisy_adamw_step_(Tensor(a!)[] params, Tensor(b!)[] sums, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "int[] offsets, *, int[] key, int step, float std, float scale, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int t, bool decoupled=True, bool maximize=False, bool keep_grads=True, "
    "Tensor? counter=None) -> ()",
    _adamw, _nothing, CPU=cpp(_native_adamw), CUDA=on_cuda("noisy_adamw_step_", False),
)  # fmt: skip


def noisy_sgd_step_(
    params: Sequence[Tensor], sums: Sequence[Tensor], momentum_buffers: Sequence[Tensor], offsets: Sequence[int], *,
    key: bytes | Sequence[int], step: int, std: float, scale: float, lr: float, momentum: float = 0.0,
    dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False,
    first: bool = False, keep_grads: bool = True, counter: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of torch.optim.SGD with n = (sum + std * N(0, 1)) * scale for gradients, in place.

    Args: params of float32, bfloat16, float16 or float64; sums of their shapes, float32 (float64 for float64
    parameters); momentum_buffers of their shapes, not read where momentum = 0 (then [] will do), only written where
    `first`; offsets the global index of each parameter's first element, ranges disjoint; key 32 bytes or 8 words;
    std and scale as above; keep_grads: n is left in `sums`; counter: None, or an int64 [1] tensor on the parameters'
    device, added to `step`. All tensors contiguous. Raises TypeError or ValueError on anything else.
    """
    if params:
        _sgd_op(list(params), list(sums), list(momentum_buffers), list(offsets), key=words_of(key), step=step, std=std,
                scale=scale, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                nesterov=nesterov, maximize=maximize, first=first, keep_grads=keep_grads, counter=counter)  # fmt: skip


def noisy_adamw_step_(
    params: Sequence[Tensor], sums: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    offsets: Sequence[int], *, key: bytes | Sequence[int], step: int, std: float, scale: float, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, t: int, decoupled: bool = True,
    maximize: bool = False, keep_grads: bool = True, counter: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of torch.optim.AdamW (Adam where not `decoupled`) with n = (sum + std * N(0, 1)) * scale, in place.

    Args: as of `noisy_sgd_step_`; exp_avgs, exp_avg_sqs the averages of gradients and their squares, of the
    parameters' shapes; t the number of steps including this one, 1 at the first; counter is added to it, too.
    Source: Kingma & Ba 2015; Loshchilov & Hutter 2019 (decoupled weight decay). No amsgrad.
    """
    if params:
        _adamw_op(list(params), list(sums), list(exp_avgs), list(exp_avg_sqs), list(offsets), key=words_of(key),
                  step=step, std=std, scale=scale, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
                  t=t, decoupled=decoupled, maximize=maximize, keep_grads=keep_grads, counter=counter)  # fmt: skip
