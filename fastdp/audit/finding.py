"""What a test says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

OK, BUG, NOT_TESTED = "ok", "bug", "not tested"


@dataclass
class Finding:
    """The result of one test.

    name: of the test. verdict: "ok", "bug" or "not tested". statistic: the number that was looked at; p_value: of the
    hypothesis that `null` puts in words, where the test has one; bound: what the statistic was held against. sentence:
    what was found, and where to look if it is wrong. data: everything measured, as numbers and lists, for plots.
    """

    name: str
    verdict: str
    sentence: str
    statistic: float | None = None
    p_value: float | None = None
    bound: float | None = None
    null: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no bug was found; a test that was not run finds none."""
        return self.verdict != BUG

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def not_tested(name: str, reason: str, **data: Any) -> Finding:
    return Finding(name, NOT_TESTED, reason, data=data)
