"""Every planted bug is found by the tests that are named beside it (tests/audit_zoo.py)."""

from __future__ import annotations

import pytest

from fastdp.audit import TESTS, audit

from .audit_zoo import PLANTED


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str) -> None:
    made, found_by = PLANTED[bug]
    report = audit(made(), found_by, seed=1)
    assert [f.name for f in report.bugs] == list(found_by), str(report)
    assert report.exit_status == 1


def test_every_test_finds_something_and_the_zoo_is_large() -> None:
    assert {name for _, found_by in PLANTED.values() for name in found_by} == set(TESTS)
    assert len(PLANTED) >= 20
