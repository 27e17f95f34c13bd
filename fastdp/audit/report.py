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
        return [f for f in self.findings if f.verdict == BUG]

    @property
    def untested(self) -> list[Finding]:
        """The findings with the verdict "not tested"."""
        return [f for f in self.findings if f.verdict == NOT_TESTED]

    @property
    def undecided(self) -> list[Finding]:
        """The findings with the verdict "undecided"."""
        return [f for f in self.findings if f.verdict == UNDECIDED]

    @property
    def ok(self) -> bool:
        """Whether no bug was found and something was tested."""
        return not self.bugs and any(f.verdict == OK for f in self.findings)

    @property
    def exit_status(self) -> int:
        """0 if no bug was found; 1 if there is a bug, or nothing could be tested."""
        return 0 if self.ok else 1

    def __getitem__(self, name: str) -> Finding:
        """The finding of a test."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {"subject": self.subject, "seed": self.seed, "findings": [_plain(f.as_dict()) for f in self.findings]}

    def to_json(self) -> str:
        """Return everything that was measured, as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        head = ("test", "verdict", "statistic", "p", "seconds")
        lines = [head, *((f.name, f.verdict, _number(f.statistic), _number(f.p_value), f"{f.seconds:.1f}")
                         for f in self.findings)]  # fmt: skip
        widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
        text = [f"audit of {self.subject} (seed {self.seed})"] if self.subject else []
        for line in lines:
            cells = [c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))]
            text.append("  ".join(cells).rstrip())
        papers = [f.name.startswith("paper_") for f in self.findings]
        text += [LEGEND] * (not all(papers) or not papers) + [PAPERS] * any(papers)
        for verdict in (BUG, UNDECIDED, NOT_TESTED, OK):
            text += [_sentence(f) for f in self.findings if f.verdict == verdict]
        return "\n".join([*text, self.conclusion()])

    def conclusion(self) -> str:
        """The verdict in one line."""
        tested = len(self.findings) - len(self.untested)
        if self.bugs:
            names = ", ".join(f.name for f in self.bugs)
            return f"{len(self.bugs)} of {tested} test{'s' * (tested != 1)} found a bug: {names}"
        if not tested:
            return "nothing could be tested"
        rest = f"; {len(self.undecided)} undecided" if self.undecided else ""
        rest += f"; {len(self.untested)} not tested" if self.untested else ""
        return f"no bug found by {tested} test{'s' * (tested != 1)}{rest}. Tests find bugs; they prove no guarantee."


def _sentence(finding: Finding) -> str:
    mark = {BUG: "BUG ", UNDECIDED: "undecided: ", NOT_TESTED: "not tested: ", OK: "ok "}[finding.verdict]
    return textwrap.fill(f"{mark}{finding.name}: {finding.sentence}", WIDTH, subsequent_indent="    ")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _plain(value: Any) -> Any:
    """For JSON, which has no infinities and no arrays."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
