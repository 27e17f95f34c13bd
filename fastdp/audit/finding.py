"""The result of a test."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

OK, BUG, NOT_TESTED = "ok", "bug", "not tested"
UNDECIDED = "undecided"  # by the paper's tests: neither p < 0.01 nor p > 0.99, or something else moves the statistic


@dataclass
class Finding:
    """The result of one test.

    Attributes:
        name: the name of the test.
        verdict: "ok", "bug", "not tested", or "undecided" (the paper's tests only).
        statistic: the number that was measured.
        p_value: the p-value of the hypothesis that `null` describes, if the test has one.
        bound: the number with which the statistic was compared.
        sentence: what was found, and where to look if it is wrong.
        data: everything that was measured, as numbers and lists, for plots.
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
        """Whether no bug was found. A test that did not run, or is undecided, finds none."""
        return self.verdict != BUG

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a dict for JSON."""
        return dataclasses.asdict(self)


def not_tested(name: str, reason: str, **data: Any) -> Finding:
    return Finding(name, NOT_TESTED, reason, data=data)
