"""Planted bugs are found by the tests that are named beside them (tests/audit/audit_zoo.py); at several seeds by
`python -m benchmarks.audit`."""

from __future__ import annotations

import pytest

from fastdp.audit import TESTS, audit

from .audit_zoo import PLANTED

pytestmark = pytest.mark.slow  # `make test-all` runs it


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str) -> None:
    made, found_by = PLANTED[bug]
    report = audit(made(), found_by, seed=1)
    assert [f.name for f in report.bugs] == list(found_by), str(report)
    assert report.exit_status == 1


def test_every_test_finds_something() -> None:
    assert {name for _, found_by in PLANTED.values() for name in found_by} == set(TESTS)
