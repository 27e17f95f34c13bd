"""The registry of layout rules by torch function, and the properties of each rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .calls import Call, Tags

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
