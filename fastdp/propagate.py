"""Carry layouts through a forward: which rows of a result belong to which sample.

Most functions are asked, not listed: the function is run once on meta tensors whose batch is larger by
one, and the dimension of the result that grew is where its samples lie. The answer is cached by shapes.
Only functions that bake sizes in (views), move rows (indexing) or mix rows in place of a dimension
(softmax along the batch) need a rule of their own: `fastdp.propagate_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, tag, tag_of

Tags = list[tuple[Tensor, Layout | None]]
Rule = Callable[["Call"], Tags]
RULES: dict[Any, Rule] = {}
UNCHECKED: set[Any] = set()  # functions that draw random numbers, or whose rules have checked them
REFUSING: set[Any] = {torch.nn.functional.batch_norm, torch.nn.functional.instance_norm, torch.batch_norm}


_IN_PLACE_DUNDERS = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor matmul".split()
) | {"__setitem__"}


def is_in_place(name: str) -> bool:
    """Whether the function writes to its first argument."""
    return name in _IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))


class Call:
    """One traced function call: what went in, what came out."""

    __slots__ = ("func", "args", "kwargs", "out", "batch", "name", "path")

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, batch: int, path: str = ""
    ) -> None:
        self.func, self.out, self.batch = func, out, batch
        self.args, self.kwargs = (args, kwargs) if args or not kwargs else _positional(kwargs)
        self.name = function_name(func)
        self.path = path  # module in whose forward the call stands

    def layout(self, tensor: Any) -> Layout | None:
        return tag_of(tensor, self.batch) if isinstance(tensor, Tensor) else None

    def inputs(self) -> list[tuple[Tensor, Layout]]:
        """The tensors with a layout among the arguments."""
        found = []
        for tensor in tensors_in((self.args, self.kwargs)):
            layout = tag_of(tensor, self.batch)
            if layout is not None:
                found.append((tensor, layout))
        return found

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def mixed(self, why: str = "") -> str:
        place = f" in module '{self.path}'" if self.path else ""
        return f"{self.name}(){place}{why and ' ' + why}"


_LEADING = ("input", "self", "tensors", "query", "key", "value")


def _positional(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call by keywords alone, its leading tensors in their places."""
    leading = tuple(kwargs[name] for name in _LEADING if name in kwargs)
    return leading, {name: value for name, value in kwargs.items() if name not in _LEADING}


def function_name(func: Any) -> str:
    """A readable name of a torch function: F.linear is 'linear', a property getter is its property."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def bind(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Arguments by position or name; missing ones are None."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same nest with every tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(item, function) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def propagate(call: Call) -> None:
    """Tag the results of the call. The caller knows that an argument has a layout."""
    outputs = list(tensors_in(call.out))
    if not outputs and call.name != "__setitem__":
        return
    rule = RULES.get(call.func)
    if call.batch <= 1:
        if call.func in REFUSING and rule is not None:
            rule(call)
        for tensor in outputs or tensors_in(call.args[0]):
            tag(tensor, Layout(call.batch))
        return
    for tensor, layout in rule(call) if rule is not None else ask(call):
        tag(tensor, layout)
        if layout is not None and layout.mixed and is_in_place(call.name) and tensor._is_view():
            _taint_base(tensor, layout)


def _taint_base(view: Tensor, layout: Layout) -> None:
    """What was mixed through a view is mixed in all views of the memory."""
    base = view._base
    if base is not None and tag_of(base, layout.batch) is not None:
        tag(base, layout)


def ask(call: Call) -> Tags:
    """Layouts of the results by the trial with a larger batch."""
    outputs = list(tensors_in(call.out))
    inputs = call.inputs()
    if call.name in VIEWS:  # a count over the batch may be a size: sizes are not data
        inputs = [(t, layout) for t, layout in inputs if t.dim() or not layout.mixed]
        if not inputs:
            return [(tensor, None) for tensor in outputs]
    mixed = next((layout.mixed for _, layout in inputs if layout.mixed), "")
    owner, clash = _common_owner(inputs)
    if clash:
        return [(t, _combined(call, t, "combines rows of different samples")) for t in outputs]
    found = _cached_trial(call, inputs)
    if found is None or len(found) != len(outputs):
        tags: Tags = [(tensor, _guess(call, tensor, inputs, mixed)) for tensor in outputs]
    else:
        tags = [
            (tensor, _from_trial(call, tensor, grown, inputs, owner, mixed))
            for tensor, grown in zip(outputs, found, strict=True)
        ]
    if not mixed and not _is_independent(call, inputs, tags):
        return [(t, _combined(call, t, "lets one sample's rows depend on another's")) for t in outputs]
    return tags


def _from_trial(
    call: Call,
    tensor: Tensor,
    grown: list[tuple[int, int]],
    inputs: list[tuple[Tensor, Layout]],
    owner: Tensor | None,
    mixed: str,
) -> Layout | None:
    if not grown:
        return _combined(call, tensor, "combines the samples of the batch", mixed)
    if len(grown) > 1:
        return _combined(call, tensor, "combines samples with each other", mixed)
    layout = _grown_layout(call, tensor, grown[0], inputs, owner, mixed)
    if layout is not None and not layout.mixed and tensor.size(layout.dim) != layout.rows:
        return _combined(call, tensor, "combines neighbouring samples", mixed)
    return layout


def _combined(call: Call, tensor: Tensor, why: str, mixed: str = "") -> Layout | None:
    """Made of several samples: numbers, and masks and counts, which may become numbers."""
    return Layout(call.batch, mixed=mixed or call.mixed(why))


def _common_owner(inputs: list[tuple[Tensor, Layout]]) -> tuple[Tensor | None, bool]:
    """The row order that all inputs share, and whether they disagree."""
    real = [(t, layout) for t, layout in inputs if not layout.mixed]
    owner = next((layout.owner for _, layout in real if layout.owner is not None), None)
    if owner is None:
        orders = {(layout.outer, layout.inner) for _, layout in real}
        sizes = {outer * inner for outer, inner in orders}
        return None, len(orders) > len(sizes)  # [T * B] meets [B * T]
    for tensor, layout in real:
        if layout.owner is not owner:
            other = layout.owners(tensor.device)
            if other.shape != owner.shape or not torch.equal(other.to(owner.device), owner):
                return owner, True
    return owner, False


def _grown_layout(
    call: Call,
    tensor: Tensor,
    grown: tuple[int, int],
    inputs: list[tuple[Tensor, Layout]],
    owner: Tensor | None,
    mixed: str,
) -> Layout | None:
    dim, growth = grown
    if owner is not None:
        if growth == 1 and tensor.size(dim) == owner.numel():
            return Layout(call.batch, dim, owner=owner, mixed=mixed)
    else:
        for _, layout in inputs:
            if layout.outer * layout.inner == growth:
                return layout._replace(dim=dim, mixed=mixed)
        if growth == 1:
            return Layout(call.batch, dim, mixed=mixed)
    return _combined(call, tensor, "reorders rows in a way that could not be followed", mixed)


def _guess(call: Call, tensor: Tensor, inputs: list[tuple[Tensor, Layout]], mixed: str) -> Layout | None:
    """No trial succeeded: the same shape, or the only dimension of the right size, or unknown."""
    places = {(layout.dim - source.dim(), layout.outer, layout.inner) for source, layout in inputs}
    if len(places) > 1:
        return _combined(call, tensor, "combines inputs whose samples lie in different dimensions", mixed)
    for source, layout in inputs:
        if source.shape == tensor.shape:
            return layout._replace(mixed=mixed or layout.mixed)
    found = {
        (dim, layout)
        for _, layout in inputs
        if layout.owner is None and not layout.mixed
        for dim, size in enumerate(tensor.shape)
        if size == layout.rows
    }
    if len(found) == 1:
        dim, layout = found.pop()
        return layout._replace(dim=dim, mixed=mixed)
    if not tensor.requires_grad:
        return None  # a constant: exact whatever it holds
    return Layout(call.batch, mixed=mixed or call.mixed("has a result whose rows could not be followed"))


# --------------------------------------------------------------------------- the check by value

_INDEPENDENT: set[Any] = set()


def _is_independent(call: Call, inputs: list[tuple[Tensor, Layout]], tags: Tags) -> bool:
    """Whether a change of sample 0's rows leaves the other samples' rows of the result alone.

    The trial sees sizes only: a Fourier transform along the batch keeps them. So each kind of call is run once
    more with sample 0 changed; calls whose indices or constants (of the batch's size) may differ, every time.
    """
    floating = [(t, layout) for t, layout in inputs if t.is_floating_point()]
    if call.name in VIEWS or call.func in UNCHECKED or not floating or call.batch < 2:
        return True
    key: Any = None
    others = [t for t in tensors_in((call.args, call.kwargs)) if tag_of(t, call.batch) is None]
    varying = any(call.batch in t.shape for t in others) or any(not t.is_floating_point() for t, _ in inputs)
    if not varying:
        try:
            key = (call.func, call.batch, _key(call.args, call.batch), _key(call.kwargs, call.batch))
            if key in _INDEPENDENT:
                return True
        except TypeError:
            key = None
    if is_in_place(call.name):  # the input is gone: its twin out of place says the same
        return True
    changed = {id(t): _with_first_sample_changed(t, layout) for t, layout in floating}

    def replace(tensor: Tensor) -> Tensor:
        return changed.get(id(tensor), tensor)

    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            again = call.func(*map_tensors(call.args, replace), **map_tensors(call.kwargs, replace))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return True  # cannot be asked
    finally:
        torch.set_rng_state(state)
    for (before, layout), after in zip(tags, tensors_in(again), strict=False):
        if layout is not None and not layout.mixed and not _same_others(layout, before, after):
            return False
    if key is not None:
        _INDEPENDENT.add(key)
    return True


def _with_first_sample_changed(tensor: Tensor, layout: Layout) -> Tensor:
    changed = tensor.detach().clone()
    if layout.mixed or changed.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return changed
    rows = changed.movedim(layout.dim, 0)
    first = layout.owners(tensor.device) == 0
    rows[first] = rows[first] * -1.75 + 0.9
    return changed


def _same_others(layout: Layout, before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return False
    keep = layout.owners(before.device) != 0
    a, b = before.detach().movedim(layout.dim, 0)[keep], after.movedim(layout.dim, 0)[keep]
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    digits = 1e-6 if a.dtype in (torch.float32, torch.float64) else 1e-3
    return torch.allclose(a, b, rtol=10 * digits, atol=digits * float(a.abs().max()), equal_nan=True)


# --------------------------------------------------------------------------- the trial

_CACHE: dict[Any, list[list[tuple[int, int]]] | None] = {}
_CACHE_SIZE = 20_000


def _cached_trial(call: Call, inputs: list[tuple[Tensor, Layout]]) -> list[list[tuple[int, int]]] | None:
    try:
        key = (call.func, call.batch, _key(call.args, call.batch), _key(call.kwargs, call.batch))
        if key in _CACHE:
            return _CACHE[key]
    except TypeError:  # an argument without a hash
        key = None
    result = None
    for grow in (_constants_as_they_are, _constants_aligned, _constants_first):
        result = _trial(call, inputs, grow)
        if result is not None:
            break
    if key is not None:
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        _CACHE[key] = result
    return result


def _key(value: Any, batch: int) -> Any:
    if isinstance(value, Tensor):
        layout = tag_of(value, batch)
        where = layout and (layout.dim, layout.outer, layout.inner, layout.owner is None, bool(layout.mixed))
        return (tuple(value.shape), value.dtype, where)
    if isinstance(value, tuple | list):
        return (type(value), *(_key(item, batch) for item in value))
    if isinstance(value, dict):
        return tuple((name, _key(item, batch)) for name, item in value.items())
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    hash(value)
    return (type(value), value)


VIEWS = frozenset(
    "permute transpose t T mT movedim moveaxis swapaxes swapdims squeeze unsqueeze unbind narrow select chunk split "
    "tensor_split diagonal __iter__".split()
)
Grow = Callable[[Tensor, int, list[tuple[Tensor, Layout]]], list[int]]


def _constants_as_they_are(tensor: Tensor, batch: int, inputs: list[tuple[Tensor, Layout]]) -> list[int]:
    return list(tensor.shape)


def _constants_aligned(tensor: Tensor, batch: int, inputs: list[tuple[Tensor, Layout]]) -> list[int]:
    """A constant made for this batch (a mask), lying as the data lies."""
    shape = list(tensor.shape)
    for source, layout in inputs:
        dim = layout.dim - source.dim() + tensor.dim()
        if not layout.mixed and 0 <= dim < tensor.dim() and tensor.size(dim) == layout.rows:
            shape[dim] = _grown_rows(layout)
            break
    return shape


def _constants_first(tensor: Tensor, batch: int, inputs: list[tuple[Tensor, Layout]]) -> list[int]:
    """A constant made for this batch, samples first."""
    shape = list(tensor.shape)
    if shape and shape[0] == batch:
        shape[0] += 1
    return shape


def _grown_rows(layout: Layout) -> int:
    return layout.rows + (1 if layout.owner is not None else layout.outer * layout.inner)


def _trial(call: Call, inputs: list[tuple[Tensor, Layout]], grow: Grow) -> list[list[tuple[int, int]]] | None:
    def to_meta(tensor: Tensor) -> Tensor:
        layout = tag_of(tensor, call.batch)
        if layout is None:
            shape = grow(tensor, call.batch, inputs)
        else:
            shape = list(tensor.shape)
            if not (layout.mixed and (layout.dim >= len(shape) or shape[layout.dim] != layout.rows)):
                shape[layout.dim] = _grown_rows(layout)
        if call.name in VIEWS:  # costs nothing, where the first use of meta tensors imports half of torch
            return torch.empty((), dtype=tensor.dtype).expand(shape)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    try:
        with torch.no_grad():
            result = call.func(*map_tensors(call.args, to_meta), **map_tensors(call.kwargs, to_meta))
    except Exception:  # noqa: BLE001  (any failure means only that the question has no answer)
        return None
    answer = []
    for tensor, larger in zip(tensors_in(call.out), tensors_in(result), strict=False):
        if tensor.dim() != larger.dim():
            return None
        pairs = enumerate(zip(tensor.shape, larger.shape, strict=True))
        answer.append([(dim, new - old) for dim, (old, new) in pairs if new != old])
    return answer
