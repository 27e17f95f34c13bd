"""One torch function call: its name, tensors and arguments, and which of its tensors carry samples; the registry of
layout rules by torch function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..utils.pytree import tensors_in
from .layout import Layout, layout_on, tag_of
from .operator_table import function_name, is_in_place

Inputs = list[tuple[Tensor, Layout]]  # tensors with their layouts
Tags = list[tuple[Tensor, Layout | None]]  # layouts of a call's results


class Call:
    """One torch function call, as every layer that it passes sees it.

    given: its arguments as they were given; args, kwargs: the same, leading tensors in their places, and `dim` for
    numpy's `axis`; tensors: all that are among them. out: what came out, once the call was made (`run`).
    before: of a call in place, its target as it was. bases: memory around the results whose layout the call changes.
    """

    __slots__ = (
        "func", "given", "args", "kwargs", "tensors", "out", "batch", "name", "path", "in_place", "before", "bases",
        "_layouts", "_supposed",
    )  # fmt: skip

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, path: str = "", out: Any = None
    ) -> None:
        self.func, self.given, self.batch = func, (args, kwargs), batch
        if kwargs:
            if "axis" in kwargs and "dim" not in kwargs:
                kwargs = {**{name: value for name, value in kwargs.items() if name != "axis"}, "dim": kwargs["axis"]}
            if not args:
                args, kwargs = _positional(kwargs)
        self.args, self.kwargs, self.path = args, kwargs, path  # path: of the module in whose forward the call stands
        self.tensors: Sequence[Tensor] = tensors_in((args, kwargs) if kwargs else args)
        self.name = function_name(func)
        if self.name in ("__getitem__", "__setitem__"):
            self.tensors = [*self.tensors, *bounds_of(args[1] if len(args) > 1 else None)]
        self.in_place = is_in_place(self.name)
        self.before: Tensor | None = None
        self.bases: list[tuple[Tensor, Layout]] = []
        self._layouts: dict[int, tuple[Tensor, Layout | None]] = {}
        self._supposed: frozenset[int] = frozenset()
        self.returned(out)

    def run(self) -> Any:
        """Make the call."""
        args, kwargs = self.given
        return self.returned(self.func(*args, **kwargs))

    def returned(self, out: Any) -> Any:
        """Note what the call gave."""
        self.out = out
        if self.in_place and self.before is None and self.args and isinstance(out, Tensor) and out is not self.args[0]:
            self.before = self.args[0]  # ran on a copy
        return out

    # ------------------------------------------------------------------ whose its tensors are

    def layout(self, tensor: Any) -> Layout | None:
        """The layout of a tensor, as it was before the call until `forget`."""
        if not isinstance(tensor, Tensor):
            return None
        known = self._layouts.get(id(tensor))
        if known is None:
            known = self._layouts[id(tensor)] = (tensor, tag_of(tensor, self.batch))
        return known[1]

    def knows(self, tensor: Tensor, layout: Layout | None) -> None:
        """Take this for the tensor's layout. (The tensor is kept: no other comes to have its id.)"""
        self._layouts[id(tensor)] = (tensor, layout)

    def forget(self) -> None:
        """The results have their layouts: what is asked from now on is as it is after the call."""
        self._layouts = {}

    def supposing(self, layouts: Mapping[int, Layout | None]) -> Call:
        """The same call, were the arguments of these ids laid out so."""
        other = Call(self.func, *self.given, self.batch, self.path)
        other.out, other.before, other.bases = self.out, self.before, self.bases
        other._layouts = self._layouts | {id(t): (t, layouts[id(t)]) for t in self.tensors if id(t) in layouts}
        other._supposed = self._supposed | layouts.keys()
        return other

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor carries no samples, of no batch."""
        return self.layout(tensor) is None and (id(tensor) in self._supposed or layout_on(tensor) is None)

    def inputs(self) -> Inputs:
        """The tensors with a layout among the arguments."""
        return [(tensor, layout) for tensor in self.tensors if (layout := self.layout(tensor)) is not None]

    def constants(self) -> list[Tensor]:
        """The tensors without one."""
        return [tensor for tensor in self.tensors if self.layout(tensor) is None]

    def beside_first(self) -> Inputs:
        """The tensors with a layout among the arguments after the first, which may be among them again."""
        rest = tensors_in((self.args[1:], self.kwargs))
        return [(tensor, layout) for tensor in rest if (layout := self.layout(tensor)) is not None]

    def results(self) -> Sequence[Tensor]:
        """The tensors that came out."""
        return tensors_in(self.out)

    def written(self) -> list[Tensor]:
        """The tensors that the call wrote into."""
        target = self.args[:1] if self.in_place or self.kwargs.get("inplace") is True else ()
        return list(tensors_in((target, self.kwargs.get("out"))))

    # ------------------------------------------------------------------ its arguments, by place or name

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def mixed(self, why: str = "") -> str:
        place = f" in module '{self.path}'" if self.path else ""
        return f"{self.name}(){place}{why and ' ' + why}"

    def combined(self, why: str, mixed: str = "") -> Layout:
        """Of what is made of several samples: numbers, and masks and counts, which may become numbers."""
        return Layout(self.batch, mixed=mixed or self.mixed(why))

    def all_combined(self, why: str, mixed: str = "") -> Tags:
        """Every result is made of several samples."""
        return [(tensor, self.combined(why, mixed)) for tensor in self.results()]


def bounds_of(index: Any) -> list[Tensor]:
    """The tensors that say where an index's slices begin and end."""
    slices = [item for item in (index if isinstance(index, tuple) else (index,)) if isinstance(item, slice)]
    return [end for item in slices for end in (item.start, item.stop, item.step) if isinstance(end, Tensor)]


_LEADING = ("input", "self", "tensors", "query", "key", "value")


def _positional(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call by keywords alone, its leading tensors in their places."""
    leading = tuple(kwargs[name] for name in _LEADING if name in kwargs)
    return leading, {name: value for name, value in kwargs.items() if name not in _LEADING}


def bind(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Arguments by position or name; missing ones are None."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


Answer = Callable[[Call], Tags]


class LayoutRule(NamedTuple):
    """What the layouts of a function's results are, and what others must know of the function.

    by_value: they depend on the tensors' numbers (an index, a mask), so the rule is asked at every call; what other
    rules find is kept by shapes (`Memo`). picks: takes places of rows as an index, which the rule looks at.
    joins: takes tensors of several samples, whose rows the rule knows. reaches: may reach memory around a tensor; the
    rule looks whose it is. refuses: raises for what no sample can do alone, in a batch of one too.
    """

    answer: Callable[[Call], Tags | None]
    by_value: bool = False
    picks: bool = False
    joins: bool = False
    reaches: bool = False
    refuses: bool = False


LAYOUT_RULES: dict[Any, LayoutRule] = {}


_NONE = LayoutRule(lambda call: None)


def layout_rule(*functions: Any, **says: bool) -> Callable[[Answer], Answer]:
    """Register a layout rule for torch functions. says: see `LayoutRule`."""

    def register(answer: Answer) -> Answer:
        LAYOUT_RULES.update(dict.fromkeys(functions, LayoutRule(answer, **says)))
        return answer

    return register


def rule_of(function: Any) -> LayoutRule:
    """A function's rule, or one that has nothing to say."""
    return LAYOUT_RULES.get(function, _NONE)
