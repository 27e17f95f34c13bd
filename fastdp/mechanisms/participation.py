"""What trees of noise cost: how many noisy nodes a record's gradients are under, and the epsilon of that.

A record is in one batch of each pass, and a tree is at most one pass long, so a record takes part in a tree at most
once. Its clipped gradient, of norm at most R, is in those nodes of the tree that cover its step: at most one of each
height, so at most as many as the number of the tree's steps has binary digits. Each node has independent Gaussian noise
of standard deviation sigma R. For this record, a tree is therefore no more than so many Gaussian mechanisms without
sampling, chosen one after the other, and trees compose likewise. The RDP of h nodes is h alpha / (2 sigma^2).

The neighbouring relation is that a record's gradients are left out (its place in its batch stays empty): with a fixed
order, to take the record out would move all others. If a record is replaced by another, sensitivity is twice as large:
compute epsilon with half of the noise multiplier.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..accounting import History, epsilon_of, noise_multiplier_for
from ..errors import AccountingError


class Tree(NamedTuple):
    """Steps of one pass whose noise is of one tree.

    Attributes:
        name: that no other tree has.
        noise_multiplier: the standard deviation of a node's noise over the sensitivity.
        first: the step of the pass at which the tree began.
        steps: its leaves.
    """

    name: str
    noise_multiplier: float
    first: int
    steps: int


def nodes_over(steps: int) -> int:
    """Return the largest number of noisy nodes that one step of a tree is under: the binary digits of its steps.

    >>> nodes_over(1), nodes_over(7), nodes_over(8)
    (1, 3, 4)
    """
    return steps.bit_length()


def runs_of(trees: Iterable[Tree]) -> History:
    """Return the Gaussian mechanisms that the batch which took part the most is under, as a history for `epsilon_of`.

    Args:
        trees: all trees of the run. Batches are the same in every pass, in the same order.
    """
    counts = Counter((tree.noise_multiplier, tree.first, tree.steps) for tree in trees)
    worst, most = Counter[float](), -1.0
    for place in {first for _, first, _ in counts}:  # a batch that took part the most is at the beginning of a tree
        found: Counter[float] = Counter()
        for (sigma, first, steps), times in counts.items():
            if first <= place < first + steps:
                found[sigma] += times * nodes_over(steps)
        cost = sum(nodes / sigma**2 if sigma else math.inf for sigma, nodes in found.items())
        if cost > most:
            worst, most = found, cost
    return [(sigma, 1.0, nodes) for sigma, nodes in worst.items()]


def tree_epsilon(
    *, noise_multiplier: float, steps_per_epoch: int, epochs: int, delta: float, accountant: str = "prv"
) -> float:
    """Compute the epsilon at delta of DP-FTRL whose tree is restarted at every epoch.

    Args:
        noise_multiplier: sigma, of a node of the tree.
        steps_per_epoch: the number of batches, each of which is trained on once an epoch.
        epochs: the number of trees.
        delta: in (0, 1).
        accountant: "prv", "rdp" or "gdp", as of `fastdp.accounting.epsilon_of`; nothing is sampled, so "rdp" and "gdp"
            are upper bounds here.

    Raises:
        AccountingError: if an argument is invalid.
    """
    _check(steps_per_epoch, epochs)
    return epsilon_of([(noise_multiplier, 1.0, epochs * nodes_over(steps_per_epoch))], delta, accountant)


def tree_noise_multiplier(
    *, target_epsilon: float, delta: float, steps_per_epoch: int, epochs: int, accountant: str = "prv"
) -> float:
    """Find the smallest noise multiplier of DP-FTRL that spends at most target_epsilon.

    The arguments are those of `tree_epsilon`. Raises AccountingError if one is invalid, or no multiplier suffices.
    """
    _check(steps_per_epoch, epochs)
    return noise_multiplier_for(
        target_epsilon=target_epsilon, delta=delta, sample_rate=1.0, steps=epochs * nodes_over(steps_per_epoch),
        accountant=accountant,
    )  # fmt: skip


def _check(*counts: int) -> None:
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in counts):
        raise AccountingError(f"steps_per_epoch and epochs must be whole numbers of at least 1, not {counts}")
