"""What is known of the forwards of one shape: how often they are met, which sizes are recorded, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..errors import GraphError
from ..graphs.forward_program import ForwardProgram, Outputs

CHANGES = 3  # times, at most, that a shape is recorded anew as the loss takes other outputs, or for one change
_MISSES = 8  # in a row, of replays in which Python decides another way: then a buffer has changed, perhaps
_FORWARDS = 4  # before one backward, of which it is noted what they gave
_ENOUGH = 2  # a size is recorded when it is met that often
_SIZES = 64  # of which it is counted how often they are met
_FILLED = 0.75  # of a recorded size, at least, so that its padding is worth less than a recording of its own


class Shape:
    """Forwards whose arguments differ in the number of samples alone.

    met: how often no recording served, by the number of samples; programs: the recordings; noted: what the last
    forwards by Python gave, until a backward; example: the same, of the last through which a backward went; exactly:
    batches of other sizes are not to be padded; due: makes a recording that had to wait; refused: why there is none;
    changes: of the model, for which it was recorded anew; again: how often the loss took other outputs than before;
    misses: replays in a row in which Python decided another way; changed: what is another of the model now.
    """

    def __init__(self) -> None:
        self.met = Counter[int]()
        self.noted: list[Outputs] = []
        self.example: Outputs | None = None
        self.programs: list[ForwardProgram] = []
        self.exactly = False
        self.refused = ""
        self.waited, self.patience = 0, 64  # forwards since, and how many until it is tried again
        self.due: Callable[[], ForwardProgram] | None = None
        self.changes, self.changed = Counter[str](), ""
        self.again = self.misses = 0

    def note(self, given: Outputs) -> None:
        """Python's forward gave these. Of those before it no tensors are held."""
        for earlier in self.noted:
            earlier.let_go()
        self.noted = [*self.noted, given][-_FORWARDS:]

    def missed(self) -> None:
        """A replay found that Python decides another way: after some in a row, record anew."""
        self.misses += 1
        if self.misses == _MISSES and self.changes["decisions"] < CHANGES:
            self.misses, self.programs = 0, []
            self.changes["decisions"] += 1

    def fitting(self, samples: int) -> ForwardProgram | None:
        """A recording that serves. Raises GraphError where the model changes again and again."""
        changed = ""
        for program in self.programs:
            if program.batch.size == samples or (not program.only and _serves(program.batch.size, samples)):
                changed = program.guards.changed()
                if not changed:
                    return program
        self.changed = changed
        if changed and self.changes[changed] >= CHANGES:
            self.refused = f"{changed} again and again (what changes at every step, give the forward as an argument)"
            raise GraphError(self.refused)
        return None

    def size_to_record(self, samples: int) -> int:
        """The size to record as a batch of so many samples comes, the one that would have served most forwards; 0 if
        that is none yet, or not of this batch."""
        self.met[samples] += 1
        if len(self.met) > _SIZES:
            self.met = Counter(dict(self.met.most_common(_SIZES // 2)))
        if self.exactly:
            return samples if self.met[samples] >= _ENOUGH else 0
        served = {size: [number for number in self.met if _serves(size, number)] for size in self.met}
        forwards = {size: sum(self.met[number] for number in numbers) for size, numbers in served.items()}
        best = max(self.met, key=lambda size: (forwards[size], size))
        if not _serves(best, samples) or (self.met[samples] < _ENOUGH and forwards[best] < 2 * _ENOUGH):
            return 0
        return best if len(served[best]) < 3 else bucket(best)  # of sizes at random larger ones are to come

    def recorded(self, program: ForwardProgram) -> None:
        """Take a recording, and count anew what it does not serve."""
        self.changes.update([self.changed] if self.changed else ())
        self.exactly = self.exactly or bool(program.only)
        self.programs = sorted([*self.programs, program], key=lambda each: each.batch.size)
        if not self.exactly:
            self.met = Counter({size: n for size, n in self.met.items() if not _serves(program.batch.size, size)})

    def is_refused(self) -> bool:
        """Whether it is not to be recorded now: what was in the way may be gone after a while."""
        if not self.refused:
            return False
        self.waited += 1
        if self.waited < self.patience:
            return True
        self.refused, self.waited, self.patience = "", 0, 2 * self.patience
        return False


def _serves(size: int, samples: int) -> bool:
    """Whether a recording of this size takes so many samples, with padding."""
    return size >= samples >= _FILLED * size


def bucket(samples: int) -> int:
    """The size that is recorded for batches of so many samples: of three significant bits, at least these."""
    step = 1 << max(samples.bit_length() - 4, 0)
    return -(-samples // step) * step
