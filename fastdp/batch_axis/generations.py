"""Tells whether a tensor's samples are those of the present batch or of an earlier one."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any


def nothing() -> tuple[Any, tuple[()]]:
    """How a note on a tensor is pickled: a tensor loaded again is of no running engine, and must load without fastdp,
    also where only weights may be (torch.load)."""
    return OrderedDict, ()


class Token:
    """See `Generation.token`."""

    __slots__ = ("__weakref__",)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return nothing()


class Generation:
    """The batch whose samples a tensor carries: alive until a backward has gone through the forward that made it.

    owner: a token of the engine whose batch it is; reached: by the backward that runs; survived: one that did not.
    number: tells moments apart; before: the number of the one in which this very batch was handed out by its loader.
    parent: of a moment of what is made, outside of forwards, of inputs and labels alone: that of the forward before.
    doubts: moments of other forwards, of whose such things this one made use, and what they were made by.
    joined: numbers of moments (its own, too) whose samples a loss has joined with its own, one by one.
    token: kept by the tensors that are tagged now (but inputs and labels), so that its end tells when all are gone.
    """

    __slots__ = (
        "owner",
        "alive",
        "reached",
        "survived",
        "number",
        "before",
        "parent",
        "doubts",
        "token",
        "joined",
        "_beside",
    )
    _count = itertools.count(1)

    def __init__(self, owner: Any = None, before: int = 0) -> None:
        self.owner, self.alive = owner, True
        self.reached = self.survived = False
        self.number, self.before = next(Generation._count), before
        self.parent: Generation | None = None
        self.doubts: dict[Generation, str] = {}
        self.joined = {self.number}
        self.token: Token | None = None
        self._beside: Generation | None = None

    def beside(self) -> Generation:
        """The moment of what is made of inputs and labels alone while this one lasts."""
        if self._beside is None:
            self._beside = Generation(self.owner, self.before)
            self._beside.number, self._beside.parent = self.number, self
        return self._beside

    def __deepcopy__(self, memo: Any) -> Generation:
        return self

    def __reduce__(self) -> Any:
        return nothing()


LOADERS = object()  # the owner of batches that a loader hands out, to whichever engine
_NOBODYS = Generation()
current = _NOBODYS  # the moment of what is tagged now


def set_generation(moment: Generation | None) -> None:
    """From now on, what is tagged carries samples of this moment's batch."""
    global current
    moment = _NOBODYS if moment is None else moment
    current = moment


def now() -> Generation:
    """The moment of what is tagged now."""
    return current


def is_over(moment: Generation) -> bool:
    """Whether a backward has gone through a moment's forward, and is over."""
    parent = moment.parent
    return not moment.alive if parent is None else parent.reached and not parent.alive


def is_past(moment: Generation | None) -> bool:
    """Whether a moment is of an earlier batch of the engine that tags now."""
    if not isinstance(moment, Generation) or moment is current or moment.owner not in (current.owner, LOADERS):
        return False  # (the present one may be over, where norms have a part of its forward computed again)
    return is_over(moment)


def is_forgotten(moment: Generation | None, layout: Any) -> bool:
    """Whether a tensor with this layout was made of inputs and labels, beside a forward that is over and that no
    backward went through: of unseen origin again. If one goes through both forwards yet, `doubts` tells."""
    parent = moment.parent if isinstance(moment, Generation) else None
    if parent is None or parent.reached or parent is current or moment is current:
        return False
    here = current.parent or current
    if parent.alive and not layout.plain:
        here.doubts[parent] = layout.mixed or "rows of the batch were moved"
    return True
