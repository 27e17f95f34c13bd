"""Questions about values on a device, which are asked when the step is released: reading them now would wait for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SampleMixingError


class Doubt(NamedTuple):
    """If the flag (a bool on a device) is true, samples were mixed, for this reason; message: what to say then."""

    flag: Tensor
    why: str
    message: str


_OPEN: list[Doubt] = []


def doubt(flag: Tensor, why: str, message: str = "") -> None:
    """If the flag (a bool on a device) is true, the backward that runs or follows mixes samples, for this reason.

    message: of the error, if not the loss is to blame.
    """
    _OPEN.append(Doubt(flag, why, message or f"the loss is no sum or mean of each sample's own loss: {why}."))


def take() -> list[Doubt]:
    """The open questions, which are then the caller's."""
    found = list(_OPEN)
    _OPEN.clear()
    return found


def settle(doubts: list[Doubt]) -> None:
    """Read the flags, those of a device at once. Raises SampleMixingError if one is true."""
    by_device: dict[torch.device, list[Doubt]] = {}
    for one in doubts:
        by_device.setdefault(one.flag.device, []).append(one)
    for together in by_device.values():
        flags = torch.stack([one.flag.reshape(()) for one in together]).tolist()
        for one, mixes in zip(together, flags, strict=True):
            if mixes:
                raise SampleMixingError(one.message, one.why)
