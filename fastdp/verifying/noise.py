"""Gradients that are nothing but rounding, and batches that the program puts into another order.

The gradient of `softmax(x).sum()` is zero; what comes out is the rounding of terms that cancel, and any two ways to sum
them differ by all of it. How large that is, the sizes of the terms tell: every number that flows in a sample's backward
is changed by a part of itself, and what this moves, times the last bit over that part, is what rounding makes of the
program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

TIMES = 8.0  # so many times what rounding moved may be rounding
ONLY_ROUNDING = 0.1  # as large a part of a gradient moved, it is rounding and nothing else
DRAWS = 3
LARGEST = 0.125  # part of a number that is changed

Rows = dict[str, Tensor]


def last_bits(tensors: Iterable[Tensor]) -> float:
    """By how many last bits gradients are changed, of parameters of these kinds."""
    half = any(torch.finfo(t.dtype).bits < 32 for t in tensors if t.is_floating_point())
    return 16.0 if half else 1024.0


def disturb(loss: Tensor, random: np.random.Generator, bits: float) -> None:
    """Every gradient in the coming backward of this loss is changed by so many of its last bits."""

    def moved(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(grad if grad is None else _moved(grad, random, bits) for grad in grads)

    for node in nodes_of(loss):
        node.register_prehook(moved)


def _moved(grad: Tensor, random: np.random.Generator, bits: float) -> Tensor:
    if not (grad.is_floating_point() or grad.is_complex()) or grad.layout != torch.strided:
        return grad
    part = min(bits * torch.finfo(grad.dtype).eps, LARGEST)
    return grad * torch.as_tensor(1 + part * random.uniform(-1, 1, grad.shape)).to(grad.device, grad.dtype)


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """The nodes of a loss's graph."""
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def least_sizes(truth: Rows, repeated: Rows, disturbed: list[Rows], bits: float, tolerance: float) -> Tensor:
    """Sizes [B] of gradients below which a relative error says nothing; 0 where the gradient is more than rounding.

    repeated: the samples' gradients once more: a program that does not repeat itself is not rounding; disturbed: with
    gradients changed by so many last bits.
    """
    norms = norms_of(truth)
    apart = [norms_of({name: other[name] - g for name, g in truth.items()}) for other in (repeated, *disturbed)]
    moved = torch.stack(apart[1:]).amax(0)
    noise = moved / bits
    only = (noise > ONLY_ROUNDING * norms) & (moved > max(4.0, bits / 16) * apart[0])
    return torch.where(only, TIMES * noise / tolerance, torch.zeros_like(noise))


def places_of(wanted: Rows, rows: Rows) -> list[int]:
    """For each wanted gradient the place of the one most like it among these, each taken once."""
    count, free, found = len(next(iter(wanted.values()))), list(range(len(next(iter(rows.values()))))), list[int]()
    for sample in range(count):
        off = norms_of({name: rows[name][free] - g[sample] for name, g in wanted.items()})
        found.append(free.pop(int(off.nan_to_num(float("inf")).argmin())))
    return found


def norms_of(rows: Rows) -> Tensor:
    """Each sample's norm [B]."""
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
