"""Questions about values on a device, which are asked when the step is released: reading them now would wait for it."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SampleMixingError


class Doubt(NamedTuple):
    """If the flag (a bool on a device) is true, samples were mixed, for this reason; message: what to say then."""

    flag: Tensor
    why: str
    message: str


MOST = 4096  # questions that wait for an engine: of more those are dropped that have a harmless answer


class Inbox:
    """The open questions of one engine. Every engine hears of all: one backward may go through several models."""

    def __init__(self) -> None:
        self._open: list[Doubt] = []
        _INBOXES.add(self)

    def put(self, doubt: Doubt) -> None:
        """Keep a question."""
        self._open.append(doubt)
        if len(self._open) > MOST:
            self._open = [one for one, mixes in zip(self._open, answers(self._open), strict=True) if mixes]

    def take(self) -> list[Doubt]:
        """The questions so far, which are then the caller's."""
        found, self._open = self._open, []
        return found


_INBOXES: weakref.WeakSet[Inbox] = weakref.WeakSet()


def doubt(flag: Tensor, why: str, message: str = "") -> None:
    """If the flag (a bool on a device) is true, the backward that runs or follows mixes samples, for this reason.

    message: of the error, if not the loss is to blame.
    """
    one = Doubt(flag, why, message or f"the loss is no sum or mean of each sample's own loss: {why}.")
    for inbox in list(_INBOXES):
        inbox.put(one)


def answers(doubts: list[Doubt]) -> list[bool]:
    """Whether each flag is true; those of a device are read at once."""
    by_device: dict[torch.device, list[int]] = {}
    for place, one in enumerate(doubts):
        by_device.setdefault(one.flag.device, []).append(place)
    found = [False] * len(doubts)
    for places in by_device.values():
        flags = torch.stack([doubts[place].flag.reshape(()) for place in places]).tolist()
        for place, flag in zip(places, flags, strict=True):
            found[place] = bool(flag)
    return found


def settle(doubts: list[Doubt]) -> None:
    """Read the flags. Raises SampleMixingError if one is true."""
    for one, mixes in zip(doubts, answers(doubts), strict=True):
        if mixes:
            raise SampleMixingError(one.message, one.why)
