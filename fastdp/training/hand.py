"""The batch in hand: of the loader that an optimizer trains on, where several are being iterated."""

from __future__ import annotations

from ..errors import StepError
from ..layouts import in_hand


class Hand:
    """Knows the loader of one optimizer, and when that was made."""

    def __init__(self) -> None:
        self._loader: int | None = None  # the loader this run trains on: of several active ones, that one
        self._born = in_hand.now()

    def batch(self) -> in_hand.PhysicalBatch | None:
        """The batch in hand, of the loader that this optimizer trains on, or of the only one."""
        if self._loader is not None and (mine := in_hand.current(self._loader)) is not None:
            return mine
        # an iteration that stands still since before the optimizer was made is one that an exception left behind
        if in_hand.active_loaders() > 1 and in_hand.active_loaders(self._born) != 1:
            raise StepError(
                "several Poisson loaders are being iterated, and which of them this optimizer trains on is not known: "
                "train a step on its loader before the others begin"
            )
        found = in_hand.current()
        if found is not None and found.size < 0 and found.moment < self._born:
            return None  # fetched for another optimizer, and left
        return found

    def current(self) -> in_hand.PhysicalBatch | None:
        """The same; its loader is from now on the one that the optimizer trains on."""
        found = self.batch()
        if found is not None:
            self._loader = found.loader
        return found
