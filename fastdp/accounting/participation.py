"""When a record can take part in a run: what a loader promises, and what correlated noise is accounted by."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..errors import AccountingError
from ..utils.number_checks import check_whole

KINDS = ("fixed order", "separated", "cyclic Poisson", "balls in bins")


class Participation(NamedTuple):
    """Steps come in cycles of `period` steps; a record takes part in each cycle at most once.

    Attributes:
        kind: "fixed order": at the same place of every cycle. "separated": at any place, and two steps that a record
            takes part in are at least `separation` steps apart. "cyclic Poisson": each record belongs to one place of
            the cycle, chosen without a look at it, and takes part there with probability `rate`, by a secret draw.
            "balls in bins": at the same place of every cycle, which is drawn once, uniformly and in secret.
        period: the steps of a cycle.
        separation: the fewest steps between two that a record takes part in; `period`, but for "separated".
        rate: the probability to take part in the own step of a cycle; 1 but for "cyclic Poisson".
        mark: of the draw or the order: two runs with other marks have records at other places.
    """

    kind: str
    period: int
    separation: int
    rate: float = 1.0
    mark: str = ""


def check_participation(part: Participation) -> None:
    """Raises AccountingError if it is none."""
    if part.kind not in KINDS:
        raise AccountingError(
            f"no accounting is known for the participation {part.kind!r}, only for {', '.join(KINDS)}"
        )
    whole = {f"the {name} of a participation": getattr(part, name) for name in ("period", "separation")}
    check_whole(error=AccountingError, **whole)
    if not 0 < part.rate <= 1:
        raise AccountingError(f"the rate of a participation must lie in (0, 1], not {part.rate!r}")


class Block(NamedTuple):
    """Steps whose noise is correlated. A restart begins another block, which is independent of all before.

    Attributes:
        name: that no other block has.
        noise_multiplier: s over the clipping norm.
        steps: of the block.
        participation: what the loader promised.
        first: the step of a cycle at which the block began. None: it is not known, and the worst one is accounted for.
    """

    name: str
    noise_multiplier: float
    steps: int
    participation: Participation
    first: int | None = None

    @property
    def plain(self) -> list[Any]:
        """Values for a file that may be given away: without the mark, which is a digest of a few records."""
        return [*self[:3], [*self.participation[:-1], ""], self.first]


def block_of(name: Any, sigma: Any, steps: Any, participation: Any, first: Any) -> Block:
    """A block that was saved. Raises TypeError or ValueError if it is none."""
    kind, period, separation, rate, of = participation
    promise = Participation(str(kind), int(period), int(separation), float(rate), str(of))
    if int(steps) < 1 or not 0 <= float(sigma) < math.inf or promise.period < 1:
        raise ValueError("a block without steps, or with a noise multiplier that is none")
    return Block(str(name), float(sigma), int(steps), promise, None if first is None else int(first))
