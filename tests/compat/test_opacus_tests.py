"""Opacus's own tests pass with their imports changed, and benchmarks/opacus_tests.py changes nothing else."""

from __future__ import annotations

from pathlib import Path

import opacus
import pytest

from benchmarks import opacus_tests
from benchmarks.opacus_tests import Outcome, copy_tests, explanation, failures, run_file, table

IMPORTS = """
from opacus.accountants import RDPAccountant
from opacus import utils as opacus_utils  # opacus stays in a comment
"""
SOURCE = """
import unittest

class Some_test(unittest.TestCase):
    def test_good(self):
        self.assertTrue(True)
    def test_bad(self):
        raise ValueError("told")
    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
    @unittest.skip("why")
    def test_skipped(self):
        pass
"""


@pytest.mark.parametrize("rewrite, package", [(True, "fastdp.compat.opacus"), (False, "opacus")])
def test_imports_are_rewritten_and_nothing_else(tmp_path, rewrite, package):
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "some_test.py").write_text(IMPORTS)
    copy_tests(source, tmp_path, 3, rewrite)
    text = (tmp_path / "moved" / "inner" / "some_test.py").read_text()
    assert f"from {package}.accountants import" in text and f"from {package} import utils as opacus_utils" in text
    assert "# opacus stays in a comment" in text


def test_files_are_run_and_counted(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "some_test.py").write_text(SOURCE)
    copy_tests(source, tmp_path, 3, True)
    (tmp_path / "conftest.py").write_text("")
    found = run_file(tmp_path, "some_test.py", 120)
    by_name = {one.test.split("::")[-1]: one for one in found}
    assert {name: one.status for name, one in by_name.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_subtests": "failed",
        "test_skipped": "skipped",
    }
    assert by_name["test_bad"].reason == "ValueError: told" and by_name["test_skipped"].reason == "why"


def test_reports(monkeypatch):
    monkeypatch.setattr(opacus_tests, "EXPLAINED", {"::test_private$": "a private part"})
    ours = {"a_test.py": [Outcome("a::C::test_private", "failed", "E"), Outcome("a::C::test_b", "failed", "F")]}
    theirs = {"a_test.py": [Outcome("a::C::test_private", "passed"), Outcome("a::C::test_b", "failed", "G")]}
    assert explanation("a::C::test_private") and not explanation("a::C::test_b")
    assert "| a_test.py | 0 / 2 / 0 | 1 | 1 / 1 / 0 |" in table(ours, theirs)
    lines = failures(ours, theirs).splitlines()
    assert lines == [
        "explained: a::C::test_private: a private part",
        "FAILED: a::C::test_b (fails on Opacus too): F",
    ]


OWN = (
    "grad_sample_hooks_fast_gradient_clipping_test.py",
    "privacy_engine_validation_test.py",
    "dpdataloader_test.py",
    "schedulers/noise_scheduler_test.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_opacus_s_own_tests_pass(tmp_path, monkeypatch, name):
    """Those of the hooks, the loader and the engine that need no further package; the benchmark runs all."""
    pytest.importorskip("hypothesis")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    copy_tests(Path(opacus.__file__).parent / "tests", tmp_path, 2, True)
    found = run_file(tmp_path, name, 600)
    assert found and not [one for one in found if one.status == "failed" and not explanation(one.test)]
