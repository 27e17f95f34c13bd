"""The small kept gradients of many parameters (biases, norm layers) as one matrix: few operations, not hundreds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.rows import square_sum, weighted_sum
from ..uses.links import link_of
from ..uses.timing import Clock
from ..uses.use import Stored, Use

SMALL = 1 << 14  # elements of a parameter; larger ones are not worth a copy


def is_small(use: Use, parameter: Tensor) -> bool:
    """Whether the use keeps a few float32 numbers of each sample, of the parameter itself."""
    return (
        isinstance(use, Stored)
        and use.operand is parameter
        and parameter.numel() <= SMALL
        and use.grads.dtype == torch.float32
        and link_of(parameter) is None
    )


class Bundle:
    """Per-sample gradients [B, n] of several parameters, side by side."""

    def __init__(self, members: Sequence[tuple[Tensor, Use]]) -> None:
        self.members = {id(parameter): parameter for parameter, _ in members}
        self.clock: Clock | None = None
        if members[0][1].clock is not None:
            self.clock = Clock(members[0][0].device, len(members))
            for _, use in members:
                use.clock = self.clock
        rows = [use.grads.reshape(use.batch, -1) for _, use in members if isinstance(use, Stored)]
        self.grads = torch.cat([r.to(rows[0].device) for r in rows], 1)

    def norm_sq(self) -> Tensor:
        """[B] float64, all members together."""
        return square_sum(self.grads)

    def clipped_sum(self, factors: Tensor) -> dict[int, Tensor]:
        """{id(parameter): sum_b factors_b gradient_b}, each in memory of its own: they become `.grad`, which users may
        save (with all of its storage) or resize."""
        total = weighted_sum(self.grads, factors.to(self.grads.device))
        sizes = [p.numel() for p in self.members.values()]
        parts: tuple[Tensor, ...] = torch.split_with_sizes_copy(total, sizes)  # type: ignore[assignment, func-returns-value]
        return {
            key: part.view(p.shape).to(p.device) for (key, p), part in zip(self.members.items(), parts, strict=True)
        }
