"""Uses of a fused head whose per-sample gradients are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch_axis.row_groups import Groups
from ..ops import head_sums
from ..ops.rows import square_sum, weighted_sum
from .parameter_use import ParameterUse, Stack, Stored


class HeadGradients(ParameterUse):
    """The gradients of samples [B,V,d] by a head behind which the cross-entropy of tokens stands, each of its own loss;
    scale: how much that counts in the batch's, [B]."""

    route = "kept"

    def __init__(self, operand: Tensor, grads: Tensor, scale: Tensor, name: str) -> None:
        super().__init__(operand, grads.size(0), name)
        self.grads, self.scale = grads, scale.to(grads.dtype)

    def per_sample(self, low: int, high: int) -> Tensor:
        return self.grads[low:high] * self.scale[low:high, None, None]

    def norm_sq(self) -> Tensor:
        return square_sum(self.grads) * self.scale.double().square()

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        return weighted_sum(self.grads, torch.where(factors != 0, factors.to(self.scale.dtype) * self.scale, 0))

    def regroup(self, groups: Groups) -> ParameterUse:
        return Stored(self.operand, groups.sum(self.per_sample(0, self.batch)), self.name)

    def cross_term_and_spread(self, ids: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """The inner product with a look-up of the same table, as `ops.embedding.cross_term_and_spread`."""
        cross, spread = head_sums.cross_term_of_stored(self.grads, ids, e)
        return cross * self.scale, spread * self.scale.abs()


class HeadParts(Stack):
    """The gradients of some samples by a head, stored, before a use by the others."""

    overwrites = True

    def cross_term_and_spread(self, ids: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """Of both, one after the other."""
        sizes = [use.batch for use in self.uses]
        each: Any = zip(self.uses, ids.split(sizes), e.split(sizes), strict=True)
        crosses, spreads = zip(*[use.cross_term_and_spread(own, rows) for use, own, rows in each], strict=True)
        return torch.cat(crosses), torch.cat(spreads)

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        stored, rest = self.uses
        first, second = (part.contiguous() for part in factors.split([stored.batch, rest.batch]))
        return rest.clipped_sum(second, into).add_(stored.clipped_sum(first))
