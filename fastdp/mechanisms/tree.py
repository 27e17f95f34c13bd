"""The noise of tree aggregation: what a step adds is the difference of two prefix sums' noise.

The steps of a tree are its leaves, t = 1, 2, ... An inner node covers 2^l steps and ends at one of them. The sum of the
first t gradients is released with the noise of the nodes that t splits into, as its binary digits say: one node for
each digit that is 1. So a gradient is under the noise of at most as many nodes as the number of steps has digits, and a
prefix sum has the noise of at most so many, where independent noise would add up that of t steps.

With variance reduction, a node's noise is the best mean of its own and of the sum of its two children's: at the height
l its variance is 2^l / (2^(l+1) - 1) of a leaf's, which tends to one half. All nodes of the tree are then used. No
gradient is under more of them than the number of digits, so the bound on privacy is the same.

Source: Dwork et al. 2010, Differential privacy under continual observation; Chan et al. 2011, Private and continual
release of statistics; Honaker 2015, Efficient use of differentially private binary trees (the estimate from below);
Kairouz et al. 2021 (arXiv 2103.00039).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import StepError
from ..ops.noise import Noise, noise_

HEIGHTS = 64  # numbers of the generator that are set aside for the nodes which end at one step


class _Leaf(NamedTuple):
    """A step that is about to end the tree as it stands."""

    first: int  # the step of the run at which the tree began
    number: int  # of the step in the tree, from 1
    kept: dict[int, dict[int, Tensor]]  # {height: {parameter's id: the noise of the node}}, of the step before


class TreeNoise(Noise):
    """A source of tree noise for one training run. The attributes are those of `fastdp.ops.noise.Noise`.

    Args:
        seed: as of `Noise`.
        reduced: whether variance is reduced. Then the noise of up to log2(steps of a tree) + 1 nodes is kept, each as
            large as the parameters; else nothing is kept, and nodes are drawn again when they leave the sum.
    """

    def __init__(self, seed: int | None = None, reduced: bool = True) -> None:
        super().__init__(seed)
        self.reduced = reduced
        self._first, self._leaves = 0, 0  # the step at which the tree began, and its leaves so far
        self._kept: dict[int, dict[int, Tensor]] = {}
        self._of: frozenset[int] = frozenset()  # ids of the parameters that the tree is of
        self._under = b""  # the key that the tree was begun with

    @property
    def leaves(self) -> int:
        """The steps of the present tree; 0 if there is none, or its key is lost (after a fork)."""
        return self._leaves if self.key == self._under else 0

    def end(self) -> None:
        """The next step begins a tree."""
        self._leaves, self._kept = 0, {}

    def add_tree_(self, sums: dict[int, Tensor], offsets: dict[int, int], std: float) -> None:
        """Add what the noise of the prefix sum changes by at this step, in place: std is that of a node.

        The tree goes on if it has leaves, else one begins. Raises StepError if the parameters are not the tree's.

        Args:
            sums: contiguous float32 or float64 tensors, by the ids of the parameters.
            offsets: the global index of each one's first element.
            std: the same at every step of a tree.
        """
        if not self.leaves:
            self.end()
            self._first, self._of, self._under = self.step, frozenset(sums), self.key
        if frozenset(sums) != self._of:
            raise StepError(
                "other parameters are trained than at the beginning of this pass: freeze or unfreeze between passes, "
                "since the noise of a tree is of the same parameters throughout"
            )
        leaf = _Leaf(self._first, self._leaves + 1, self._kept)
        made: dict[int, Tensor] = {}
        for name, total in sums.items():
            if self.reduced:
                made[name] = self._reduced_(total, leaf, name, std, offsets[name])
            else:
                self._plain_(total, leaf, std, offsets[name])
        height = _height(leaf.number)
        if self.reduced:
            self._kept = {**{h: own for h, own in self._kept.items() if h > height}, height: made}
        self._leaves += 1

    def _plain_(self, total: Tensor, leaf: _Leaf, std: float, offset: int) -> None:
        """Each node ends at a step of its own, by which it is drawn, and drawn again when it leaves the sum."""
        if std == 0:
            return
        total += self._draw(total, std, leaf.first + leaf.number, 0, offset)
        end = leaf.number - 1
        for _ in range(_height(leaf.number)):
            total -= self._draw(total, std, leaf.first + end, 0, offset)
            end -= end & -end

    def _reduced_(self, total: Tensor, leaf: _Leaf, name: int, std: float, offset: int) -> Tensor:
        """The new node's noise, which enters the sum; those of the left halves within it leave."""
        end = leaf.first + leaf.number
        node = self._draw(total, std, end, 0, offset)
        variance = 1.0  # of a node's noise, over that of one draw
        for height in range(_height(leaf.number)):
            left = leaf.kept[height][name]
            total -= left
            own = 2 * variance / (2 * variance + 1)  # the weights that make the variance the least
            node = (node + left).mul_(1 - own).add_(self._draw(total, std, end, height + 1, offset), alpha=own)
            variance = own
        total += node
        return node

    def _draw(self, like: Tensor, std: float, end: int, height: int, offset: int) -> Tensor:
        """The own noise of the node of this height that ends at a step of the run."""
        key = hashlib.sha256(b"fastdp tree noise, version 1" + self.key).digest()  # no other noise's stream
        return noise_(torch.empty_like(like), std, key, end * HEIGHTS + height, offset)


def _height(number: int) -> int:
    """Of the highest node that ends at this leaf: the zeros at the end of its binary digits."""
    return (number & -number).bit_length() - 1


def variance_of(leaves: int, reduced: bool = True) -> float:
    """Return the variance of the noise of the sum over the first `leaves` steps of a tree, over that of one node.

    >>> variance_of(7, reduced=False), variance_of(8, reduced=False)
    (3.0, 1.0)
    """
    heights = [height for height in range(leaves.bit_length()) if leaves >> height & 1]
    return sum(2**h / (2 ** (h + 1) - 1) if reduced else 1.0 for h in heights)
