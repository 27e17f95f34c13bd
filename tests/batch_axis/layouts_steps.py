"""Steps of random programs (layouts_programs.py): each kind draws one that fits the tensors made so far."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

D = 3  # of the trained layers; batch and sequence are often as large
Step = Callable[[Any, list[Tensor]], Any]
Kind = Callable[[random.Random, list[Tensor]], Step]
KINDS: list[Kind] = []


def kind(function: Kind) -> Kind:
    KINDS.append(function)
    return function


def constant(rng: random.Random, shape: list[int], kind: str = "float") -> Tensor:
    numbers = torch.Generator().manual_seed(rng.randrange(10**6))
    if kind == "float":
        return torch.randn(shape, generator=numbers, dtype=torch.double)
    return torch.randint(0, 2, shape, generator=numbers).bool()


def pick(rng: random.Random, pool: list[Tensor]) -> tuple[int, Tensor]:
    """A tensor of the pool by its number, the last one mostly."""
    number = len(pool) - 1 if rng.random() < 0.75 else rng.randrange(len(pool))
    return number, pool[number]


def dims_of(rng: random.Random, tensor: Tensor) -> int:
    return 0 if rng.random() < 0.4 else rng.randrange(max(tensor.dim(), 1))


@kind
def layer(rng: random.Random, pool: list[Tensor]) -> Step:
    i, _ = pick(rng, pool)
    name = rng.choice(["a", "a", "b", "b", "scale", "table"])
    if name == "scale":
        return lambda m, p: p[i] * m.scale
    if name == "table":
        return lambda m, p: m.table((p[i].detach() * 2).long().clamp(0, 6)).sum(-1)
    return lambda m, p: getattr(m, name)(p[i])


@kind
def pointwise(rng: random.Random, pool: list[Tensor]) -> Step:
    i, _ = pick(rng, pool)
    f = rng.choice([torch.tanh, torch.sigmoid, torch.sin, F.gelu, lambda t: t * 0.5 + 1, lambda t: t.clone(),
                    lambda t: t.detach(), lambda t: t.contiguous(), torch.special.erfcx])  # fmt: skip
    return lambda m, p: f(p[i])


@kind
def two(rng: random.Random, pool: list[Tensor]) -> Step:
    (i, _), j = pick(rng, pool), rng.randrange(len(pool))
    f = rng.choice([torch.add, torch.mul, torch.sub, torch.maximum, lambda a, b: torch.where(b > 0, a, b),
                    lambda a, b: a.masked_fill(b > 0.5, 0),
                    lambda a, b: torch.lerp(a, b, 0.3), torch.hypot])  # fmt: skip
    return lambda m, p: f(p[i], p[j])


@kind
def with_constant(rng: random.Random, pool: list[Tensor]) -> Step:
    i, t = pick(rng, pool)
    shape = [size if rng.random() < 0.6 else 1 for size in t.shape][rng.randrange(t.dim() + 1) :]
    c = constant(rng, shape)
    f = rng.choice(
        [torch.add, torch.mul, lambda a, b: a.masked_fill(b > 0, 0.3), lambda a, b: torch.where(b > 0, a, 0)]
    )
    return lambda m, p: f(p[i], c)


@kind
def move(rng: random.Random, pool: list[Tensor]) -> Step:
    i, t = pick(rng, pool)
    a, b = dims_of(rng, t), dims_of(rng, t)
    order = list(range(t.dim()))
    rng.shuffle(order)
    f = rng.choice([lambda t: t.transpose(a, b), lambda t: t.permute(order), lambda t: t.movedim(a, b),
                    lambda t: t.unsqueeze(a), lambda t: t.squeeze(), lambda t: t.mT, lambda t: t.flip(a),
                    lambda t: t.roll(1, a), lambda t: t.roll(-1, b), lambda t: torch.rot90(t, 1, (a, b)),
                    torch.fliplr, torch.flipud])  # fmt: skip
    return lambda m, p: f(p[i])


@kind
def shape(rng: random.Random, pool: list[Tensor]) -> Step:
    i, t = pick(rng, pool)
    left, sizes = t.numel(), []
    while left > 1 and len(sizes) < 3:
        sizes.append(rng.choice([k for k in range(1, left + 1) if left % k == 0]))
        left //= sizes[-1]
    sizes.append(left)
    rng.shuffle(sizes)
    a = dims_of(rng, t)
    size = t.size(a) if t.dim() else 1
    k = rng.choice([k for k in range(1, size + 1) if size % k == 0])
    f = rng.choice([lambda t: t.reshape(sizes), lambda t: t.flatten(a), lambda t: t.flatten(0, 1),
                    lambda t: t.unflatten(a, (k, -1)), lambda t: t.unflatten(a, (-1, k)), lambda t: t.reshape(-1, D),
                    lambda t: t.reshape(D, -1), lambda t: t.reshape(t.size(0), -1)])  # fmt: skip
    return lambda m, p: f(p[i])


@kind
def repeated(rng: random.Random, pool: list[Tensor]) -> Step:
    i, t = pick(rng, pool)
    a, times = dims_of(rng, t), [rng.choice([1, 1, 2]) for _ in t.shape]
    counts = torch.tensor([rng.randrange(3) for _ in range(t.size(a))]) if t.dim() else torch.tensor(1)
    f = rng.choice([lambda t: t.repeat(times), lambda t: t.repeat_interleave(2, a), lambda t: t.expand(2, *t.shape),
                    lambda t: t.repeat_interleave(counts, a), lambda t: torch.tile(t, (2,)),
                    lambda t: t.repeat_interleave((t.select(-1, 0) > 0).flatten()[: len(t)].long(), a)])  # fmt: skip
    return lambda m, p: f(p[i])


@kind
def reduced(rng: random.Random, pool: list[Tensor]) -> Step:
    i, t = pick(rng, pool)
    a, keep = dims_of(rng, t), rng.random() < 0.5
    f = rng.choice([torch.sum, torch.mean, torch.amax, torch.logsumexp, torch.prod, torch.var, torch.median, torch.min,
                    torch.linalg.norm, torch.argmax, torch.nansum, torch.count_nonzero])  # fmt: skip
    if f is torch.count_nonzero:
        return lambda m, p: f(p[i] > 0, a).double()
    return lambda m, p: first(f(p[i], dim=a, keepdim=keep))


def first(found: Any) -> Tensor:
    """A result's values; whole numbers as numbers."""
    values = found if isinstance(found, Tensor) else found[0]
    return values if values.is_floating_point() else values.double()


@kind
def along(rng: random.Random, pool: list[Tensor]) -> Step:
    i, t = pick(rng, pool)
    a = dims_of(rng, t)
    n = rng.randrange(1, 1 + (t.size(a) if t.dim() else 1))
    f = rng.choice([torch.softmax, torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax,
                    torch.sort, F.normalize,
                    lambda t, dim: t.topk(n, dim), lambda t, dim: t.diff(dim=dim), lambda t, dim: t.argsort(dim) * 1.0,
                    lambda t, dim: torch.fft.fft(t, dim=dim).real, lambda t, dim: torch.gradient(t, dim=dim)[0],
                    lambda t, dim: torch.fft.fft(torch.fft.fft(t), dim=dim).real, lambda t, dim: torch.msort(t),
                    lambda t, dim: torch.renorm(t, 2, dim, 0.5), lambda t, dim: F.glu(t, dim)])  # fmt: skip
    return lambda m, p: first(f(p[i], dim=a))


@kind
def cut(rng: random.Random, pool: list[Tensor]) -> Step:
    i, t = pick(rng, pool)
    a = dims_of(rng, t)
    n = t.size(a) if t.dim() else 1
    k, start = rng.randrange(n), rng.randrange(n)
    stop = rng.randrange(start, n) + 1
    f = rng.choice([lambda t: t.narrow(a, start, stop - start), lambda t: t.select(a, k), lambda t: t.chunk(2, a)[-1],
                    lambda t: t.split(k + 1, a)[0], lambda t: t.tensor_split(2, a)[0], lambda t: t.unbind(a)[k],
                    lambda t: t.unfold(a, min(2, n), 1), lambda t: t.diagonal(0, a, (a + 1) % t.dim()),
                    lambda t: t.tril(), lambda t: t.triu(1), lambda t: t[..., ::2], lambda t: t[::2], lambda t: t[None],
                    lambda t: t.as_strided((2, t.size(-1)), (1, 1), k)])  # fmt: skip
    return lambda m, p: f(p[i])


@kind
def padded(rng: random.Random, pool: list[Tensor]) -> Step:
    i, t = pick(rng, pool)
    a, b = rng.choice([(1, -1), (-1, 1), (0, 1), (1, 0)])
    f = rng.choice([lambda t: F.pad(t, (a, b)), lambda t: F.pad(t, (0, 0, a, b)),
                    lambda t: F.pad(t, (0, 0, 0, 0, a, b)),
                    lambda t: F.avg_pool1d(t, 2, 1), lambda t: F.max_pool1d(t, 2, 1), lambda t: F.pixel_shuffle(t, 2),
                    lambda t: F.interpolate(t, scale_factor=2), lambda t: F.unfold(t, (1, 2)),
                    lambda t: F.layer_norm(t, t.shape[-1:]), lambda t: F.instance_norm(t), lambda t: F.group_norm(t, 1),
                    lambda t: F.conv1d(t, torch.ones(2, t.size(-2), 2, dtype=t.dtype))])  # fmt: skip
    return lambda m, p: f(p[i])


@kind
def chosen(rng: random.Random, pool: list[Tensor]) -> Step:
    (i, t), (j, _) = pick(rng, pool), pick(rng, pool)
    a = dims_of(rng, t)
    n = t.size(a) if t.dim() else 1
    rows = torch.tensor([rng.randrange(n) for _ in range(rng.choice([1, 2, n, n]))])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
    mask = constant(rng, [n], "bool")
    f = rng.choice([
        lambda t, u: t.index_select(a, rows), lambda t, u: t[rows], lambda t, u: t[order], lambda t, u: t[:, rows],
        lambda t, u: t[mask], lambda t, u: t.gather(a, u.argsort(a)), lambda t, u: t.take_along_dim(u.argsort(a), a),
        lambda t, u: t[u.argsort(a).flatten()[:n]], lambda t, u: t[u > 0], lambda t, u: t[(u.select(-1, 0) > 0)],
        lambda t, u: t.index_select(a, u.flatten()[:n].argsort()), lambda t, u: torch.take(t, rows),
        lambda t, u: t[u.select(-1, 0).argsort(0)], lambda t, u: t[u.select(-1, 0).argsort(0)].tanh()[order],
        lambda t, u: t[u.select(-1, 0).argsort(0)][u.select(-1, 0).argsort(0).argsort(0)],
        lambda t, u: t[rows.unsqueeze(1), rows], lambda t, u: t[u.argmax(a)], lambda t, u: t.masked_select(u > 0),
    ])  # fmt: skip
    return lambda m, p: f(p[i], p[j])


@kind
def put(rng: random.Random, pool: list[Tensor]) -> Step:
    (i, t), j = pick(rng, pool), rng.randrange(len(pool))
    a = dims_of(rng, t)
    n = t.size(a) if t.dim() else 1
    order = torch.randperm(n, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
    add = rng.random() < 0.5
    f = rng.choice([
        lambda t, u: t.index_add(a, order, u), lambda t, u: torch.zeros_like(t).index_add(a, order, u),
        lambda t, u: t.index_copy(a, order, u), lambda t, u: t.index_put((order,), u, accumulate=add),
        lambda t, u: torch.zeros(t.shape, dtype=t.dtype).scatter_add(a, u.argsort(a), t),
        lambda t, u: t.scatter(a, u.argsort(a), u), lambda t, u: t.scatter_reduce(a, t.argsort(a), u, "sum"),
        lambda t, u: t.masked_scatter(u > 0, t.exp()),
        lambda t, u: t.masked_scatter(u > 0, torch.ones(400).double().cumsum(0)),
        lambda t, u: t.index_fill(a, order[:1], 0.5), lambda t, u: t.put(order, u.flatten()[:n], accumulate=add),
        lambda t, u: torch.zeros(n, *u.shape[1:], dtype=t.dtype).index_put((order,), u),
        lambda t, u: t.new_tensor(u), lambda t, u: torch.full_like(t, u.detach().max()),
        lambda t, u: t.index_reduce(a, order, u, "amax"),
    ])  # fmt: skip
    return lambda m, p: f(p[i], p[j])


@kind
def joined(rng: random.Random, pool: list[Tensor]) -> Step:
    (i, t), j = pick(rng, pool), rng.randrange(len(pool))
    a = dims_of(rng, t)
    f = rng.choice([lambda t, u: torch.cat([t, u], a), lambda t, u: torch.stack([t, u], a),
                    lambda t, u: torch.hstack([t, u]),
                    lambda t, u: torch.vstack([t, u]), lambda t, u: torch.cat([t, t.flip(0)], -1),
                    lambda t, u: torch.stack(list(t.unbind(a))[::-1], a),
                    lambda t, u: torch.cat(t.split(1, a)[::-1], a),
                    lambda t, u: torch.stack([one * other for one, other in zip(t, u, strict=True)]),
                    lambda t, u: torch.stack([t[k] + u[k - 1] for k in range(len(t))]),
                    lambda t, u: torch.stack([t[k].tanh() for k in range(len(t))]),
                    lambda t, u: torch.cat([t[k][: k + 1] for k in range(len(t))])])  # fmt: skip
    return lambda m, p: f(p[i], p[j])


@kind
def product(rng: random.Random, pool: list[Tensor]) -> Step:
    (i, t), j = pick(rng, pool), rng.randrange(len(pool))
    letters = "bij"
    left, right = ("".join(rng.choice(letters) for _ in range(pool[k].dim())) for k in (i, j))
    out = "".join(dict.fromkeys(c for c in left + right if rng.random() < 0.7))
    matrix = constant(rng, [t.size(0) if t.dim() else 1] * 2)
    f = rng.choice([torch.matmul, torch.einsum, torch.einsum, torch.outer, torch.kron, torch.cdist, torch.bmm,
                    lambda t, u: torch.tensordot(t, u, 1), lambda t, u: t @ t.mT, lambda t, u: matrix @ t,
                    lambda t, u: F.scaled_dot_product_attention(t, u, u), lambda t, u: torch.cov(t),
                    lambda t, u: F.cosine_similarity(t, u, 0), lambda t, u: F.cosine_similarity(t, u, -1)])  # fmt: skip
    if f is torch.einsum:
        return lambda m, p: torch.einsum(f"{left},{right}->{out}", p[i], p[j])
    return lambda m, p: f(p[i], p[j])


@kind
def written(rng: random.Random, pool: list[Tensor]) -> Step:
    """In place: into a copy, through a view of it, into a buffer of zeros."""
    (i, t), j = pick(rng, pool), rng.randrange(len(pool))
    a, b = dims_of(rng, t), dims_of(rng, t)
    k = rng.randrange(t.size(a)) if t.dim() else 0
    view = rng.choice([lambda t: t, lambda t: t.transpose(a, b), lambda t: t.select(a, k), lambda t: t.narrow(a, k, 1),
                       lambda t: t.view(-1, t.size(-1)), lambda t: t.view(-1), lambda t: t[::2],
                       lambda t: t.mT])  # fmt: skip
    source = rng.choice([lambda t, u: u, lambda t, u: t.select(a, 0), lambda t, u: t.flip(0),
                    lambda t, u: u.transpose(a, b),
                         lambda t, u: t.narrow(a, k, 1), lambda t, u: t.mean(a, keepdim=True), lambda t, u: view(t),
                         lambda t, u: view(u), lambda t, u: view(t).detach()])  # fmt: skip
    write = rng.choice([lambda v, s: v.copy_(s), lambda v, s: v.add_(s), lambda v, s: v.__setitem__(..., s),
                        lambda v, s: v.__setitem__(0, s[-1]), lambda v, s: v.mul_(s), lambda v, s: v.lerp_(s, 0.3),
                        lambda v, s: v.cumsum_(0), lambda v, s: v.renorm_(2, 0, 0.5), lambda v, s: v.zero_(),
                        lambda v, s: v.masked_fill_(s > 0, 0),
                        lambda v, s: v.index_fill_(0, torch.tensor([0]), 0)])  # fmt: skip
    fresh, early = rng.choice([True, False]), rng.random() < 0.3

    def step(m: Any, p: list[Tensor]) -> Tensor:
        base = torch.zeros(p[i].shape, dtype=p[i].dtype) if fresh else p[i].clone()
        seen = base[0] if early else None
        write(view(base), source(p[i], p[j]))
        return base if seen is None else base + seen

    return step


@kind
def whole_numbers(rng: random.Random, pool: list[Tensor]) -> Step:
    """By way of whole numbers, and back."""
    i, t = pick(rng, pool)
    a = dims_of(rng, t)
    f = rng.choice([torch.flipud, torch.msort, lambda t: t.roll(1, a), lambda t: F.pad(t, (0, 0, 1, -1)),
                    lambda t: t.mT,
                    lambda t: t.cumsum(a), lambda t: t.diff(dim=a), lambda t: torch.isin(t, t.narrow(a, 0, 1) + 1),
                    lambda t: t.sort(a)[0], lambda t: t @ t, lambda t: t % 3, lambda t: t.bitwise_xor(t.flip(a)),
                    lambda t: F.one_hot(t.clamp(0, 2), 3), lambda t: torch.eye(9)[t.clamp(0, 8)].double(),
                    lambda t: t.max(a)[1], lambda t: torch.arange(7.0)[t.clamp(0, 6)], lambda t: t.unique(),
                    lambda t: F.embedding(t.clamp(0, 2), torch.eye(3))])  # fmt: skip
    j = rng.randrange(len(pool))
    if rng.random() < 0.7:
        return lambda m, p: p[j] + f((p[i].detach() * 3).long()).double()
    return lambda m, p: f((p[i].detach() * 3).long()).double()


@kind
def places(rng: random.Random, pool: list[Tensor]) -> Step:
    """Rows by where a condition holds, back to where they were."""
    (i, _), (j, _) = pick(rng, pool), pick(rng, pool)

    def step(m: Any, p: list[Tensor]) -> Tensor:
        out = torch.zeros_like(p[i])
        rows = torch.where(p[j].flatten(1)[:, 0] > 0)[0]
        if add:
            return out.index_add(0, rows, p[i][rows].tanh())
        out[rows] = p[i][rows].tanh()
        return out

    add = rng.random() < 0.5
    return step


RISKY = [padded, chosen, put, written, whole_numbers, along]
