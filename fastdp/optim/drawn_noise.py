"""Noise whose key was handed out (`noise_state`) may be drawn again, but only for the sums that it was drawn for.

The same noise on two sums shows their difference; on one sum, but of another deviation, it shows the sum.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed.fingerprints import place_of_noise
from ..errors import StepError
from .fused_update import Release
from .private_step import PrivateStep

_AGAIN = (
    "the noise of this step was drawn before in this process, for other sums or with another deviation: from both "
    "releases together, the noise could be taken off. load_noise_state is for the same steps on the same data (with "
    "the loader's state_dict(secret=True)). No step was made: make a new optimizer, and load state_dict() alone"
)
_TENSORS = _NUMBERS = 8  # of the sums, and of each of them: what is looked at
_ALIKE = 1e-3  # share by which sums over the same batch may differ: they are rounded otherwise on another route
_MOST = 1 << 14  # steps that are remembered
_DRAWN: OrderedDict[tuple[str, int], _Drawn] = OrderedDict()  # by a mark of the key, and the number of the step


class _Drawn(NamedTuple):
    """What noise was drawn for. some: a few numbers of the sums, float64."""

    std: float
    earlier: Sequence[tuple[int, float]]
    some: Tensor

    def is_like(self, other: _Drawn) -> bool:
        if not math.isclose(self.std, other.std, rel_tol=1e-6) or self.earlier != other.earlier:
            return False
        if self.some.shape != other.some.shape:
            return False
        mine, others = self.some.cpu(), other.some.cpu()
        return float((mine - others).norm()) <= _ALIKE * float(torch.maximum(mine.norm(), others.norm()))


def checked(release: Release, privacy: PrivateStep) -> Release:
    """The release, before its noise is drawn. Raises StepError, and drops the sums, if it was drawn for others."""
    noise = release.noise
    place = place_of_noise(noise)
    if not noise.handed_out or place is None or release.std == 0:
        return release
    now = _Drawn(release.std, tuple(release.earlier), _some_of(list(release.sums.values())))
    before = _DRAWN.get(place)
    if before is not None and not now.is_like(before):
        privacy.discard()
        raise StepError(_AGAIN)
    _DRAWN[place] = now
    if len(_DRAWN) > _MOST:
        _DRAWN.popitem(last=False)
    return release


def _some_of(sums: list[Tensor]) -> Tensor:
    parts = []
    for total in sums[:: -(-len(sums) // _TENSORS)]:
        flat = total.detach().reshape(-1)
        parts.append(flat[:: max(1, flat.numel() // _NUMBERS)][:_NUMBERS].double().to(sums[0].device))
    return torch.cat(parts)
