"""The privacy of runs with correlated noise: a block of it is one Gaussian mechanism."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ..accounting import epsilon_of
from ..accounting.participation import Participation
from ..errors import AccountingError
from .sensitivity import sensitivity
from .strategies import Strategy


class Block(NamedTuple):
    """Steps whose noise is correlated. A restart begins another block, which is independent of all before.

    Attributes:
        name: that no other block has.
        noise_multiplier: s over the clipping norm.
        steps: of the block.
        participation: what the loader promised.
        first: the step of a cycle at which the block began; None if it is not known, which costs a little privacy.
    """

    name: str
    noise_multiplier: float
    steps: int
    participation: Participation
    first: int | None = None


def epsilon_of_blocks(strategy: Strategy, blocks: Iterable[Block], delta: float, accountant: str = "prv") -> float:
    """Compute the epsilon at delta of blocks of correlated noise."""
    history = []
    for block in blocks:
        if block.participation.kind not in ("fixed order", "separated"):
            raise AccountingError(f"no accounting yet for {block.participation.kind}")
        bound = sensitivity(strategy, block.steps, block.participation, block.first)
        if block.noise_multiplier == 0:
            return math.inf
        history.append((block.noise_multiplier / bound, 1.0, 1))
    return epsilon_of(history, delta, accountant)
