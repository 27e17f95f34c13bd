"""Rows of the coverage benchmark: kept, taken up again, summed up."""

from __future__ import annotations

from typing import Any

from benchmarks import coverage
from benchmarks import coverage_report as report


def row(case: str, status: str, message: str = "", commit: str = "abc", **other: Any) -> dict[str, Any]:
    base = {"suite": "named", "engine": "fastdp", "case": case, "status": status, "message": message, "commit": commit}
    return {**base, **other}


def test_a_sweep_is_taken_up_again(tmp_path: Any) -> None:
    path = tmp_path / "rows.csv"
    assert report.done(path, "abc") == set()
    for r in (row("a", "exact"), row("b", "exact", commit="old"), row("c", "refused", commit="abc+changes")):
        report.append(path, r)
    assert report.done(path, "abc") == {("named", "fastdp", "a")}
    assert report.done(path, "abc+changes") == set()  # nobody knows which changes
    report.append(path, row("b", "WRONG"))
    assert {r["case"]: r["status"] for r in report.read(path)} == {"a": "exact", "b": "WRONG", "c": "refused"}


def test_a_sum_of_rows_groups_reasons() -> None:
    rows = [row(f"c{i}", "refused", f"SampleMixingError: cumsum() in module 'layers.{i}' along {i}") for i in range(3)]
    rows += [row("d", "refused", "TypeError: another"), row("e", "exact"), row("f", "not built", "no")]
    text = report.summary(rows)
    assert "| named | fastdp | 6 | 5 | 1 (20.0 %) | 0 | 4 (80.0 %) | 0 | 0 | 0 | 0 | 1 (16.7 %) |" in text
    assert "- 3 x SampleMixingError: cumsum() in module '…' along #\n  c0, c1, c2" in text
    assert text.index("3 x Sample") < text.index("1 x TypeError")


def test_the_table_of_several_suites_and_engines(tmp_path: Any, capsys: Any) -> None:
    """In whatever order rows were written; repaired models in a line of their own; shares of what was judged."""
    path = tmp_path / "rows.csv"
    timm = [row("a", "rightly refused", suite="timm"), row("a [repaired]", "exact", suite="timm")]
    rows = [row("a", "exact"), timm[0], row("b", "WRONG"), row("c", "not built"), row("d", "crashed"), timm[1]]
    rows += [row("a", "refused", engine="opacus-hooks", suite="timm"), row("b", "exact", engine="opacus-hooks")]
    for r in rows:
        report.append(path, r)
    coverage.main(["--show", str(path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in lines] == [13] * 7
    assert lines[2:] == [
        "| named | fastdp | 4 | 3 | 1 (33.3 %) | 0 | 0 | 1 (33.3 %) | 1 (33.3 %) | 0 | 0 | 1 (25.0 %) |",
        "| named | opacus-hooks | 1 | 1 | 1 (100.0 %) | 0 | 0 | 0 | 0 | 0 | 0 | 0 |",
        "| timm | fastdp | 1 | 1 | 0 | 1 (100.0 %) | 0 | 0 | 0 | 0 | 0 | 0 |",
        "| timm | opacus-hooks | 1 | 1 | 0 | 0 | 1 (100.0 %) | 0 | 0 | 0 | 0 | 0 |",
        "| timm, repaired | fastdp | 1 | 1 | 1 (100.0 %) | 0 | 0 | 0 | 0 | 0 | 0 | 0 |",
    ]


def test_what_an_engine_does_not_claim_is_a_footnote() -> None:
    notes = "float32; outside its documentation (batch first)"
    rows = [row(name, "WRONG", engine="opacus-ghost", notes=notes) for name in "ab"] + [row("a", "exact")]
    text = report.summary(rows)
    assert "opacus-ghost: outside its documentation (batch first): a (WRONG), b (WRONG)\n" in text
    assert "fastdp: outside" not in text and "outside" not in report.summary(rows[2:])
