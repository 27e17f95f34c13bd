"""What gpu.sh asks of a GPU runs on the CPU at small sizes, and keeps its rows as they come."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import device, planner, smoke, timing
from benchmarks.contenders import CONTENDERS, Contender


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


def test_a_contender_that_fails_is_a_row_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no graph")

    monkeypatch.setitem(CONTENDERS, "fastdp graphed", Contender(fails))  # type: ignore[arg-type]
    out, small = tmp_path / "host.csv", ["--device", "cpu", "--small", "--models", "gpt2"]
    device.main(["host", *small, "--out", str(out)])
    with out.open(newline="") as file:
        rows = {row["contender"]: row["wall_ms"] for row in csv.DictReader(file)}
    assert list(rows) == list(device.CONTENDERS) and rows["fastdp graphed"] == "RuntimeError"
    assert float(rows["fastdp layerwise"]) > 0
    with pytest.raises(SystemExit, match="fastdp graphed: RuntimeError: no graph"):
        device.main(["one", *small])


def test_what_users_run_on_a_gpu_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("transformers", "peft", "accelerate"):
        pytest.importorskip(module)
    with pytest.raises(SystemExit) as ended:
        smoke.main(["--device", "cpu"])
    told = capsys.readouterr().out.splitlines()
    assert not ended.value.code and [line.split()[0] for line in told] == list(smoke.CASES)
    assert all(line.endswith(" s  ok") for line in told), told


def test_one_that_does_not_train_is_told_and_the_next_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def still(place: torch.device) -> float:
        model = smoke.classifier(place)
        smoke.holds(model, {name: p.detach().clone() for name, p in model.named_parameters()})
        return 0.0

    def absent(place: torch.device) -> float:
        raise ModuleNotFoundError("No module", name="peft")

    monkeypatch.setattr(smoke, "CASES", {"still": still, "absent": absent, "loop": smoke.loop})
    with pytest.raises(SystemExit) as ended:
        smoke.main(["--device", "cpu", "--out", str(tmp_path / "smoke.csv")])
    with (tmp_path / "smoke.csv").open(newline="") as file:
        found = {row["case"]: row["result"] for row in csv.DictReader(file)}
    assert ended.value.code == 1 and found["still"] == "AssertionError: 0.weight has not moved"
    assert found["absent"] == "peft is not installed" and found["loop"] == "ok"
