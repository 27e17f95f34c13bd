"""Tells which parameters' values the norms and clipped sums of a backward will read.

Most uses read what they hold, and no parameter. What is not known to do so counts as reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..grad_sample.conv import Conv
from ..grad_sample.cross_terms import isometric
from ..grad_sample.embedding import Lookup
from ..grad_sample.linear import Matmul
from ..grad_sample.parameter_links import leaves_of, link_of
from ..grad_sample.parameter_use import ParameterUse, Regrouped, Stack, Stored
from ..grad_sample.routed_rows import Routed
from .gradients import Gradients
from .memory_budget import Block, Replayed

HOLDING = (Stored, Matmul, Lookup, Conv, Routed)  # all that they read


class Reading(NamedTuple):
    """leaves: the parameters whose norms and sums read (ids). block: what runs again for the sums, if one does; else
    both read the leaves, and the parameters of what checkpointing runs again."""

    leaves: tuple[int, ...]
    block: Block | None
    again: tuple[Callable[..., Any], ...] = ()


def readings(gradients: Gradients) -> Iterator[Reading]:
    """What the uses will read: one for each, and one for each checkpointed block behind it."""
    for use in gradients.uses:
        leaves = tuple(map(id, leaves_of(use.operand)))
        blocks = list(_blocks(use))
        for block in blocks:
            yield Reading(leaves, block)
        if not isometric(use.operand) or not (blocks or _holds_all(use)):
            link = link_of(use.operand)
            yield Reading(leaves, None, () if link is None else link.again)


def _parts(use: ParameterUse) -> list[ParameterUse]:
    if isinstance(use, Regrouped):
        return [use.inner]
    return list(use.uses) if isinstance(use, Stack) else []


def _holds_all(use: ParameterUse) -> bool:
    parts = _parts(use)
    return all(map(_holds_all, parts)) if parts else type(use) in HOLDING


def _blocks(use: ParameterUse) -> Iterator[Block]:
    if isinstance(use, Replayed):
        yield use.block
    for part in _parts(use):
        yield from _blocks(part)
