"""`python -m fastdp audit`: what it loads, prints, writes and returns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import audit as benchmark
from fastdp.__main__ import parser
from fastdp.audit import TESTS, audit
from fastdp.audit.command import main
from fastdp.audit.runner import PAPER

pytestmark = pytest.mark.slow  # `make test-all` runs it

ROOT = Path(__file__).parent.parent.parent
BY_HAND = str(ROOT / "examples/audit/by_hand.py")
SHORT = ["--tests", "no_clipping,minibatch_clipping"]


def run(*arguments: str) -> int:
    return main(parser().parse_args(["audit", *arguments]))


def script(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_right_script_returns_0_and_a_table(capsys) -> None:
    assert run(f"{BY_HAND}:make_step", *SHORT) == 0
    out = capsys.readouterr().out
    assert "no_clipping" in out and "no bug found by 2 tests" in out and "by_hand.py:make_step" in out


def test_a_wrong_script_returns_1_and_says_what_is_wrong(capsys, tmp_path: Path) -> None:
    text = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.audit.audit_zoo import NoClipping as make_step\n"
    assert run(script(tmp_path / "wrong_one.py", text) + ":make_step", *SHORT) == 1
    out = capsys.readouterr().out
    assert "BUG no_clipping: " in out and out.splitlines()[-1] == "1 of 1 test found a bug: no_clipping"


def test_strict_fails_where_a_test_was_not_run() -> None:
    arguments = [f"{BY_HAND}:make_step", "--tests", "no_clipping,noise_once"]
    assert run(*arguments) == 0 and run(*arguments, "--strict") == 1


def test_everything_measured_is_written(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    plots, file = tmp_path / "a" / "plots", tmp_path / "b" / "audit.json"
    tests = "no_clipping,minibatch_clipping,uncalibrated_noise,noise_distribution,poisson_sampling,epsilon_bound"
    assert run(f"{BY_HAND}:make_step", "--tests", tests, "--plots", str(plots), "--json", str(file)) == 0
    assert {path.stem for path in plots.glob("*.png")} == set(tests.split(","))
    found = json.loads(file.read_text())
    assert [f["name"] for f in found["findings"]] == tests.split(",")
    assert len(found["findings"][0]["data"]["norms"]) == len(found["findings"][0]["data"]["changes"])


WRONG = {
    "there is no file": "nowhere.py:make_step",
    "names no step": "nowhere.py",
    "did you mean 'make_step'": f"{BY_HAND}:make_stp",
    "cannot be imported": "no.such.module:make_step",
    "neither a Trainable nor a function": f"{BY_HAND}:LR",
    "no test 'clip'": f"{BY_HAND}:make_step --tests clip",
    "say what to audit": "",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_usage_returns_2_and_says_what(words: str, capsys) -> None:
    assert run(*WRONG[words].split()) == 2
    assert words in capsys.readouterr().err


def test_a_script_that_fails_is_said_with_its_place(tmp_path: Path, capsys) -> None:
    failing = script(tmp_path / "failing_one.py", "def make_step():\n    return 1 // 0\n\ndef none():\n    pass\n")
    assert run(f"{failing}:make_step") == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "failing_one.py" in err and err.count("Traceback") == 1
    assert run(f"{failing}:none") == 2
    assert "is a return missing?" in capsys.readouterr().err


def test_the_command_line_knows_it_and_stays_light() -> None:
    code = "import fastdp.__main__, sys; fastdp.__main__.parser(); print('scipy.stats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    plain = subprocess.run([sys.executable, "-c", "import fastdp, sys; print('scipy.stats' in sys.modules)"],
                           capture_output=True, text=True, cwd=ROOT, check=True)  # fmt: skip
    assert done.stdout == plain.stdout


# ---------------------------------------------------------------------- docs/audit.md


def test_the_pages_example_runs_and_passes() -> None:
    text = (ROOT / "docs/audit.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    there: dict[str, Any] = {}
    exec(compile(code, "docs/audit.md", "exec"), there)
    report = audit(there["make_step"]())
    assert not report.bugs and len(report.untested) <= 3, str(report)


def test_the_page_names_every_test_and_every_exit_status() -> None:
    text = (ROOT / "docs/audit.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == [*TESTS, *PAPER]
    for name in ("poisson_sampling", "run_parts", "assert_private", "--strict"):
        assert name in text


def test_the_page_has_the_tables_of_the_rows() -> None:
    text, rows = benchmark.PAGE.read_text(), benchmark.read_rows(benchmark.DATA)
    assert benchmark.filled(text, rows) == text, "python -m benchmarks.audit --report"
    assert {(row["kind"], row["name"]) for row in rows} == set(benchmark.steps())
    assert all(int(row["seeds"]) >= 3 and row["commit"] for row in rows)


def test_rates_are_measured_and_gone_on_with(tmp_path: Path, monkeypatch, capsys) -> None:
    two = {key: made for key, made in benchmark.steps().items() if key[1] in ("by hand", "no clipping")}
    monkeypatch.setattr(benchmark, "steps", lambda: two)
    file = tmp_path / "rates.csv"
    for _ in range(2):  # nothing twice
        benchmark.run(file, 1)
    rows = benchmark.read_rows(file)
    assert [row["name"] for row in rows] == ["by hand", "no clipping"]
    assert rows[0]["sensitivity"] == "0" and rows[1]["no_clipping"] == "1" and rows[1]["minibatch_clipping"] == "-"
    assert "no_clipping 1," in benchmark.detections(rows) and "None was missed." in benchmark.detections(rows)
    assert "0 of 15 tests on 1 right steps" in benchmark.summary(rows)
