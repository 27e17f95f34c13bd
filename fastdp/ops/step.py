"""Noise and the optimizer's update in one pass over all parameters.

    n = (sum + std * N(0, 1)) * scale            the private gradient, in float32 or better, of the sum's type
    state, weight = update(n, state, weight)     as torch.optim.SGD, Adam or AdamW, in float32 or better

The noise is that of `noise_` for the same key, step and global index. On the CPU csrc/cpu/step.cpp does all
tensors in one parallel region; results do not depend on the number of threads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import words_of
from .common import DTYPES, sum_type
from .noise import on_cuda
from .noise_reference import reference_release
from .registry import Operator, cpp, define, native, triton
from .updates import SGD, Adam, Draw, Step, implementation


def reference_step(step: Step) -> None:
    key, number, std, scale, keep_grads, earlier_steps, earlier_weights = step.draw
    for (param, total, *states), offset in step.rows():
        grad = torch.empty_like(total)
        flat, source = grad.view(-1), total.view(-1)
        if std == 0:
            torch.mul(total, scale, out=grad)
        else:
            draws = (number, earlier_steps, earlier_weights)
            for low, high, n in reference_release(source, std, scale, key, draws, offset, total.dtype):
                flat[low:high] = n
        if keep_grads:
            total.copy_(grad)
        kind = sum_type(param)
        weight = param.to(kind, copy=True)
        step.update.apply(grad.to(kind), weight, *states)
        param.copy_(weight)


def _native(step: Step) -> None:
    _run_native(_tables(step, [_row(tensors, offset) for tensors, offset in step.rows()]), step)


def _row(tensors: Sequence[Tensor], offset: int) -> list[int]:
    """A parameter, its sum and its states, as csrc/bindings.cpp takes them."""
    absent = [0] * (4 - len(tensors))
    pointers, kinds = [t.data_ptr() for t in tensors], [DTYPES[t.dtype] for t in tensors]
    return pointers + absent + [tensors[0].numel(), offset] + kinds + absent


def _tables(step: Step, rows: Sequence[list[int]]) -> list[list[list[int]]]:
    """The rows of the parameters, those of float64 apart."""
    each = [(row, total.dtype == torch.float64) for row, total in zip(rows, step.sums, strict=True)]
    return [[row for row, is_double in each if is_double == double] for double in (False, True)]


def _run_native(tables: Sequence[list[list[int]]], step: Step) -> None:
    module: Any = native()
    run = module.sgd_step if isinstance(step.update, SGD) else module.adam_step
    for table in filter(None, tables):
        run(table, step.draw, step.update, torch.get_num_threads())
    step.changed()


class StepTable:
    """Parameters and states that take one step after another: what the operators check of them at every call, and the
    rows that the compiled kernel takes, found once for as long as `fits`."""

    def __init__(self, params: Sequence[Tensor], states: Sequence[Sequence[Tensor]], offsets: Sequence[int]) -> None:
        self.params, self.states, self.offsets = list(params), [list(tensors) for tensors in states], list(offsets)
        self._marks = _marks(self.params, self.states)
        self._tables: list[list[list[int]]] = []
        self._order: list[tuple[list[int], torch.dtype, torch.Size]] = []  # row, type of its sum, shape

    def fits(self, params: Sequence[Tensor], states: Sequence[Sequence[Tensor]], offsets: Sequence[int]) -> bool:
        """Whether these are the very tensors, with the memory that they had."""
        old, new = [self.params, *self.states], [params, *states]
        if len(old) != len(new) or any(len(a) != len(b) for a, b in zip(old, new, strict=True)):
            return False
        same = all(all(map(operator.is_, mine, others)) for mine, others in zip(old, new, strict=True))
        if not same or self.offsets != offsets:
            return False
        if not isinstance(module := native(), str):
            return module.memory_unchanged(_all_of(self.params, self.states), self._marks)  # type: ignore[no-any-return]
        return self._marks == _marks(self.params, self.states)

    def run(self, sums: Sequence[Tensor], draw: Draw, update: SGD | Adam) -> None:
        """`noisy_sgd_step_` or `noisy_adamw_step_` with these sums. Raises as these."""
        operator = _sgd_op if isinstance(update, SGD) else _adamw_op
        if self.params[0].device.type != "cpu" or not operator.is_shipped("cpu"):
            _call(operator, (self.params, sums, *(self.states or [[]]), self.offsets), draw, update, None)
            return
        step = Step(self.params, sums, self.states, self.offsets, draw, update, None)
        if not self._tables or len(sums) != len(self.params):
            step.check()
            rows = [_row(tensors, offset) for tensors, offset in step.rows()]
            self._order = [(row, t.dtype, p.shape) for row, t, p in zip(rows, sums, self.params, strict=True)]
            self._tables = _tables(step, rows)
        else:
            step.check_numbers()
            home = self.params[0].device
            for (row, dtype, shape), total in zip(self._order, sums, strict=True):
                if total.dtype != dtype or total.shape != shape or total.device != home or not total.is_contiguous():
                    step.check()  # says what is wrong, or that only the type of the sums is another
                    self._order, self._tables = [], []
                    return self.run(sums, draw, update)
                row[1] = total.data_ptr()
        _run_native(self._tables, step)


def _all_of(params: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in (params, *states) for tensor in tensors]


def _marks(params: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> list[Any]:
    return list(map(memory_mark, _all_of(params, states)))


def memory_mark(tensor: Tensor) -> Any:
    """Where a tensor lies, and how: what may change of one that stays the same (by `.data =`, say)."""
    module = native()
    if not isinstance(module, str):
        return module.mark_of(tensor)
    return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype


_nothing: Callable[..., None] = lambda *args, **options: None
_sgd_op = define(
    "noisy_sgd_step_(Tensor(a!)[] params, Tensor(b!)[] sums, Tensor(c!)[] momentum_buffers, int[] offsets, *, "
    "int[] key, int step, float std, float scale, float lr, float momentum=0.0, float dampening=0.0, "
    "float weight_decay=0.0, bool nesterov=False, bool maximize=False, bool first=False, bool keep_grads=True, "
    "int[] earlier_steps=[], float[] earlier_weights=[], "
    "Tensor? counter=None) -> ()",
    implementation(SGD, reference_step), _nothing,
    CPU=cpp(implementation(SGD, _native)), CUDA=on_cuda("noisy_sgd_step_", False, triton("step", "noisy_sgd_step_")),
)  # fmt: skip
_adamw_op = define(
    "noisy_adamw_step_(Tensor(a!)[] params, Tensor(b!)[] sums, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "int[] offsets, *, int[] key, int step, float std, float scale, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int t, bool decoupled=True, bool maximize=False, bool keep_grads=True, "
    "int[] earlier_steps=[], float[] earlier_weights=[], "
    "Tensor? counter=None) -> ()",
    implementation(Adam, reference_step), _nothing,
    CPU=cpp(implementation(Adam, _native)),
    CUDA=on_cuda("noisy_adamw_step_", False, triton("step", "noisy_adamw_step_")),
)  # fmt: skip


def _call(operator: Operator, lists: Sequence[Sequence[Any]], draw: Draw, update: SGD | Adam,
          counter: Tensor | None) -> None:  # fmt: skip
    if lists[0]:
        operator(*map(list, lists), **draw._asdict(), **update._asdict(), counter=counter)


def noisy_sgd_step_(
    params: Sequence[Tensor], sums: Sequence[Tensor], momentum_buffers: Sequence[Tensor], offsets: Sequence[int], *,
    key: bytes | Sequence[int], step: int, std: float, scale: float, lr: float, momentum: float = 0.0,
    dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False,
    first: bool = False, keep_grads: bool = True, counter: Tensor | None = None,
    earlier_steps: Sequence[int] = (), earlier_weights: Sequence[float] = (),
) -> None:  # fmt: skip
    """One step of torch.optim.SGD with n = (sum + std * N(0, 1)) * scale for gradients, in place.

    Args: params of float32, bfloat16, float16 or float64; sums of their shapes, float32 (float64 for float64
    parameters); momentum_buffers of their shapes, not read where momentum = 0 (then [] will do), only written where
    `first`; offsets the global index of each parameter's first element, ranges disjoint; key 32 bytes or 8 words;
    std and scale as above; keep_grads: n is left in `sums`; counter: None, or an int64 [1] tensor on the parameters'
    device, added to `step` and earlier steps; earlier_steps, earlier_weights: correlated noise, to which the normals
    that these steps drew are added, too, times std and a weight each. All tensors contiguous. Raises TypeError or
    ValueError on anything else.
    """
    draw = Draw(words_of(key), step, std, scale, keep_grads, list(earlier_steps), list(earlier_weights))
    update = SGD(lr, momentum, dampening, weight_decay, nesterov, maximize, first)
    _call(_sgd_op, (params, sums, momentum_buffers, offsets), draw, update, counter)


def noisy_adamw_step_(
    params: Sequence[Tensor], sums: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    offsets: Sequence[int], *, key: bytes | Sequence[int], step: int, std: float, scale: float, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, t: int, decoupled: bool = True,
    maximize: bool = False, keep_grads: bool = True, counter: Tensor | None = None,
    earlier_steps: Sequence[int] = (), earlier_weights: Sequence[float] = (),
) -> None:  # fmt: skip
    """One step of torch.optim.AdamW (Adam where not `decoupled`) with n = (sum + std * N(0, 1)) * scale, in place.

    Args: as of `noisy_sgd_step_`; exp_avgs, exp_avg_sqs the averages of gradients and their squares, of the
    parameters' shapes; t the number of steps including this one, 1 at the first; counter is added to it, too.
    Source: Kingma & Ba 2015; Loshchilov & Hutter 2019 (decoupled weight decay). No amsgrad.
    """
    draw = Draw(words_of(key), step, std, scale, keep_grads, list(earlier_steps), list(earlier_weights))
    update = Adam(lr, beta1, beta2, eps, weight_decay, t, decoupled, maximize)
    _call(_adamw_op, (params, sums, exp_avgs, exp_avg_sqs, offsets), draw, update, counter)
