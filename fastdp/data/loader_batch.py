"""Finds the loader's batch that an optimizer's model is given, where several loaders are being iterated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..batch_axis import current_batch
from ..errors import StepError
from . import loop_checks


class LoaderBatch:
    """Knows the loader of one optimizer, and when that was made.

    given_by: the id of the loader of which the model's last inputs are, 0 if they do not show it.
    """

    def __init__(self, given_by: Callable[[], int] = lambda: 0) -> None:
        self._given_by = given_by
        self._loader: int | None = None  # the loader this run trains on: of several active ones, that one
        self._born = current_batch.now()
        self._place = self._before = ("", 0, 0)  # in what it draws, of the last backward and of the one before
        self.seeded = False  # batches of it were drawn by a seed
        self.stands_in = False  # what the model is given now is no batch

    def follows(self, other: LoaderBatch) -> bool:
        """Whether both train on one loader."""
        return self._loader is not None and self._loader == other._loader

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within it the model is given a record in the place of a batch without any, and nothing of it is summed: of a
        model in parts all processes must run forward and backward, and not every model takes an empty batch."""
        self.stands_in = True
        try:
            yield
        finally:
            self.stands_in = False

    def of_forward(self) -> current_batch.PhysicalBatch | None:
        """The batch that the model is given."""
        return None if self.stands_in else self.batch()

    def batch(self) -> current_batch.PhysicalBatch | None:
        """The batch that the model was given, of which a loader is if it shows one; else that in hand."""
        given = self._given_by()
        shown = current_batch.current(given) if given else None
        return self._in_hand() if shown is None else shown

    def _in_hand(self) -> current_batch.PhysicalBatch | None:
        """The batch in hand, of the loader that this optimizer trains on, or of the only one."""
        if self._loader is not None and (mine := current_batch.current(self._loader)) is not None:
            return mine
        # an iteration that stands still since before the optimizer was made is one that an exception left behind
        if current_batch.active_loaders() > 1 and current_batch.active_loaders(self._born) != 1:
            raise StepError(
                "several Poisson loaders are being iterated, and the model's input does not show of which it is: make "
                "it in the dataset, the collate_fn or the model, or train a step on its loader before the others "
                "begin. If this model trains on none of them, end their iterations first (del the iterators)"
            )
        found = current_batch.current()
        if found is not None and found.moment < self._born and (found.size < 0 or self._loader is None):
            return None  # of an iteration that was begun for something else, and left: a look at the shapes, perhaps
        return found

    def of_no_loop(self) -> str:
        """What to add to an error for want of a batch, if the model was given one of a loader that no loop iterates."""
        if not (given := self._given_by()) or current_batch.current(given) is not None:
            return ""
        return (
            ". (The batch is of a loader that no loop iterates: loop over the loader, not over a list of its batches)"
        )

    def trained(self) -> current_batch.PhysicalBatch | None:
        """The batch of a backward, whose loader is from now on the one that the optimizer trains on.

        Raises StepError if another loader has handed out a batch since it did.
        """
        found = self._bound(self.batch())
        if found is not None and not found.skipped and current_batch.LAST[0] != found.loader:
            raise StepError(
                "another loader has handed out a batch since the one that the model is trained on, so fastdp has not "
                "followed what the loop made of this one (inputs, labels). Train on a batch before the next loader is "
                "asked for one: in place of zip(a, b), loop over a, train, and take next(batches_of_b)"
            )
        if found is not None:
            self._before, self._place = self._place, found.place
        return found

    def check_left(self) -> None:
        """Raises StepError unless the pass of the backward before was left (by an interrupt, say) and another begun."""
        if self._before[0] != self._place[0] or self._before[1] == self._place[1]:
            raise StepError(loop_checks.UNSTEPPED)

    def current(self) -> current_batch.PhysicalBatch | None:
        """The batch in hand; its loader is from now on the one that the optimizer trains on."""
        return self._bound(self._in_hand())

    def _bound(self, found: current_batch.PhysicalBatch | None) -> current_batch.PhysicalBatch | None:
        if found is not None:
            self._loader = found.loader
            self.seeded |= found.seeded
        return found
