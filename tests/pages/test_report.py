"""The tables and figures of the training benchmark are those of its committed rows; nothing lost is left out."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks import report_data as data

FIXED = {
    "suite": "cpu", "sweep": "-", "batch_size": "8", "length": "128", "dtype": "float32", "status": "ok", "why": "-",
    "floor": "1.10", "rounds": "9", "error": "3.0e-06", "device": "cpu x86_64", "threads": "2", "torch": "2.13.0",
    "opacus": "1.6.0", "commit": "abc1234", "date": "2026-11-20",
}  # fmt: skip


def row(
    workload: str, contender: str, ratio: float | None = None, memory: float | None = None, **other: object
) -> data.Row:
    """One line of the CSV; ratio, memory: of time and of memory to ordinary training (of 100 ms, 500 MiB)."""
    found = dict.fromkeys(data.NEEDED, "-") | FIXED | {"workload": workload, "contender": contender}
    if ratio is not None:
        found |= {"ratio": f"{ratio:.2f}", "step_ms": f"{100 * ratio:.1f}", "of_floor": f"{ratio / 1.1:.2f}"}
        found |= {"p20_ms": f"{99 * ratio:.1f}", "p80_ms": f"{103 * ratio:.1f}"}
    if memory is not None:
        found |= {"memory_ratio": f"{memory:.2f}", "peak_mib": f"{500 * memory:.0f}"}
    return found | {key: str(value) for key, value in other.items()}


def four(workload: str, ours: float, hooks: float, ghost: float | None = None, **other: object) -> list[data.Row]:
    """Of one workload: ordinary training, fastdp, Opacus's hooks and ghost (None: raises)."""
    last = row(workload, "opacus ghost", ghost, 1.2, **other) if ghost else failing(workload, "opacus ghost", **other)
    return [row(workload, "non-private", 1.0, 1.0, **other), row(workload, "fastdp", ours, 1.05, **other),
            row(workload, "opacus hooks", hooks, 2.0, **other), last]  # fmt: skip


def failing(workload: str, contender: str, status: str = "raises", **other: object) -> data.Row:
    return row(workload, contender, status=status, why="ValueError: no rule | for it", **other)


def cases(*rows: Iterable[data.Row]) -> data.Cases:
    return data.newest([one for some in rows for one in some])


def write(path: Path, rows: Iterable[data.Row], columns: Iterable[str] = data.NEEDED) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def cells(text: str, start: str) -> list[str]:
    """Of the first line of a table that begins so."""
    found = next(line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in found.strip("|").split(" | ")]


# ---------------------------------------------------------------------- the committed documents


def test_documents_hold_what_the_committed_rows_say() -> None:
    """Fails if a table was edited by hand, or rows came without `python -m benchmarks.report`."""
    found = data.newest(data.read(report.DATA))
    made_by = {report.README: report.readme, report.PAGE: report.page}
    for path, made in made_by.items():
        text = path.read_text()
        assert made(text, found) == text, f"{path.name}: run python -m benchmarks.report"
    assert report.stale(found, report.FIGURES) == []


# ---------------------------------------------------------------------- which rows


def test_the_newest_row_wins() -> None:
    old, new = row("gpt2", "fastdp", 1.5, 1.1), row("gpt2", "fastdp", 1.2, 1.0, date="2026-11-21", commit="def5678")
    same_day = row("gpt2", "fastdp", 1.3, 1.0, date="2026-11-21")
    assert cell_of(cases([new, old])) == "1.20"  # by date, wherever it stands
    assert cell_of(cases([old, new, same_day])) == "1.30"  # of a day, the last
    others = [row("gpt2", "fastdp", 9.0, **{key: "7"}, date="2026-12-01") for key in ("batch_size", "length", "threads",
              "dtype", "device", "sweep", "suite")]  # fmt: skip
    assert cell_of(cases([old, new, *others])) == "1.20"  # another case is not the same measurement


def cell_of(found: data.Cases) -> str:
    case = data.Case("cpu", "cpu x86_64", "2", "-", "gpt2", "8", "128", "float32")
    return found[case]["fastdp"]["ratio"]


def test_what_the_last_run_did_not_measure_is_kept() -> None:
    first = row("gpt2", "fastdp", 1.5, 1.1)
    second = row("gpt2", "fastdp", 1.2, date="2026-11-21", commit="def5678")
    (group,) = cases([first, second]).values()
    found = group["fastdp"]
    assert [found[c] for c in ("ratio", "memory_ratio")] == ["1.20", "1.10"]
    assert "commits abc1234, def5678" in report.note([group])
    for status in ("raises", "wrong"):  # but nothing of one that failed since, or before
        bad = failing("gpt2", "fastdp", status, date="2026-11-21")
        (group,) = cases([first, bad]).values()
        assert data.number(group["fastdp"], "ratio") is None and group["fastdp"]["memory_ratio"] == "-"
        (group,) = cases([bad, second | {"date": "2026-11-22"}]).values()
        assert group["fastdp"]["memory_ratio"] == "-"


# ---------------------------------------------------------------------- what the tables say


def test_losing_by_memory_by_failing_and_to_a_compiler_is_told() -> None:
    rows = [*four("gpt2", 1.2, 2.2, 2.0), row("gpt2", "non-private compiled", 0.8)]
    rows[1] |= {"memory_ratio": "1.25"}
    lost = report.where_we_lose(cases(rows))
    assert "memory: fastdp 1.25, opacus ghost 1.20" in lost
    assert "takes 0.80 compiled: fastdp's 1.20 is 1.50 of that" in " ".join(lost.split())
    found = cases([failing("lstm", "fastdp", "wrong"), row("lstm", "opacus hooks", 3.0, 2.0)])
    assert "time: fastdp wrong, opacus hooks 3.00" in report.where_we_lose(found)
    two = cases(four("gpt2", 1.2, 2.2), [one for group in found.values() for one in group.values()])
    assert "on 1 of 2 workloads" in " ".join(report.summary(two, 9).split())  # a failure is no win
    assert cells(report.summary(found, 9), "lstm")[3:6] == ["wrong", "", f"3.00 hooks {report.LOST}"]


def test_no_time_is_shown_for_what_is_wrong() -> None:
    """Whatever its row says: the status decides."""
    rows = four("gpt2", 1.2, 2.2, 2.0)
    rows[2] |= {"status": "wrong", "ratio": "0.50", "step_ms": "50.0", "memory_ratio": "0.50", "why": "off by 3 %"}
    found = cases(rows)
    for text in (report.summary(found, 9), report.sections(found), report.where_we_lose(found)):
        assert "0.50" not in text and "50.0" not in text
    assert "| wrong: off by 3 % |" in report.sections(found)


def test_the_readme_shows_a_few_workloads_and_first_those_we_lose() -> None:
    names = [f"model{k:02}" for k in range(14)]
    found = cases(*(four(name, 1.2, 1.1 if name == names[-1] else 2.2, 2.0) for name in names))
    text = report.readme("# A\n\n<!-- table: training -->\n<!-- end -->\n\n## Limits\n", found)
    shown = re.findall(r"^\| (model\d+) ", text, re.M)
    assert shown == [*names[: report.SHOWN - 1], names[-1]]
    said = " ".join(text.split())
    assert f"{14 - report.SHOWN} more workloads, every" in said and "13 of 14 workloads" in said
    assert set(re.findall(r"^\| (model\d+) ", report.sections(found), re.M)) == set(names)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies that the command may write to."""
    for name, path in (("README", report.README), ("PAGE", report.PAGE)):
        copy = tmp_path / name
        copy.write_text(path.read_text())
        monkeypatch.setattr(report, name, copy)
    monkeypatch.setattr(report, "FIGURES", tmp_path)
    return tmp_path


def test_without_rows_the_command_says_what_to_run(documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(documents / "training_cpu.csv", [])
    before = report.README.read_text()
    report.main(["--data", str(documents)])
    assert "python -m benchmarks.training --suite cpu" in capsys.readouterr().out
    assert report.README.read_text() == before and "No rows yet: `python -m" in report.PAGE.read_text()
    assert not list(documents.glob("*.png"))


def test_a_figure_is_drawn_once_for_its_rows(documents: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = four("gpt2", 1.2, 2.2, 2.0) + four("resnet18", 1.3, 9.0, 3.0)
    for some in (rows[:4], rows):
        write(documents / "training_cpu.csv", some)
        found = data.newest(data.read(documents))
        assert report.stale(found, documents) == ["training_cpu.png"]  # missing, then drawn from other rows
        report.main(["--data", str(documents)])
        assert report.stale(found, documents) == []
    assert (documents / "training_cpu.png").read_bytes().startswith(b"\x89PNG")


def test_tables_need_neither_matplotlib_nor_torch(documents: Path) -> None:
    write(documents / "training_cpu.csv", four("gpt2", 1.2, 2.2, 2.0))
    code = f"""
import sys
from pathlib import Path
sys.modules["matplotlib"] = None  # importing it fails
from benchmarks import report
folder = Path({str(documents)!r})
report.README, report.PAGE, report.FIGURES = folder / "README", folder / "PAGE", folder
assert "torch" not in sys.modules
report.main(["--data", str(folder)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=report.ROOT)
    assert done.returncode == 1 and "pip install matplotlib" in done.stderr, done.stderr
    assert "| gpt2 | 8 x 128 | 1.10 | 1.20 |" in report.README.read_text()
