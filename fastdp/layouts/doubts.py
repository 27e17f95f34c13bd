"""Questions about values on a device, which are asked when the step is released: reading them now would wait for it."""

from __future__ import annotations

from torch import Tensor

from ..errors import SampleMixingError

_OPEN: list[tuple[Tensor, str]] = []


def doubt(flag: Tensor, why: str) -> None:
    """If the flag (a bool on a device) is true, the backward to follow mixes samples, for this reason."""
    _OPEN.append((flag, why))


def take() -> list[tuple[Tensor, str]]:
    """The open questions, which are then the caller's."""
    found = list(_OPEN)
    _OPEN.clear()
    return found


def settle(doubts: list[tuple[Tensor, str]]) -> None:
    """Read the flags. Raises SampleMixingError if one is true."""
    for flag, why in doubts:
        if bool(flag):
            raise SampleMixingError(f"the loss is no sum or mean of each sample's own loss: {why}.", why)
