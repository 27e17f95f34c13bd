"""Checks of device values that a later step reads, as reading them now would wait for the device.

Until then the answer works where it lies: a batch that is refused gets the clip factor 0 on the device (`withhold`), so
that a step which is refused a step later was one of noise alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FastDPError, SampleMixingError
from ..ops.common import event_on, streams_of
from ..ops.registry import is_watched


class DeferredCheck(NamedTuple):
    """If the flag (a bool on a device) is true, samples were mixed, for this reason (or another error is raised);
    message: what to say then."""

    flag: Tensor
    why: str
    message: str
    error: type[FastDPError] = SampleMixingError

    def problem(self, more: str = "") -> FastDPError:
        """What to raise."""
        found = self.error(self.message + more)
        if isinstance(found, SampleMixingError):
            found.mixed = self.why
        return found


MOST = 4096  # questions that wait for an engine: of more those are dropped that have a harmless answer


class Inbox:
    """The open questions of one engine. Every engine hears of all: one backward may go through several models."""

    def __init__(self) -> None:
        self._open: list[DeferredCheck] = []
        _INBOXES.add(self)

    def put(self, doubt: DeferredCheck) -> None:
        """Keep a question."""
        self._open.append(doubt)
        if len(self._open) > MOST:
            self._open = [one for one, mixes in zip(self._open, answers(self._open), strict=True) if mixes]

    def take(self) -> list[DeferredCheck]:
        """The questions so far, which are then the caller's."""
        found, self._open = self._open, []
        return found


_INBOXES: weakref.WeakSet[Inbox] = weakref.WeakSet()


def doubt(flag: Tensor, why: str, message: str = "") -> None:
    """If the flag (a bool on a device) is true, the backward that runs or follows mixes samples, for this reason.

    message: of the error, if not the loss is to blame. While a step is recorded it is read at once, so that replays
    read it too.
    """
    one = DeferredCheck(flag, why, message or f"the loss is no sum or mean of each sample's own loss: {why}.")
    if is_watched():
        if bool(flag):
            raise SampleMixingError(one.message, why)
        return
    for inbox in list(_INBOXES):
        inbox.put(one)


def answers(doubts: list[DeferredCheck]) -> list[bool]:
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


def settle(doubts: list[DeferredCheck], more: str = "") -> None:
    """Read the flags. Raises the error of one that is true. more: what it says at the end."""
    for one, mixes in zip(doubts, answers(doubts), strict=True):
        if mixes:
            raise one.problem(more)


def withhold(doubts: Sequence[DeferredCheck], factors: Sequence[Tensor], *sums: Mapping[int, Tensor]) -> None:
    """Set clip factors, and sums that were taken already, to 0 where a flag on a device is true."""
    for flag in (one.flag for one in doubts if one.flag.device.type != "cpu"):
        for tensor in (*factors, *(total for taken in sums for total in taken.values())):
            tensor.masked_fill_(flag.reshape(()).to(tensor.device), 0)


class AwaitedChecks:
    """Flags of earlier steps, on their way from a device to the host. later: whether those on a device may wait."""

    def __init__(self, later: bool) -> None:
        self._later = later
        self._open: list[tuple[list[DeferredCheck], Tensor, Any]] = []

    def settle(self, doubts: Sequence[DeferredCheck]) -> None:
        """Read what has arrived of earlier steps, and the flags of this one, or ask for those that may wait.

        Raises the error of one that is true.
        """
        self.look()
        self.add(doubts)

    def add(self, doubts: Sequence[DeferredCheck]) -> None:
        """The same, but for earlier steps: what has arrived of these may differ between processes."""
        settle([one for one in doubts if not self._later or one.flag.device.type == "cpu"], _NOTHING)
        self._ask([one for one in doubts if self._later and one.flag.device.type != "cpu"])

    def _ask(self, doubts: list[DeferredCheck]) -> None:
        """Copy these flags to the host, once the device has come to them."""
        for device in {one.flag.device for one in doubts}:
            own = [one for one in doubts if one.flag.device == device]
            flags = torch.stack([one.flag.reshape(()) for one in own])
            late = streams_of(device) is not None  # else nothing could tell when the copy is done
            host = torch.empty(len(own), dtype=flags.dtype, pin_memory=late)
            host.copy_(flags, non_blocking=late)
            self._open.append((own, host, event_on(device)))

    def look(self, wait: bool = False) -> None:
        """Read what has arrived. Raises the error of a flag that is true. wait: for all of them."""
        while self._open:
            doubts, host, event = self._open[0]
            if event is not None and not event.query():
                if not wait and len(self._open) < _LATEST:
                    return
                event.synchronize()
            del self._open[0]
            for one, mixes in zip(doubts, host.tolist(), strict=True):
                if mixes:
                    raise one.problem(_LATE)


_LATEST = 8  # steps that the host runs ahead of a device, at most
_NOTHING = " Nothing of this step was released."
_LATE = (
    " (The device told so behind the step. That step was made without this batch's gradients: of noise alone, which is "
    "accounted for.)"
)
