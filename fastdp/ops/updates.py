"""What a step of noise and update takes: how it draws, the optimizer's update, and the tensors that both work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import capturing, check_draw, check_earlier, check_range, refuse_graph, refuse_repetition
from .common import DTYPES, sum_type


class Draw(NamedTuple):
    """The noise of a step, in the order of csrc/bind.h."""

    key: Sequence[int]
    step: int
    std: float
    scale: float
    keep_grads: bool = True  # n is left in the sums
    earlier_steps: Sequence[int] = ()  # correlated noise: the normals that these steps drew, too
    earlier_weights: Sequence[float] = ()  # and what each is multiplied by, beside std


class SGD(NamedTuple):
    """The update of torch.optim.SGD, in the order of csrc/updates.h."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    first: bool = False  # momentum buffers are written, not read

    def apply(self, grad: Tensor, weight: Tensor, *buffers: Tensor) -> None:
        """In place, with the momentum buffer if there is momentum."""
        grad = (-grad if self.maximize else grad).add_(weight, alpha=self.weight_decay)
        for buffer in buffers:
            old = buffer.to(grad.dtype)
            new = grad if self.first else old * self.momentum + grad * (1 - self.dampening)
            buffer.copy_(new)
            grad = grad.add(new, alpha=self.momentum) if self.nesterov else new
        weight.add_(grad, alpha=-self.lr)


class Adam(NamedTuple):
    """The update of torch.optim.Adam and AdamW, in the order of csrc/updates.h."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    t: int  # steps including this one
    decoupled: bool = True  # weight decay as in AdamW
    maximize: bool = False

    def apply(self, grad: Tensor, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """In place."""
        if self.maximize:
            grad = -grad
        if self.decoupled:
            weight.sub_(weight, alpha=self.lr * self.weight_decay)
        elif self.weight_decay:
            grad = grad.add(weight, alpha=self.weight_decay)
        average, square = exp_avg.to(grad.dtype), exp_avg_sq.to(grad.dtype)
        average = average + (grad - average) * (1 - self.beta1)
        square = square + (grad * grad - square) * (1 - self.beta2)
        denominator = square.sqrt().mul_((1 - self.beta2**self.t) ** -0.5).add_(self.eps)
        weight.addcdiv_(average, denominator, value=-self.lr / (1 - self.beta1**self.t))
        exp_avg.copy_(average)
        exp_avg_sq.copy_(square)


class Step(NamedTuple):
    """What a backend is asked to do."""

    params: Sequence[Tensor]
    sums: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]  # as many lists as `update.apply` takes states
    offsets: Sequence[int]  # the global index of each parameter's first element
    draw: Draw
    update: SGD | Adam
    counter: Tensor | None  # on the device: to be added to the draw's step and the update's t

    def rows(self) -> Iterator[tuple[tuple[Tensor, ...], int]]:
        """((parameter, sum, states...), offset) of each parameter."""
        return zip(zip(self.params, self.sums, *self.states, strict=True), self.offsets, strict=True)

    def counted(self) -> Step:
        """With the counter's value, which the host waits for, in the numbers that it is to be added to."""
        if self.counter is None:
            return self
        more, draw, update = int(self.counter), self.draw, self.update
        draw = draw._replace(step=draw.step + more, earlier_steps=[number + more for number in draw.earlier_steps])
        update = update._replace(t=update.t + more) if isinstance(update, Adam) else update
        return self._replace(draw=draw, update=update, counter=None)

    def changed(self) -> None:
        """Let autograd see what a kernel wrote."""
        written = [self.params, self.sums if self.draw.keep_grads else (), *self.states]
        torch.autograd.graph.increment_version([tensor for tensors in written for tensor in tensors])

    def check_numbers(self) -> None:
        """Raises ValueError if a number does not fit."""
        check_draw(*self.draw[:3])
        check_earlier(*self.draw[-2:])
        numbers = {"scale": self.draw.scale, **self.update._asdict()}
        if odd := [f"{name} = {value}" for name, value in numbers.items() if not math.isfinite(value)]:
            raise ValueError(f"an update takes finite numbers, not {', '.join(odd)}")
        if isinstance(self.update, Adam) and self.update.t < 1:
            raise ValueError(f"t counts this step: 1 or more, not {self.update.t}")
        if isinstance(self.update, Adam) and not (0 <= self.update.beta1 < 1 and 0 <= self.update.beta2 < 1):
            raise ValueError(f"betas lie in [0, 1), not at {self.update.beta1} and {self.update.beta2}")

    def check(self) -> None:
        """Raises ValueError or TypeError if something does not fit: the kernels trust it."""
        lengths = [len(x) for x in (self.params, self.sums, *self.states, self.offsets)]
        if len(set(lengths)) > 1:
            raise ValueError(f"a sum, each state and an offset for every parameter: got lists of {lengths}")
        self.check_numbers()
        for k, (tensors, offset) in enumerate(self.rows()):
            param, total = tensors[:2]
            check_range(offset, param.numel())
            if total.dtype not in (sum_type(param), torch.float64):
                raise TypeError(f"sum {k}: float32, or float64 for a float64 parameter, not {total.dtype}")
            for tensor in tensors:
                if tensor.dtype not in DTYPES:
                    raise TypeError(f"parameter {k}: float32, float64, bfloat16 or float16, not {tensor.dtype}")
                if tensor.shape != param.shape or tensor.device != self.params[0].device:
                    raise ValueError(f"parameter {k}: its sum and states must have its shape, and one device serve all")
                if not tensor.is_contiguous():
                    raise ValueError(f"parameter {k}: it, its sum and its states must be contiguous")
                refuse_graph(tensor)
        sizes = [(offset, offset + p.numel()) for offset, p in zip(self.offsets, self.params, strict=True)]
        ranges = sorted((low, end) for low, end in sizes if low < end)
        if any(low < end for (_, end), (low, _) in zip(ranges, ranges[1:], strict=False)):
            raise ValueError("ranges of global indices overlap: two parameters would get the same noise")


def implementation(
    kind: type[SGD] | type[Adam], run: Callable[[Step], None], *, on_device: bool = False
) -> Callable[..., None]:
    """The operator with this update, by a backend's `run`. on_device: `run` reads the counter, else this does."""

    def call(params: Sequence[Tensor], sums: Sequence[Tensor], *lists: Any, counter: Tensor | None = None,
             **numbers: Any) -> None:  # fmt: skip
        *states, offsets = lists
        draw = Draw(**{name: numbers.pop(name) for name in Draw._fields if name in numbers})
        update = kind(**numbers)
        if counter is not None:
            if counter.dtype != torch.int64 or counter.numel() != 1 or (params and counter.device != params[0].device):
                raise ValueError("counter must be an int64 tensor of one element on the parameters' device")
            if not on_device and params and capturing(params[0].device):
                raise RuntimeError("only CUDA C++ captures updates with counter=: build it by FASTDP_CUDA=1")
        elif params and draw.std:
            refuse_repetition(params[0].device)
        if isinstance(update, SGD) and not update.momentum:
            states = []
        step = Step(params, sums, states, offsets, draw, update, counter)
        step = step if on_device else step.counted()
        step.check()
        run(step)

    return call
