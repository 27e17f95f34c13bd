"""Small inputs of every operator, on which a user's kernel is compared with the reference.

They hold what a kernel must be right about: strided memory, one position, odd sizes, ids that repeat, padding, and for
sums a sample whose factor is 0 and whose numbers are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

B = 3  # samples
KEY = list(range(1, 9))


class Trial(NamedTuple):
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Numbers:
    """Random numbers of a type on a device, the same each time."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device, self.dtype = device, dtype

    def make(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def sums(self, *shape: int) -> Tensor:
        """In the type of sums."""
        return self.make(*shape).to(torch.float64 if self.dtype == torch.float64 else torch.float32)

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def strided(self, *shape: int) -> Tensor:
        """[B, T, n] whose positions lie next to each other in memory."""
        return self.make(shape[0], shape[2], shape[1]).mT

    def factors(self) -> Tensor:
        """[B]: one sample is dropped."""
        return torch.tensor([0.5, 0.0, 1.0], device=self.device)


def _dropped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The second sample's numbers are NaN."""
    for tensor in tensors:
        tensor[1] = math.nan
    return tensors


def _pairs(n: Numbers) -> Iterator[tuple[Tensor, Tensor]]:
    """a and g of matrix products."""
    yield n.make(B, 5, 6), n.make(B, 5, 4)
    yield n.strided(B, 37, 19), n.make(B, 37, 8)
    yield n.make(B, 2, 16), n.strided(B, 2, 33)
    yield n.make(B, 7), n.make(B, 3)


def _linear(n: Numbers, name: str) -> Iterator[Trial]:
    for a, g in _pairs(n):
        if name == "linear_norm_sq":
            for method in ("auto", "gram", "direct"):
                yield Trial((a, g, method), {"dtype": torch.float64})
            yield Trial((a, g), {})
        elif name == "linear_per_sample":
            yield Trial((a, g), {})
        else:
            _dropped(a, g)
            yield Trial((a, g, n.factors()), {})


def _conv(n: Numbers, name: str) -> Iterator[Trial]:
    for channels, outputs, side, kernel, stride, padding, groups in (
        (4, 6, 7, 3, 2, 1, 1), (4, 4, 6, 3, 1, 1, 2), (5, 3, 4, 1, 1, 0, 1), (4, 4, 5, 3, 1, 1, 4)
    ):  # fmt: skip
        out = (side + 2 * padding - kernel) // stride + 1
        x, g = n.make(B, channels, side, side), n.make(B, outputs, out, out)
        rest = [kernel] * 2, [stride] * 2, [padding] * 2, [1, 1], groups
        if name == "conv_norm_sq":
            yield Trial((x, g, *rest), {"dtype": torch.float64})
            yield Trial((x, g, *rest, "direct"), {})
        elif name == "conv_per_sample":
            yield Trial((x, g, *rest), {})
        else:
            _dropped(x, g)
            yield Trial((x, g, n.factors(), *rest), {})


def _embedding(n: Numbers, name: str) -> Iterator[Trial]:
    rows = 7
    for padding in (None, 2):
        ids, g = n.ids(rows, B, 9), n.make(B, 9, 5)
        if name == "embedding_norm_sq":
            yield Trial((ids, g, padding), {})
            yield Trial((ids, g, padding), {"dtype": torch.float64})
        elif name == "embedding_per_sample":
            yield Trial((ids, g, rows, padding), {})
        else:
            _dropped(g)
            onto = {"out": n.sums(rows, 5)} if name.endswith(".out") else {}
            yield Trial((ids, g, n.factors(), rows, padding), onto)


def _tied(n: Numbers, name: str) -> Iterator[Trial]:
    yield Trial((n.ids(7, B, 4), n.make(B, 4, 5), n.make(B, 6, 5), n.make(B, 6, 7)), {})


def _routed(n: Numbers, name: str) -> Iterator[Trial]:
    a, g, ids, owner = n.make(20, 6), n.make(20, 4), n.ids(5, 20), n.ids(B, 20)
    if name == "routed_clipped_sum":
        a[owner == 1] = g[owner == 1] = math.nan
        yield Trial((a, g, ids, owner, n.factors(), 5), {})
    else:
        yield Trial((a, g, ids, owner, 5, B), {})


def _norms(n: Numbers, name: str) -> Iterator[Trial]:
    if name == "group_affine_per_sample":
        yield Trial((n.make(B, 8, 5, 3), n.make(B, 8, 5, 3), n.sums(B, 4), n.sums(B, 4).abs(), 4), {})
        return
    mean = (n.sums(B, 5),) if name == "norm_affine_per_sample" else ()
    yield Trial((n.make(B, 5, 6), n.make(B, 5, 6), *mean, n.sums(B, 5).abs()), {})


def _rows(n: Numbers, name: str) -> Iterator[Trial]:
    for shape in ((B, 5, 4), (B, 1500), (B,)):
        rows = n.make(*shape)
        if name == "square_sum":
            yield Trial((rows,), {})
        else:
            yield Trial((*_dropped(rows), n.factors().to(rows.dtype)), {})


def _recurrent(n: Numbers, name: str) -> Iterator[Trial]:
    size, blocks = 6, 4 if name.startswith("lstm") else 3
    cells = 2 if blocks == 4 else 1
    for steps, weight, on in (
        (5, n.make(blocks * size, size), None),
        (2, n.make(size, blocks * size).mT, n.ids(2, 2, B)),
    ):
        active = None if on is None else on.bool()
        gates, state = n.make(steps, B, blocks * size), [n.make(B, size) for _ in range(cells)]
        if not name.endswith("backward"):
            bias = n.make(blocks * size) if active is None else None
            yield Trial((gates, *state, weight, bias, active), {})
            continue
        kept = [
            n.make(steps + (cells == 2), B, size),
            n.make(steps + (cells == 1), B, size),
        ]  # cells, tanh; inner, states
        yield Trial((gates, *kept, weight, n.strided(steps, B, size), *state, active), {})


def _clip(n: Numbers, name: str) -> Iterator[Trial]:
    if n.dtype in (torch.float32, torch.float64):
        norms = torch.tensor([0.0, 0.3, 4.0, math.inf, math.nan], dtype=n.dtype, device=n.device)
        for kind in ("local", "global", "automatic"):
            yield Trial((norms, 1.5, kind), {})


def _noise(n: Numbers, name: str) -> Iterator[Trial]:
    rest = (KEY, 3, 8)
    for size in (1, 100):
        if name == "noise_":
            yield Trial((n.make(size), 0.7, *rest), {})
        else:
            yield Trial((n.make(size), 0.7, 0.5, *rest), {})
            yield Trial((n.make(size), 0.7, 0.5, *rest, [2, 5], [-0.5, 0.25]), {})


def _steps(n: Numbers, name: str) -> Iterator[Trial]:
    for keep, past in ((True, {}), (False, {"earlier_steps": [2, 5], "earlier_weights": [-0.5, 0.25]})):
        params, sums = [n.make(4, 5), n.make(7)], [n.sums(4, 5), n.sums(7)]
        draw = dict(key=KEY, step=3, std=0.7, scale=0.25, lr=0.1, weight_decay=0.01, keep_grads=keep, **past)
        states = [[n.make(4, 5).abs(), n.make(7).abs()] for _ in range(2)]
        if name == "noisy_sgd_step_":
            yield Trial((params, sums, states[0], [0, 20]), {**draw, "momentum": 0.9})
        else:
            yield Trial((params, sums, *states, [0, 20]), {**draw, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "t": 3})


_FAMILIES: dict[str, Callable[[Numbers, str], Iterator[Trial]]] = {
    "linear_": _linear, "conv_": _conv, "embedding_": _embedding, "tied_": _tied, "routed_": _routed, "norm_": _norms,
    "rms_": _norms, "group_": _norms, "square_": _rows, "weighted_": _rows, "clip_": _clip, "noise_": _noise,
    "add_noise_": _noise, "noisy_": _steps, "lstm_": _recurrent, "gru_": _recurrent,
}  # fmt: skip


def trials(name: str, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """Inputs of an operator, one call at a time."""
    family = next(make for start, make in _FAMILIES.items() if name.startswith(start))
    yield from family(Numbers(device, dtype), name)
