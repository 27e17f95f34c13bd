"""Calls by which a function is probed: on meta tensors of a larger batch, with chosen values, with fewer numbers."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.common import autocast_kinds
from ..utils.cache import Answers
from ..utils.pytree import map_tensors, signature, tensors_in
from .calls import Call, Inputs, Tags
from .layout import Layout, spread
from .operator_table import VIEWS

Answer = tuple[list[list[tuple[int, int]]] | None, bool]


_CACHE = Answers()


def cached_trial(call: Call, inputs: Inputs) -> Answer:
    """What grew in each result, and whether constants of the batch's size had to grow along."""
    try:
        key = (call.func, call.batch, key_of(call))
        if key in _CACHE:
            return _CACHE[key]
    except TypeError:  # an argument without a hash
        key = None
    answer: Answer = (None, False)
    for grow in (_constants_as_they_are, _constants_grown, _constants_grown_first):
        answer = (_trial(call, inputs, grow), grow is not _constants_as_they_are)
        if answer[0] is not None:
            break
    if key is not None:
        _CACHE[key] = answer
    return answer


def key_of(call: Call) -> Any:
    """Of a call's arguments: shapes, types and layouts of tensors, values of others."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = call.layout(value)
            where = layout and (layout.dim, layout.outer, layout.inner, layout.owner is None, bool(layout.mixed))
            return (tuple(value.shape), value.dtype, where)
        if isinstance(value, slice):
            return (slice, value.start, value.stop, value.step)
        hash(value)
        return (type(value), value)

    return signature((call.args, call.kwargs), leaf)


Grow = Callable[[Tensor, int, Inputs], list[int]]


def _constants_as_they_are(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    return list(tensor.shape)


def _constants_grown(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    """A constant made for this batch (a mask), lying as the data lies, or samples first."""
    known = [(layout.dim - source.dim() + tensor.dim(), layout) for source, layout in inputs if not layout.mixed]
    return _grown(tensor, batch, [*known, *((0, layout) for _, layout in known)])


def _constants_grown_first(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    """The same, where another dimension is as long as the samples' (two operands of an einsum)."""
    return _grown(tensor, batch, [(0, layout) for _, layout in inputs if not layout.mixed])


def _grown(tensor: Tensor, batch: int, places: list[tuple[int, Layout]]) -> list[int]:
    shape = list(tensor.shape)
    for dim, layout in places:
        if 0 <= dim < tensor.dim() and tensor.size(dim) == layout.rows:
            shape[dim] = _grown_rows(layout)
            return shape
    if shape and shape[0] == batch:
        shape[0] += 1
    return shape


def _grown_rows(layout: Layout) -> int:
    return layout.rows + (1 if layout.owner is not None else layout.outer * layout.inner)


def _trial(call: Call, inputs: Inputs, grow: Grow) -> list[list[tuple[int, int]]] | None:
    cast = autocast_kinds()

    def to_meta(tensor: Tensor) -> Tensor:
        layout, kind = call.layout(tensor), tensor.dtype
        if tensor.device.type in cast and kind in (torch.bfloat16, torch.float16):
            kind = torch.float32  # meta tensors are not cast to one type
        if layout is None:
            shape = grow(tensor, call.batch, inputs)
        else:
            shape = list(tensor.shape)
            if not (layout.mixed and (layout.dim >= len(shape) or shape[layout.dim] != layout.rows)):
                shape[layout.dim] = _grown_rows(layout)
        if call.name in VIEWS:  # costs nothing, where the first use of meta tensors imports half of torch
            return torch.empty((), dtype=kind).expand(shape)
        return torch.empty(shape, dtype=kind, device="meta")

    try:
        with torch.no_grad():
            result = call.func(*map_tensors(call.args, to_meta), **map_tensors(call.kwargs, to_meta))
    except Exception:  # noqa: BLE001  (any failure means only that the question has no answer)
        return None
    answer = []
    for tensor, larger in zip(call.results(), tensors_in(result), strict=False):
        if tensor.dim() != larger.dim():
            return None
        pairs = enumerate(zip(tensor.shape, larger.shape, strict=True))
        answer.append([(dim, new - old) for dim, (old, new) in pairs if new != old])
    return answer


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
    factors = sizes[layout.owners(torch.device("cpu")).cpu() % 3]
    return normal * spread(factors, layout.dim, normal.shape).to(normal.dtype)


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


_MANY = 1 << 16  # numbers of a tensor from which on a call is asked with fewer


_SIZES = (7, 59, 499)  # of dimensions that are no samples', in turn


def fewer(call: Call, inputs: Inputs, tags: Tags) -> tuple[Call, Inputs, Tags]:
    """The call, or one that does the same with fewer numbers: all samples, and the first numbers of every long
    dimension that holds none.

    Whether torch's own functions couple samples does not depend on how long the other dimensions are. Where a function
    does not take the shorter ones (a size or an index stands among its arguments), or is another's, it is asked with
    all that it was given.
    """
    known = [layout for _, layout in (*inputs, *tags) if layout is not None and not layout.mixed]
    sizes = [t.numel() for t in (*call.tensors, *(t for t, _ in tags))]
    if max(sizes, default=0) <= _MANY or call.in_place or "out" in call.kwargs or not _is_torchs(call.func):
        return call, inputs, tags
    if any(layout.alone >= 0 for layout in known) or any(t.layout != torch.strided for t in call.tensors):
        return call, inputs, tags
    if call.name in ("triu", "tril"):  # their diagonal may lie beyond shorter dimensions, which they take all the same
        return call, inputs, tags
    kept = {call.batch, *[layout.rows for layout in known]}
    for size in _SIZES:
        while size in kept:
            size -= 1
        if (found := _with_dimensions_of(size, kept, call, inputs, tags)) is not None:
            return found
    return call, inputs, tags


def _with_dimensions_of(
    size: int, kept: set[int], call: Call, inputs: Inputs, tags: Tags
) -> tuple[Call, Inputs, Tags] | None:
    """The call with long dimensions of this size but for those of kept sizes; None if the function does not take it."""
    made: dict[int, Tensor] = {}

    def cut(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            places = tuple(slice(size if n > size and n not in kept else n) for n in tensor.shape)
            made[id(tensor)] = tensor.detach()[places].clone()
        return made[id(tensor)]

    args, kwargs = map_tensors(call.given, cut)
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            out = call.func(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    finally:
        torch.set_rng_state(state)
    results = tensors_in(out)
    if len(results) != len(tags):
        return None
    for small, (large, layout) in zip(results, tags, strict=True):
        if small.dim() != large.dim() or any(a > b for a, b in zip(small.shape, large.shape, strict=True)):
            return None
        where = -1 if layout is None or layout.mixed else layout.dim
        if where >= 0 and small.shape[where : where + 1] != large.shape[where : where + 1]:
            return None
    fewer = Call(call.func, args, kwargs, call.batch, call.path, out)
    for tensor in call.tensors:
        fewer.knows(made[id(tensor)], call.layout(tensor))
    found = [(small, layout) for small, (_, layout) in zip(results, tags, strict=True)]
    return fewer, [(made[id(t)], layout) for t, layout in inputs], found


def _is_torchs(func: Any) -> bool:
    """Whether a function is torch's own, and not a user's operator or what calls a user's function."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(func).startswith("aten.")
    if isinstance(func, types.FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    return isinstance(func, types.MethodDescriptorType | types.WrapperDescriptorType) or func in _BUILTIN


_BUILTIN = frozenset(
    value for module in (torch, torch._C._nn, *(getattr(torch._C, name) for name in ("_fft", "_linalg", "_special")))
    for value in vars(module).values() if isinstance(value, types.BuiltinFunctionType)
)  # fmt: skip
