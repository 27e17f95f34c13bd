"""Ends the other processes' waits if one leaves a forward or backward by an error.

A process that waits within a collective can look at nothing. So it is the one with the error that acts: it says what
happened in the store of the process group, and closes its connections of the groups over which the model lies. That
ends every wait for it, as its death would; whoever is woken finds the words in the store, raises them, and closes its
own connections in turn, as others may wait for it. No thread runs, and a step in which nothing fails sends nothing.

All processes may have met the same error at the same place (a batch size that fits nowhere). Then nobody waits, and
nothing must be closed: so the first one gives the others `PATIENCE` seconds to leave by an error, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import errors
from ..errors import FastDPError, StepError
from .private_names import collectives_so_far, store_of_world
from .world import Ranks, World, is_told, told

PATIENCE = 3.0  # seconds
TEXT = 2000  # letters of an error
_SEEN = "_fastdp_alarm_was_given"  # on errors
_ALARMS: weakref.WeakSet[FailureSignal] = weakref.WeakSet()
_ALL = "all"  # the verdict that all processes have left, so that nobody waits


class FailureSignal:
    """Of a model on several processes. groups: over which its parts lie; none of whole copies, whose forwards and
    backwards wait for nobody. All processes must make it together, after an `agree`, which makes its name the same."""

    def __init__(self, world: Ranks, groups: Sequence[Any]) -> None:
        self.world, self.over = world, False
        self.groups = list({id(g): g for g in groups if g is not None and dist.get_world_size(g) > 1}.values())
        self._process, self._of = os.getpid(), dist.group.WORLD
        self._store: Any = store_of_world() if self.groups else None
        self._name = f"fastdp alarm {world.messages()}"
        self._event, self._out = 0, False
        world.heard, world.explained = self.leaves, self.explained
        _ALARMS.add(self)
        _install()

    # ------------------------------------------------------------------ this process has an error

    def raised(self, error: BaseException, at_once: bool = False) -> None:
        """A forward or backward, or what gives it data, ends by this error. Returns once nobody waits for this process.

        The text of an error of torch's is replaced by what another process has said, if one has."""
        if not self._is_live() or vars(error).get(_SEEN):
            return
        vars(error)[_SEEN], was_over = True, self.over
        if is_told(error):
            self.leaves()
            return
        why = f"rank {self.world.rank} raised {type(error).__name__}: {error}"[:TEXT]
        with contextlib.suppress(dist.DistError):  # else the store is gone with its process: connections are closed
            if not self._verdict() and self._all_leave(why, 0.0 if at_once else PATIENCE):
                return
            why = self._verdict() or why
        if why.startswith(f"rank {self.world.rank} "):
            self._stop(why, error)
        else:
            self._stop(why, _error(why))
            if not isinstance(error, FastDPError):
                error.args = (f"{_because(why)} Here: {error}", *error.args[1:])
        if not was_over:
            self._wait_for_leavers(PATIENCE)

    def ends(self, error: BaseException) -> None:
        """This process ends by an error that nobody has caught."""
        if not self._is_live() or vars(error).get(_SEEN) or is_told(error):
            return
        if self.groups:
            self.raised(error, at_once=True)
        else:
            self.world.refuse(error)
        self.world.heard_by_all(PATIENCE)

    def _all_leave(self, why: str, patience: float) -> bool:
        """Wait for the other processes. Whether all have left, at the same place, so that training may go on."""
        place = [collectives_so_far(group) for group in self.groups]
        self._store.set(f"{self._name}/{self._event}/{self.world.rank}", json.dumps(place))
        self.leaves()
        self._wait_for_leavers(patience, heeds=True)
        if self._decide(_ALL if self._left() == self.world.size else why) != _ALL:
            return False
        names = [f"{self._name}/{self._event}/{rank}" for rank in range(self.world.size)]
        same = None not in place and all(
            self._store.check([name]) and json.loads(self._store.get(name)) == place for name in names
        )
        self._event, self._out = self._event + 1, False
        if not same:
            self._decide(why)
        return same

    # ------------------------------------------------------------------ another process has one

    def explained(self, problem: BaseException) -> BaseException:
        """What to raise where a collective of the model's parts raises this."""
        if not self._is_live() or isinstance(problem, FastDPError):
            return problem
        with contextlib.suppress(dist.DistError):
            if why := self._verdict():
                found = _error(why)
                self._stop(why, _error(why))
                vars(found)[_SEEN] = True
                return told(found)
        return problem

    def _stop(self, why: str, error: BaseException) -> None:
        """Training has ended, on all processes."""
        self.over = True
        self.world.refuse(error)  # those who wait in an exchange of fastdp's own wait for this process, too
        self.leaves()
        self._close()

    def leaves(self) -> None:
        """This process waits for nobody: it raises an error."""
        if self._store is not None and not self._out and self._is_live():
            self._out = True
            with contextlib.suppress(dist.DistError):
                self._store.add(f"{self._name}/{self._event}/left", 1)

    # ------------------------------------------------------------------ the store and the connections

    def _is_live(self) -> bool:
        """Not in a process that was forked off this one, nor after the process group has gone."""
        return os.getpid() == self._process and dist.is_initialized() and self._of is dist.group.WORLD

    def _left(self) -> int:
        return 0 if self._store is None else int(self._store.add(f"{self._name}/{self._event}/left", 0))

    def _verdict(self) -> str:
        name = f"{self._name}/{self._event}/verdict"
        return self._store.get(name).decode() if self._store is not None and self._store.check([name]) else ""

    def _decide(self, why: str) -> str:
        """The first verdict stands."""
        found = self._store.compare_set(f"{self._name}/{self._event}/verdict", "", why)
        return found.decode() if isinstance(found, bytes) else str(found)

    def _wait_for_leavers(self, patience: float, heeds: bool = False) -> None:
        """Until all processes have left. heeds: or until there is a verdict."""
        end = time.monotonic() + patience
        with contextlib.suppress(dist.DistError):
            while self._left() < self.world.size and time.monotonic() < end and not (heeds and self._verdict()):
                time.sleep(max(0.005, self.world.size / 5000))  # a thousand processes ask one store

    def _close(self) -> None:
        """Close gloo's connections of the model's groups: a receive that runs out of time does, for all of a group."""
        for group in self.groups:
            others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
            with contextlib.suppress(RuntimeError, ValueError), torch._C.DisableTorchFunction():
                work = dist.irecv(torch.empty(1), src=others[0], group=group, tag=0xFA57)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    # ------------------------------------------------------------------ on a model and off it

    def watch(self, model: nn.Module, raised: Callable[[BaseException], None]) -> Callable[[], None]:
        """Call a function with every error that leaves the model's forward; returns what ends that."""
        outer: list[BaseException | None] = []  # that the caller is handling
        called = weakref.WeakMethod(raised)  # type: ignore[type-var]

        def begins(module: nn.Module, args: Any) -> None:
            outer[:] = [sys.exc_info()[1]]

        def ends(module: nn.Module, args: Any, out: Any) -> None:
            error, tell = sys.exc_info()[1], called()
            if out is None and error is not None and tell is not None and all(error is not other for other in outer):
                tell(error)
            outer.clear()

        for hook in (begins, ends):
            vars(hook).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=None)
        before = model.register_forward_pre_hook(begins)
        after = model.register_forward_hook(ends, always_call=True)

        def remove() -> None:
            before.remove()
            after.remove()

        return remove

    def close(self) -> None:
        """The optimizer is taken off its model."""
        _ALARMS.discard(self)


def failure_signal_of(world: World, groups: Sequence[Any]) -> FailureSignal | None:
    """An alarm of several processes; None of one."""
    return FailureSignal(world, groups) if isinstance(world, Ranks) and world.size > 1 else None


def data_failed(error: BaseException) -> None:
    """A loader raises an error on this process: others wait in the forward that does not come, of models in parts."""
    for alarm in list(_ALARMS):
        if alarm.groups:
            alarm.raised(error)


def signals_failure(batches: Iterator[Any]) -> Iterator[Any]:
    """These batches. What raises an error there, is said."""
    try:
        yield from batches
    except Exception as error:
        data_failed(error)
        raise


def _because(why: str) -> str:
    return f"{why}. So no rank makes a step, and what waited for that rank was ended."


def _error(why: str) -> FastDPError:
    kind = getattr(errors, why.split(": ")[0].split(" ")[-1], None)
    known = kind if isinstance(kind, type) and issubclass(kind, FastDPError) else StepError
    return known(_because(why))


# ---------------------------------------------------------------------- errors that end the process

_BEFORE: list[Any] = []  # the hook that was there


def _install() -> None:
    if not _BEFORE:
        _BEFORE.append(sys.excepthook)
        sys.excepthook = _uncaught


def _uncaught(kind: Any, error: Any, trace: Any) -> None:
    """The process is about to end, or to hang on its way there."""
    _BEFORE[0](kind, error, trace)
    for alarm in list(_ALARMS):
        with contextlib.suppress(Exception):
            alarm.ends(error)
