"""The numbers that a function is asked with, and when two of its results are the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layout import Layout

Draw = Callable[[Tensor, Layout], Tensor]


def _large(normal: Tensor, layout: Layout) -> Tensor:
    return normal * (100.0 if normal.dtype == torch.float16 else 1e4)


def _small(normal: Tensor, layout: Layout) -> Tensor:
    return normal * (1e-2 if normal.dtype == torch.float16 else 1e-4)


def _tied(normal: Tensor, layout: Layout) -> Tensor:
    """Zeros, as after a ReLU, and numbers that occur several times."""
    return (normal.clamp(min=0) * 2).round() / 2 if not normal.is_complex() else normal


def _uneven(normal: Tensor, layout: Layout) -> Tensor:
    """A sample a hundred times as large as the next, and one as small."""
    sizes = torch.tensor([1.0, 100.0, 0.01], dtype=torch.float32)
    if layout.alone >= 0 or normal.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return normal * sizes[max(layout.alone, 0) % 3].item()
    view = [1] * normal.dim()
    view[layout.dim] = layout.rows
    return normal * sizes[layout.owners(torch.device("cpu")).cpu() % 3].view(view).to(normal.dtype)


# functions may have thresholds (a largest norm), and act on some numbers only: every one of these is to say the same
DRAWS: tuple[Draw, ...] = (lambda normal, layout: normal, _large, _small, _tied, _uneven)


_AT_ONCE = 1 << 18  # numbers compared at once: comparing takes six times their memory


def are_close(a: Tensor, b: Tensor, chosen: Tensor) -> bool:
    """Whether the chosen rows [rows] bool of two tensors of one shape are the same but for rounding."""
    if a.numel() <= _AT_ONCE:
        return is_close(a[chosen], b[chosen])
    count = max(1, _AT_ONCE * a.size(0) // a.numel())
    return all(is_close(a[rows], b[rows]) for rows in chosen.nonzero().flatten().split(count))


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether rows (along dimension 0) are the same but for rounding: what that is, each row's own numbers say, as
    beside a large sample's a small one's could change by its whole size."""
    if not (a.is_floating_point() or a.is_complex()) or not a.numel():
        return torch.equal(a, b)
    if a.numel() > _AT_ONCE and a.size(0) > 1:
        count = max(1, _AT_ONCE * a.size(0) // a.numel())
        return all(is_close(x, y) for x, y in zip(a.split(count), b.split(count), strict=True))
    digits = 1e-3 if a.dtype in (torch.bfloat16, torch.float16) else 1e-6
    known = torch.where(a.isfinite(), a, torch.zeros_like(a)).abs()  # masked scores are -inf
    largest = known.flatten(1).amax(1) if a.dim() > 1 else known
    bound = digits * largest.view(-1, *[1] * (a.dim() - 1)) + 10 * digits * known
    return bool((((a - b).abs() <= bound) | (a == b) | (a.isnan() & b.isnan())).all())
