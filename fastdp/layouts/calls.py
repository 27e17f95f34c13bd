"""Traced torch function calls: their names, tensors and arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .layout import Layout, tag_of
from .nests import tensors_in

_IN_PLACE_DUNDERS = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor matmul".split()
) | {"__setitem__"}


def is_in_place(name: str) -> bool:
    """Whether the function writes to its first argument."""
    name = name.partition(".")[0]  # torch.ops.aten.add_.Tensor
    return name in _IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))


class Call:
    """One traced function call: what went in, what came out. before: of a call in place, its target as it was."""

    __slots__ = ("func", "args", "kwargs", "out", "batch", "name", "path", "before")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        batch: int,
        path: str = "",
        before: Tensor | None = None,
    ) -> None:
        self.func, self.out, self.batch, self.before = func, out, batch, before
        if "axis" in kwargs and "dim" not in kwargs:  # numpy's name for it
            kwargs = {**{name: value for name, value in kwargs.items() if name != "axis"}, "dim": kwargs["axis"]}
        self.args, self.kwargs = (args, kwargs) if args or not kwargs else _positional(kwargs)
        self.name = function_name(func)
        self.path = path  # module in whose forward the call stands
        if before is None and is_in_place(self.name) and isinstance(out, Tensor) and out is not self.args[0]:
            self.before = self.args[0]  # ran on a copy

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

    def beside_first(self) -> list[tuple[Tensor, Layout]]:
        """The tensors with a layout among the arguments after the first, which may be among them again."""
        found = [(t, self.layout(t)) for t in tensors_in((self.args[1:], self.kwargs))]
        return [(t, layout) for t, layout in found if layout is not None]

    def written(self) -> list[Tensor]:
        """The tensors that the call wrote into."""
        target = self.args[:1] if is_in_place(self.name) or self.kwargs.get("inplace") is True else ()
        return list(tensors_in((target, self.kwargs.get("out"))))

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


def bind(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Arguments by position or name; missing ones are None."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
