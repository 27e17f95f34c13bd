"""Families of operators: inputs of many shapes, each sample's gradient in float64, and what norms and sums satisfy.

The same checks run on every backend of the CPU (test_operators.py) and on a card (test_device.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdp import ops
from fastdp.ops import bounds, conv, linear
from fastdp.ops.geometry import geometry_of, spatial
from fastdp.ops.linear import METHODS

from .backends import NORM_ERROR, assert_sums, random, sum_of, weighted

Data = tuple[Any, ...]  # what the operators of a family take; its floats are [samples or rows, ...]
FORWARD = [F.conv1d, F.conv2d, F.conv3d]


class Family(NamedTuple):
    """data: of a shape and a type. gradients: [B, *weight] of samples alone, in a type. norms: squared, by each route.
    bounded: norms enlarged by what rounding may do to sums, and what they may be at most, given the exact ones."""

    shapes: dict[str, Any]
    data: Callable[[Any, torch.dtype], Data]
    gradients: Callable[..., Tensor]
    norms: Callable[[Data, torch.dtype | None], Iterable[Tensor]]
    per_sample: Callable[[Data], Tensor]
    clipped_sum: Callable[..., Tensor]
    large: dict[str, Any] = {}  # of the compiled kernels, whose tiles are large
    tiled: tuple[str, ...] = ()  # of small tiles, where these are not all
    bounded: Callable[[Data, Tensor], Iterable[tuple[Tensor, Tensor]]] = lambda data, exact: ()
    errors: dict[str, float] = NORM_ERROR  # of squared norms, by backend
    sum_error: float = 1e-5  # of the largest element
    adds: bool = True  # to a tensor that is given
    on_device: bool = True  # whether the truth may be found there


def floats(data: Data) -> list[Tensor]:
    return [t for t in data if isinstance(t, Tensor) and t.is_floating_point()]


def rows_of_sample(data: Data, b: int) -> Tensor:
    """Places of a sample's rows in the floats of the data."""
    owner = data[3] if len(data) > 3 and isinstance(data[3], Tensor) else torch.arange(len(data[1]))
    return (owner == b).nonzero().flatten()


# ---------------------------------------------------------------------- matrix products

# (B, T, I, O): one position, positions that end with a tile of 16 or beside its end, odd sizes and whole vectors
_LINEAR = [(3, 37, 37, 50), (5, 1, 37, 50), (5, 2, 5, 7), (2, 15, 32, 48), (2, 16, 32, 48), (2, 17, 32, 48),
           (3, 33, 48, 32), (2, 40, 3, 1), (0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0)]  # fmt: skip
# one position, whole tiles, several blocks of positions, several blocks of outputs
_LINEAR_LARGE = [(3, 1, 5, 7), (2, 128, 48, 32), (2, 300, 21, 33), (1, 130, 17, 400), (3, 9, 700, 300), (2, 600, 3, 40)]


def named(shapes: Iterable[Any]) -> dict[str, Any]:
    return {str(shape): shape for shape in shapes}


def linear_data(shape: Any, dtype: torch.dtype = torch.float32) -> Data:
    b, t, i, o = shape
    return random(b, t, i, dtype=dtype), random(b, t, o, dtype=dtype, seed=1)


def linear_gradients(a: Tensor, g: Tensor, kind: torch.dtype = torch.float64) -> Tensor:
    """[B,O,I]"""
    return torch.bmm(g.to(kind).mT, a.to(kind))


def linear_bounded(data: Data, exact: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    for method in METHODS:
        found, bound = linear.norm_sq_and_bound(*data, method)
        assert found.dtype == torch.float64 and (bound is None) == (data[0].size(1) <= 1 or 0 in linear_shape(data))
        yield found, bounds.enlarged(exact, bounds.of_products(*data))


def linear_shape(data: Data) -> tuple[int, ...]:
    return (*data[0].shape, data[1].size(2))


# ---------------------------------------------------------------------- convolutions

# sizes of x, outputs, kernel, stride, padding, dilation, groups
CONVS: dict[str, Any] = {
    "groups": ((2, 6, 9, 11), 10, (3, 2), (2, 1), (1, 0), (1, 2), 2),
    "line": ((3, 6, 23), 10, 3, 2, 1, 1, 1),
    "plane": ((2, 3, 6, 7), 17, 3, 1, 1, 1, 1),
    "volume": ((2, 4, 3, 4, 5), 6, 3, (1, 2, 2), (1, 1, 0), 1, 1),
    "point": ((3, 20, 5, 4), 18, 1, 1, 0, 1, 1),
    "strided point": ((2, 16, 5, 4), 18, 1, 2, 0, 1, 1),
    "one position": ((3, 3, 4, 4), 18, 4, 4, 0, 1, 1),
    "wide padding": ((2, 2, 3, 3), 3, 3, 3, 4, 1, 1),
    # channels of whole vectors: with 16 bits the inner elements of patches
    "wide": ((2, 16, 7, 5), 17, 3, 1, 1, 1, 1),
    "wide groups": ((2, 32, 7, 6), 32, (3, 2), (2, 1), (1, 0), (1, 2), 2),
    "wide line": ((2, 16, 13), 10, 3, 2, 1, 1, 1),
    "wide volume": ((2, 16, 2, 3, 3), 16, 2, 1, (1, 0, 1), 1, 1),
    "depthwise": ((2, 5, 7, 6), 5, 3, 2, 2, 2, 5),
    "depthwise line of many channels": ((2, 70, 9), 70, 3, 2, 1, 2, 70),
    "depthwise of many taps": ((2, 16, 9, 8), 16, 7, 1, 3, 1, 16),
    "depthwise, one side padded": ((2, 33, 8, 5), 33, (3, 2), (2, 1), (0, 1), (1, 2), 33),
    "depthwise volume": ((2, 4, 3, 4, 5), 4, 3, (1, 2, 2), (1, 1, 0), 1, 4),
    "depthwise of one position": ((2, 3, 4, 4), 3, 4, 1, 0, 1, 3),
    "depthwise column": ((2, 2, 12, 1), 2, (3, 1), 1, (1, 0), 1, 2),
    "no sample": ((0, 3, 5, 5), 4, 3, 1, 0, 1, 1), "no output": ((2, 3, 5, 5), 0, 3, 1, 0, 1, 1),
}  # fmt: skip
# of the compiled kernels: whole tiles, several of them, bands
LARGE_CONVS: dict[str, Any] = {
    "stem": ((3, 3, 12, 12), 8, 3, 1, 1, 1, 1),
    "more positions than a tile": ((2, 16, 12, 12), 24, 3, 1, 1, 1, 1),
    "whole tiles": ((2, 32, 8, 8), 32, 3, 1, 1, 1, 1),
    "strided": ((2, 17, 9, 11), 21, 3, 2, 1, 1, 1),
    "point line": ((2, 3, 1), 4, 1, 1, 0, 1, 1),
    "long line": ((3, 18, 300), 7, 5, 1, 2, 1, 1),
    "wide padding of a point": ((2, 2, 2, 3), 3, 1, 3, 2, 1, 1),
    "many outputs": ((1, 16, 4, 4), 150, 3, 1, 1, 1, 1),
    "long enough for bands": ((1, 64, 80, 80), 16, 3, 1, 1, 1, 1),
    "rows of taps": ((3, 1, 20, 23), 5, (7, 8), 2, 3, 1, 1),
    "rows of more taps than a vector": ((2, 3, 60), 4, 21, 3, 2, 1, 1),
    "bands of one plane": ((2, 5, 6, 34, 34), 6, 3, 1, 1, 1, 1),
    "bands of planes, the last of one": ((1, 16, 9, 57, 57), 3, 3, 1, 0, 1, 1),
    "depthwise bands of one plane": ((1, 2, 5, 66, 66), 2, 3, 1, 1, 1, 2),
    "multiplied depthwise": ((2, 4, 9, 9), 12, 3, 2, 1, 1, 4),
    "depthwise line": ((3, 17, 300), 17, 4, 1, 2, 3, 17),
    "depthwise bands": ((2, 2, 1100, 16), 2, 3, 1, 1, 1, 2),
}


def conv_data(shape: Any, dtype: torch.dtype = torch.float32) -> Data:
    sizes, outputs, kernel, stride, padding, dilation, groups = shape
    n = len(sizes) - 2
    options = [spatial(value, n) for value in (kernel, stride, padding, dilation)]
    out = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in zip(sizes[2:], *options, strict=True)]
    return random(*sizes, dtype=dtype), random(sizes[0], outputs, *out, dtype=dtype, seed=1), *options, groups


def conv_gradients(x: Tensor, g: Tensor, kernel: Any, *rest: Any, kind: torch.dtype = torch.float64) -> Tensor:
    """By autograd through each sample alone; rest: stride, padding, dilation, groups."""
    weight = torch.zeros(g.size(1), x.size(1) // rest[3], *kernel, dtype=kind, device=x.device, requires_grad=True)
    rows = [torch.zeros_like(weight).detach()][: 0 if len(x) and g.numel() else 1]
    for some, grad in zip(x.to(kind).split(1), g.to(kind).split(1), strict=True) if g.numel() else ():
        y = FORWARD[x.dim() - 3](some, weight, None, *rest)
        rows.append(torch.autograd.grad(y, weight, grad)[0])
    return torch.stack(rows) if g.numel() else rows[0].expand(len(x), *weight.shape)


def conv_norms(data: Data, dtype: torch.dtype | None) -> Iterable[Tensor]:
    for method in METHODS:
        if method != "gram" or not data[1].numel() or data[1][0, 0].numel() < 6000:
            yield ops.conv_norm_sq(*data, method, dtype=dtype)


def conv_bounded(data: Data, exact: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    (x, g), geometry = (t.unsqueeze(1) for t in data[:2]), geometry_of(*data)
    for method in METHODS:
        if method != "gram" or not g.numel() or g[0, 0, 0].numel() < 6000:
            yield conv.bounded_norm_sq(x, g, geometry, method), bounds.enlarged(exact, conv.rounding(x, g, geometry))


# ---------------------------------------------------------------------- look-ups, and rows of experts

# samples, positions, columns, rows of the table, the id that is padding
_LOOKUPS = [(4, 7, 3, 2), (3, 1, 1, 5), (2, 37, 16, 11), (2, 90, 20, 1), (3, 4, 300, 400), (0, 3, 4, 5), (2, 0, 4, 5),
            (3, 4, 0, 5), (2, 130, 129, 7)]  # fmt: skip
_LOOKUPS_LARGE = [(5, 64, 257, 40), (1, 300, 33, 4), (3, 300, 6, 1), (2, 128, 2, 3)]


def lookup_data(shape: Any, dtype: torch.dtype = torch.float32) -> Data:
    batch, k, d, rows, *padding = shape
    ids = torch.randint(0, rows, (batch, k), generator=torch.Generator().manual_seed(k))
    return ids, random(batch, k, d, dtype=dtype), rows, padding[0] if padding else None


def lookup_gradients(ids: Tensor, g: Tensor, rows: int, padding: int | None,
                     kind: torch.dtype = torch.float64) -> Tensor:  # fmt: skip
    """[B, rows, d] by autograd, a sample at a time."""
    found = [torch.zeros(rows, g.size(-1), dtype=kind)] if not len(ids) else []
    for some, grad in zip(ids, g.to(kind), strict=True):
        table = torch.zeros(rows, g.size(-1), dtype=kind, requires_grad=True)
        found.append(torch.autograd.grad(F.embedding(some, table, padding), table, grad)[0])
    return torch.stack(found)[: len(ids)]


# rows, inputs, outputs, matrices, samples
_ROUTED = [(37, 5, 6, 4, 3), (150, 16, 8, 5, 7), (60, 40, 50, 2, 2), (8, 8, 8, 8, 8), (1, 3, 2, 1, 1), (0, 3, 4, 2, 2)]
_ROUTED_LARGE = [(300, 40, 33, 3, 2), (300, 10, 300, 1, 2), (600, 200, 220, 2, 2)]


def routed_data(shape: Any, dtype: torch.dtype = torch.float32) -> Data:
    """a, g, ids (some of no matrix), owner (sample 1 has no row, where there are several), matrices, samples."""
    s, i, o, experts, batch = shape
    generator = torch.Generator().manual_seed(s)
    ids = torch.randint(-1, experts + 1, (s,), generator=generator)
    owner = torch.randint(0, batch, (s,), generator=generator)
    return random(s, i, dtype=dtype), random(s, o, dtype=dtype, seed=1), ids, owner, experts, batch


def routed_gradients(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int,
                     kind: torch.dtype = torch.float64) -> Tensor:  # fmt: skip
    out = torch.zeros(batch, experts, g.size(1), a.size(1), dtype=kind)
    for x, y, e, b in zip(a.to(kind), g.to(kind), ids.tolist(), owner.tolist(), strict=True):
        if 0 <= e < experts:
            out[b, e] += torch.outer(y, x)
    return out


FAMILIES = {
    "linear": Family(
        named(_LINEAR), linear_data, linear_gradients,
        lambda data, dtype: (ops.linear_norm_sq(*data, method, dtype=dtype) for method in METHODS),
        lambda data: ops.linear_per_sample(*data), lambda data, c, out=None: ops.linear_clipped_sum(*data, c, out),
        named(_LINEAR_LARGE), bounded=linear_bounded),
    "conv": Family(
        CONVS, conv_data, conv_gradients, conv_norms, lambda data: ops.conv_per_sample(*data),
        lambda data, c, out=None: ops.conv_clipped_sum(*data[:2], c, *data[2:], out), LARGE_CONVS,
        ("groups", "line", "plane", "volume", "point", "wide groups", "depthwise line of many channels"), conv_bounded),
    "embedding": Family(
        named([*_LOOKUPS, *[(*shape, 0) for shape in _LOOKUPS]]), lookup_data, lookup_gradients,
        lambda data, dtype: [ops.embedding_norm_sq(data[0], data[1], data[3], dtype=dtype)],
        lambda data: ops.embedding_per_sample(*data),
        lambda data, c, out=None: ops.embedding_clipped_sum(data[0], data[1], c, *data[2:], out=out),
        named([*_LOOKUPS_LARGE, *[(*shape, 0) for shape in _LOOKUPS_LARGE]]), tuple(map(str, _LOOKUPS[:4])),
        errors={**dict.fromkeys(NORM_ERROR, 1e-7), "reference": 4e-6, "card": 1e-12}, sum_error=1e-6, on_device=False),
    "routed": Family(
        named(_ROUTED), routed_data, routed_gradients,
        lambda data, dtype: [ops.routed_norm_sq(*data, dtype=dtype)], lambda data: ops.routed_per_sample(*data),
        lambda data, c: ops.routed_clipped_sum(*data[:4], c, data[4]),
        named(_ROUTED_LARGE), errors={**dict.fromkeys(NORM_ERROR, 2e-5), "C++": 1e-6}, adds=False, on_device=False),
}  # fmt: skip


# ---------------------------------------------------------------------- what holds of each


def put(data: Data, device: str) -> Data:
    return tuple(t.to(device) if isinstance(t, Tensor) else t for t in data)


def squares(gradients: Tensor) -> Tensor:
    return gradients.flatten(1).square().sum(1)


def assert_norms(found: Tensor, exact: Tensor, limit: float) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=limit, atol=0)


def check(family: Family, shape: Any, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """Norms by every route, with their bounds; gradients; sums, to which a sample of NaN and factor 0 adds nothing."""
    limit = 1e-12 if dtype == torch.float64 else family.errors[backend]
    own = family.data(shape, dtype)
    data = put(own, device)
    truth = data if family.on_device else own
    exact, plain = (family.gradients(*truth, kind=kind).to(device) for kind in (torch.float64, torch.float32))
    norms = squares(exact)
    for found, wider in zip(family.norms(data, None), family.norms(data, torch.float64), strict=True):
        assert found.dtype == sum_of(dtype) and wider.dtype == torch.float64
        assert_norms(found, norms, max(limit, 2e-16 if dtype == torch.float64 else 2e-7))
        assert_norms(wider, norms, limit)
    for found, most in family.bounded(data, norms):
        assert bool((found >= norms * (1 - 6e-6)).all()) and bool((found <= most * (1 + 2e-5)).all())
    assert_sums(family.per_sample(data), exact, plain, family.sum_error)
    c = torch.linspace(0.1, 1 + 2**-9, len(exact), device=device)  # bfloat16 has no such number
    c[1:2] = 0
    total, rough = weighted(exact, c), weighted(plain, c)
    for number, t in enumerate(floats(data)):
        t[rows_of_sample(own, 1).to(device)] = math.nan if number else math.inf
    found = family.clipped_sum(data, c)
    assert found.dtype == sum_of(dtype)
    assert_sums(found, total, rough, family.sum_error)
    for out in (torch.ones_like(found), torch.ones_like(found.mT).mT) if family.adds else ():  # and of other strides
        assert family.clipped_sum(data, c, out) is out
        assert_sums(out, total + 1, rough + 1, family.sum_error)


def relaid(data: Data, change: Callable[[Tensor], Tensor]) -> Data:
    return tuple(change(t) if isinstance(t, Tensor) and t.is_floating_point() else t for t in data)


def sparse(t: Tensor) -> Tensor:
    return torch.zeros(*t.shape, 2, dtype=t.dtype, device=t.device).select(-1, 1).copy_(t)


STRIDES: list[Callable[[Tensor], Tensor]] = [
    sparse, lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1), lambda t: t.mT.contiguous().mT,
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), lambda t: t[:, :1].expand_as(t),
    lambda t: t[:1].expand_as(t),
]  # fmt: skip
TYPICAL = [
    ("linear", "(3, 37, 37, 50)"), ("conv", "wide"), ("conv", "groups"), ("conv", "depthwise"),
    ("embedding", "(2, 37, 16, 11, 0)"), ("routed", "(60, 40, 50, 2, 2)"),
]  # fmt: skip


def check_strides(name: str, shape: str, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    family = FAMILIES[name]
    for change in STRIDES:
        own = relaid(family.data(family.shapes[shape], dtype), change)
        data, exact = relaid(put(own, device), change), family.gradients(*own).to(device)
        c = torch.linspace(0.5, 2.0, len(exact), device=device)
        for found in family.norms(data, torch.float64):
            assert_norms(found, squares(exact), family.errors[backend])
        assert_sums(family.per_sample(data), exact, exact.float())
        assert_sums(family.clipped_sum(data, c), weighted(exact, c), weighted(exact, c).float())


def check_bad_number(name: str, shape: str, device: str = "cpu") -> None:
    """It stays in its sample."""
    family = FAMILIES[name]
    for which, bad in enumerate((math.nan, math.inf)):
        own = family.data(family.shapes[shape], torch.bfloat16)
        data = put(own, device)
        clean, gradients, tensors = list(family.norms(data, None)), family.per_sample(data), floats(data)
        first = rows_of_sample(own, 0)
        if name == "routed":
            first = first[(own[2][first] >= 0) & (own[2][first] < own[4])]
        tensors[min(which, len(tensors) - 1)][first[0]][..., 0] = bad
        for found, known in zip(family.norms(data, None), clean, strict=True):
            assert not found[0].isfinite() and torch.equal(found[1:], known[1:])
        torch.testing.assert_close(family.per_sample(data)[1:], gradients[1:])
