"""The result of a test, and what all tests have in common."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .measure import Probe
from .trainable import Lacking

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


class Result:
    """What the findings of one test share: the hypothesis of its p-value, and its data, to which a test may add."""

    def __init__(self, null: str = "", **data: Any) -> None:
        self.null, self.data = null, data

    def finding(
        self, verdict: str, sentence: str, statistic: float | None = None, p_value: float | None = None,
        bound: float | None = None,
    ) -> Finding:  # fmt: skip
        """The finding; `audit_test` adds the test's name."""
        return Finding("", verdict, sentence, statistic, p_value, bound, self.null, self.data)

    def bug(self, sentence: str, *numbers: float | None) -> Finding:
        """numbers: statistic, p-value and bound."""
        return self.finding(BUG, sentence, *numbers)

    def passed(self, sentence: str, *numbers: float | None) -> Finding:
        """numbers: statistic, p-value and bound."""
        return self.finding(OK, sentence, *numbers)


def not_tested(name: str, reason: str, **data: Any) -> Finding:
    return Finding(name, NOT_TESTED, reason, data=data)


def audit_test(function: Callable[..., Finding]) -> Callable[..., Finding]:
    """A test of a Probe, as a test of any Trainable, or of a Probe: tests of one audit share what was measured.

    If the Trainable lacks something, the finding is "not tested". data["steps"] is the number of training steps made.
    """

    @functools.wraps(function)
    def test(trainable: Any, *, seed: int = 0, **options: Any) -> Finding:
        probe = trainable if isinstance(trainable, Probe) else Probe(trainable, seed)
        begun = probe.steps
        try:
            found = function(probe, **options)
        except Lacking as problem:
            found = not_tested("", str(problem))
        found.name = function.__name__
        found.data.setdefault("steps", probe.steps - begun)
        return found

    return test
