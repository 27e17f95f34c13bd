"""The findings of an audit as a table and sentences, and as an exit status for CI."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .finding import BUG, NOT_TESTED, OK, UNDECIDED, Finding

WIDTH = 110
MARKS = {BUG: "BUG ", UNDECIDED: "undecided: ", NOT_TESTED: "not tested: ", OK: "ok "}
LEGEND = """p of the first three tests: that the step does not depend on C, B and C (small is right);
p of the others: that it is as it should be (small is wrong)"""
PAPERS = """p of the paper's three tests: that the slope is 0 (small is right);
p of paper_noise_distribution: that the noise is as it should be (small is wrong)"""


@dataclass
class Report:
    """The findings of an audit, in the order of the tests."""

    findings: list[Finding] = field(default_factory=list)
    subject: str = ""
    seed: int = 0

    @property
    def bugs(self) -> list[Finding]:
        """The findings with the verdict "bug"."""
        return self._of(BUG)

    @property
    def untested(self) -> list[Finding]:
        """The findings with the verdict "not tested"."""
        return self._of(NOT_TESTED)

    @property
    def undecided(self) -> list[Finding]:
        """The findings with the verdict "undecided"."""
        return self._of(UNDECIDED)

    @property
    def ok(self) -> bool:
        """Whether no bug was found and something was tested."""
        return not self.bugs and bool(self._of(OK))

    @property
    def exit_status(self) -> int:
        """0 if no bug was found; 1 if there is a bug, or nothing could be tested."""
        return 0 if self.ok else 1

    def __getitem__(self, name: str) -> Finding:
        """The finding of a test."""
        return {finding.name: finding for finding in self.findings}[name]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {"subject": self.subject, "seed": self.seed, "findings": [_plain(f.as_dict()) for f in self.findings]}

    def to_json(self) -> str:
        """Return everything that was measured, as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def _of(self, verdict: str) -> list[Finding]:
        return [f for f in self.findings if f.verdict == verdict]

    def __str__(self) -> str:
        lines = [("test", "verdict", "statistic", "p", "seconds")]
        lines += [(f.name, f.verdict, _number(f.statistic), _number(f.p_value), f"{f.seconds:.1f}")
                  for f in self.findings]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<>>>", widths, strict=True))
        text = [f"audit of {self.subject} (seed {self.seed})"] if self.subject else []
        text += [aligned.format(*line).rstrip() for line in lines]
        papers = [f.name.startswith("paper_") for f in self.findings]
        text += [LEGEND] * (not all(papers) or not papers) + [PAPERS] * any(papers)
        for verdict, mark in MARKS.items():
            text += [textwrap.fill(f"{mark}{f.name}: {f.sentence}", WIDTH, subsequent_indent="    ")
                     for f in self._of(verdict)]  # fmt: skip
        return "\n".join([*text, self.conclusion()])

    def conclusion(self) -> str:
        """The verdict in one line."""
        tested = len(self.findings) - len(self.untested)
        tests = f"{tested} test{'s' * (tested != 1)}"
        if self.bugs:
            return f"{len(self.bugs)} of {tests} found a bug: {', '.join(f.name for f in self.bugs)}"
        if not tested:
            return "nothing could be tested"
        rest = "".join(
            f"; {len(found)} {verdict}" for verdict in (UNDECIDED, NOT_TESTED) if (found := self._of(verdict))
        )
        return f"no bug found by {tests}{rest}. Tests find bugs; they prove no guarantee."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _plain(value: Any) -> Any:
    """For JSON, which has no infinities and no arrays."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
