"""Copies and pickles of private optimizers."""

from __future__ import annotations

import copy
from typing import Any


class Copied:
    """What an optimizer keeps to itself when it is copied: its noise, which two must not share.

    torch's Optimizer copies groups and state alone, and its `__setstate__` patches the class's step, so that after a
    copy was tried no optimizer of the class would step.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_noise": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Draws from the same generator as this one: from a copy of it both would draw the same noise."""
        generator = self.__dict__.get("generator")
        memo[id(generator)] = generator
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made
