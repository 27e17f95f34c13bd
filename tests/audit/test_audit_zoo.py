"""Planted bugs are found by the tests that are named beside them (tests/audit/audit_zoo.py).

At every run those that libraries had and those that the audit once missed, and a third of the rest; all of them with
FASTDP_ZOO=all in the environment, and at several seeds by `python -m benchmarks.audit`.
"""

from __future__ import annotations

import os

import pytest

from fastdp.audit import TESTS, audit

from .audit_zoo import ALWAYS, PLANTED

pytestmark = pytest.mark.slow  # `make test-all` runs it

REST = [name for name in PLANTED if name not in ALWAYS]
CHOSEN = [*ALWAYS, *(REST if os.environ.get("FASTDP_ZOO") == "all" else REST[::3])]


@pytest.mark.parametrize("bug", CHOSEN)
def test_planted_bug_is_found(bug: str) -> None:
    made, found_by = PLANTED[bug]
    report = audit(made(), found_by, seed=1)
    assert [f.name for f in report.bugs] == list(found_by), str(report)
    assert report.exit_status == 1


def test_every_test_finds_something_and_the_zoo_is_large() -> None:
    assert {name for _, found_by in PLANTED.values() for name in found_by} == set(TESTS)
    assert len(PLANTED) >= 200 and set(ALWAYS) <= set(PLANTED)
