"""What is known of the forwards of one shape: how often they are met, which sizes are recorded, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..errors import GraphError
from ..graphs.forward_program import ForwardProgram, Outputs

CHANGES = 3  # times, at most, that a shape is recorded anew as the loss takes other outputs, or for one change
_ENOUGH = 2  # a size is recorded when it is met that often
_FILLED = 0.75  # of a recorded size, at least, so that its padding is worth less than a recording of its own


class Shape:
    """Forwards whose arguments differ in the number of samples alone.

    met: how often, by the number of samples; programs: their recordings; noted: what the last forward by Python gave;
    example: the same, of the last through which a backward went; exactly: batches of other sizes are not to be padded;
    due: makes a recording that had to wait; refused: why there is none; changes: of the model, for which no recording
    served; again: how often the loss took other outputs than before.
    """

    def __init__(self) -> None:
        self.met = Counter[int]()
        self.noted: Outputs | None = None
        self.example: Outputs | None = None
        self.programs: list[ForwardProgram] = []
        self.exactly = False
        self.refused = ""
        self.waited, self.patience = 0, 64  # forwards since, and how many until it is tried again
        self.due: Callable[[], ForwardProgram] | None = None
        self.changes = Counter[str]()
        self.again = 0

    def fitting(self, samples: int) -> ForwardProgram | None:
        """A recording that serves. Raises GraphError where the model changes again and again."""
        changed = ""
        for program in self.programs:
            size = program.batch.size
            if size == samples or (not program.only and size > samples >= _FILLED * size):
                changed = program.guards.changed()
                if not changed:
                    return program
        if changed:
            self.changes[changed] += 1
            if self.changes[changed] > CHANGES:
                self.refused = f"{changed} again and again"
                raise GraphError(self.refused)
        return None

    def size_to_record(self, samples: int) -> int:
        """The size that is worth a recording as a batch of so many samples comes; 0 if none is yet."""
        self.met[samples] += 1
        if self.met[samples] >= _ENOUGH:
            return samples
        size = bucket(samples)
        close = sum(count for number, count in self.met.items() if bucket(number) == size)
        return 0 if self.exactly or close < 2 * _ENOUGH else size

    def is_refused(self) -> bool:
        """Whether it is not to be recorded now: what was in the way may be gone after a while."""
        if not self.refused:
            return False
        self.waited += 1
        if self.waited < self.patience:
            return True
        self.refused, self.waited, self.patience = "", 0, 2 * self.patience
        return False


def bucket(samples: int) -> int:
    """The size that is recorded for batches of so many samples: of three significant bits, at least these."""
    step = 1 << max(samples.bit_length() - 4, 0)
    return -(-samples // step) * step
