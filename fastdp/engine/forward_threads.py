"""Forwards of one model in several threads.

A thread may evaluate the model (without grad) while another trains it: what belongs to a forward that runs is kept by
thread. Forwards with grad are the engine's, and take their turn: one that begins while another thread's runs, or while
a backward does, would be taken for a part of it.
"""

from __future__ import annotations

import threading

from ..errors import StepError

_REMEDY = (
    "Evaluate in threads under torch.no_grad() or torch.inference_mode(), which may run at any time; train in one "
    "thread; or give the other thread a copy of the model that has no engine."
)


class Turn:
    """Whose turn it is to run a forward with grad."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None

    def take(self, backward: int | None) -> None:
        """A forward begins. backward: thread of the forwards through which a backward runs. Raises StepError."""
        me = threading.get_ident()
        with self._lock:
            if self._thread not in (None, me) and any(t.ident == self._thread for t in threading.enumerate()):
                raise StepError(
                    "the model was called with grad while its forward runs in another thread: fastdp cannot tell the "
                    f"two batches apart. {_REMEDY}"
                )
            if backward not in (None, me):
                raise StepError(
                    "the model was called with grad while a backward through it runs in another thread (or has failed "
                    f"there, and no forward followed in that thread). {_REMEDY}"
                )
            self._thread = me

    def give(self) -> None:
        """The forward of this thread has ended."""
        if self._thread == threading.get_ident():
            self._thread = None


def two_backwards() -> StepError:
    """What to say where a backward goes through the forwards of two threads."""
    return StepError(
        "one backward goes through forwards of two threads, or two threads run backward through the model at a time: "
        f"their samples would be clipped as those of one batch. {_REMEDY}"
    )
