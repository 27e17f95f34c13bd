"""Recognises batches taken out of a Poisson loader before training began: `for batch in list(loader)`.

When such a batch is trained on, its pass is over and no batch is in hand. It is known again by its tensors, or, where
these were copied (to a device), by the sample rate that the optimizer was given and by its size.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..batch_axis.inputs import nested_tensors

Known = tuple["Taken", int]  # a batch: of which pass, and its number there


class Taken:
    """The batches of one pass that were handed out while none of them was trained on."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.looked = False  # without gradients, or in evaluation
        self.told: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers to which it counts as one without a step
        self.loader: weakref.ref[Any] | None = None  # those that train on it
        self._sizes: list[int] = []
        self.places: list[tuple[str, int, int]] = []  # by what they were drawn

    def add(self, batch: Any, size: int, place: tuple[str, int, int]) -> None:
        """The pass has handed out one more batch."""
        with torch._C.DisableTorchFunction():
            for tensor in nested_tensors(batch):
                _FROM[tensor] = (self, len(self._sizes))
        self._sizes.append(size)
        self.places.append(place)

    def close(self) -> None:
        """The pass is over, and none of its batches was trained on while it was in hand."""
        if self._sizes:
            _CLOSED.add(self)

    def repeats(self, size: int, stepped: set[int]) -> bool:
        """Whether a batch had this size, and all batches of records were stepped on."""
        return size in self._sizes and not any(n not in stepped for n, known in enumerate(self._sizes) if known)

    def like(self, size: int, stepped: set[int]) -> int | None:
        """A batch of that size that was not stepped on, the first after the others, if there is any."""
        found = [n for n, known in enumerate(self._sizes) if known == size and n not in stepped]
        last = max(stepped, default=-1)
        return next((n for n in found if n > last), found[0] if found else None)


_FROM = WeakIdKeyDictionary()  # {tensor of a batch: Known}
_CLOSED: weakref.WeakSet[Taken] = weakref.WeakSet()


def of(values: Any) -> Known | None:
    """The batch, of a loader's pass that is over, that a model's arguments are or are views of; None: no such."""
    if not _CLOSED:
        return None
    with torch._C.DisableTorchFunction():
        for tensor in nested_tensors(values):
            known = _FROM.get(tensor)
            if known is None and tensor._base is not None:
                known = _FROM.get(tensor._base)
            if known is not None and known[0] in _CLOSED:
                return known  # type: ignore[no-any-return]
    return None


class Stepped:
    """Which batches of passes that are over an optimizer has stepped on."""

    def __init__(self) -> None:
        self._stepped: dict[Taken, set[int]] = {}

    def like(self, rate: float | None, size: int) -> Known | None:
        """A batch that may be this one, by its size, of a loader with the optimizer's sample rate."""
        if rate is None or not _CLOSED:
            return None
        for taken in list(_CLOSED):
            if not taken.looked and abs(taken.rate - rate) < 1e-9:
                number = taken.like(size, self._stepped.get(taken, set()))
                if number is not None:
                    return taken, number
        return None

    def again(self, rate: float | None, size: int) -> bool:
        """Whether all batches of such a loader were stepped on, and one of them may be this one."""
        known = [taken for taken in self._stepped if rate is not None and abs(taken.rate - rate) < 1e-9]
        return any(taken.repeats(size, self._stepped[taken]) for taken in known)

    def add(self, known: Known) -> bool:
        """A step was made on it. Returns whether it is the first of its pass."""
        taken, number = known
        first = taken not in self._stepped
        self._stepped.setdefault(taken, set()).add(number)
        return first

    @property
    def passed_over(self) -> int:
        """Batches that were taken out with others after them, which had a step, and had none."""
        return sum(max(stepped) + 1 - len(stepped) for stepped in self._stepped.values())


def turns_passed_over(passes: list[bytearray]) -> int:
    """Batches of passes on which one optimizer did not step (0) but another did, from the first on which it did (1).

    None where that goes by turns: a pattern that repeats within each pass or over them, as a GAN's or where a
    discriminator makes five steps for each of the generator's, does not depend on what is in the batches.
    """
    begun = [bytes(steps) if place else bytes(steps).lstrip(b"\0") for place, steps in enumerate(passes)]
    if all(0 not in steps for steps in begun) or _repeats(b"".join(passes)):
        return 0
    if all(0 not in steps or _repeats(steps) or _repeats(all_) for steps, all_ in zip(begun, passes, strict=True)):
        return 0
    return sum(steps.count(0) for steps in begun)


def _repeats(steps: bytes | bytearray, most: int = 4000) -> bool:
    """Whether it is some pattern at least twice in a row (the last ones of a long run)."""
    steps = steps[-most:]
    return any(steps[period:] == steps[:-period] for period in range(1, len(steps) // 2 + 1))
