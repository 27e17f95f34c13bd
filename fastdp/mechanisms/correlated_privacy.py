"""The privacy of runs with correlated noise: a block of it is one Gaussian mechanism."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..accounting import History, epsilon_of
from ..accounting.participation import Block
from ..errors import AccountingError
from .sensitivity import sensitivity
from .strategies import Strategy


def epsilon_of_blocks(strategy: Strategy, blocks: Iterable[Block], delta: float, accountant: str = "prv") -> float:
    """Compute the epsilon at delta of blocks of correlated noise."""
    history: History = []
    for block in blocks:
        if block.participation.kind not in ("fixed order", "separated"):
            raise AccountingError(f"no accounting yet for {block.participation.kind}")
        bound = sensitivity(strategy, block.steps, block.participation, block.first)
        if block.noise_multiplier == 0:
            return math.inf
        history.append((block.noise_multiplier / bound, 1.0, 1))
    return epsilon_of(history, delta, accountant)
