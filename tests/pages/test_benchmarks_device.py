"""What gpu.sh asks of a GPU runs on the CPU at small sizes, and keeps its rows as they come."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from benchmarks import device, planner, timing


def test_the_planners_rows_are_kept_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, calls = tmp_path / "planner.csv", []

    def measured(*args: object) -> timing.Row:
        calls.append(out.read_text().count("\n") if out.exists() else 0)  # what a run cut short here would have
        return {"family": "linear", "loss": "0.0"}

    monkeypatch.setattr(planner, "measure", measured)
    command = ["planner", "--family", "linear", "--seconds", "0.3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    planner.main()
    assert len(calls) > 2 and calls[:3] == [0, 2, 3]


def test_what_is_asked_of_a_device_runs_here_at_small_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "host.csv", tmp_path / "profile.txt"
    small = ["--device", "cpu", "--small", "--models", "gpt2"]
    device.main(["host", *small, "--out", str(out), "--profile", str(table)])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == list(device.CONTENDERS)
    assert all(float(row["wall_ms"]) >= float(row["host_ms"]) > 0 for row in rows) and "aten::" in table.read_text()
    device.main(["one", *small])
    device.main(["four", *small])
    told = capsys.readouterr().out
    assert "compiled" in told and all(f"{name}: done" in told for name in ("gram", "direct", "clipped", "adamw"))
