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


def least_sizes(norms: Tensor, repeated: Tensor, moved: Tensor, bits: float, tolerance: float) -> Tensor:
    """Sizes [B] of gradients below which a relative error says nothing; 0 where the gradient is more than rounding.

    repeated: how far the gradients are apart once more: a program that does not repeat itself is not rounding; moved:
    how far with what flows changed by so many last bits.
    """
    only = only_rounding(norms, moved, bits) & (moved > max(4.0, bits / 16) * repeated)
    return torch.where(only, TIMES * moved / bits / tolerance, torch.zeros_like(moved))


def only_rounding(norms: Tensor, moved: Tensor, bits: float) -> Tensor:
    """Which gradients may be rounding and nothing else."""
    return moved / bits > ONLY_ROUNDING * norms


def places_of(wanted: Rows, rows: Rows) -> list[int]:
    """For each wanted gradient the place of the one most like it among these, each taken once."""
    count, free, found = len(next(iter(wanted.values()))), list(range(len(next(iter(rows.values()))))), list[int]()
    for sample in range(count):
        off = [
            sum(float((rows[name][place] - g[sample]).square().sum()) for name, g in wanted.items()) for place in free
        ]
        found.append(free.pop(min(range(len(free)), key=lambda i: off[i] if off[i] == off[i] else float("inf"))))
    return found


def apart(one: Rows, other: Rows) -> Tensor:
    """How far gradients are apart, [B]."""
    return torch.stack([(other[n] - g).reshape(len(g), -1).square().sum(1) for n, g in one.items()]).sum(0).sqrt()


def norms_of(rows: Rows) -> Tensor:
    """Each sample's norm [B]."""
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in rows.values()]).sum(0).sqrt()
