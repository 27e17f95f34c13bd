"""examples/papers/gpu.sh: its commands are those of the scripts, and it goes on in the next call."""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/papers/gpu.sh"
pytestmark = pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="needs bash")
STUB = """#!/usr/bin/env bash
echo "$@" >> {log}
case "$*" in *{fails}*) exit 3 ;; esac
while [[ $# -gt 0 ]]; do
  if [[ $1 == --checkpoints ]]; then mkdir -p "$2" && date > "$2/kept"; fi
  shift
done
"""


def called(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *words], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def planned() -> list[list[str]]:
    return [shlex.split(line) for line in called("--plan", "DATA", "KEPT").stdout.splitlines()]


def test_every_command_is_one_that_its_script_takes(capsys):
    commands = planned()
    assert len(commands) >= 8 and all(command[1].startswith("examples/papers/") for command in commands)
    for command in commands:
        stem = Path(command[1]).stem
        script = importlib.import_module(f"examples.papers.{stem}")
        with pytest.raises(SystemExit):
            script.main([*command[2:], "--no-such-option"])
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert told.endswith("unrecognized arguments: --no-such-option"), told


def test_a_failure_stops_nothing_and_the_archive_carries_on(tmp_path):
    log, stub, archive = tmp_path / "log", tmp_path / "stub", tmp_path / "kept.tar.gz"
    stub.write_text(STUB.format(log=log, fails="snli"))
    stub.chmod(0o755)
    given = {"PYTHON": str(stub), "DEVICE": "cpu", "ARCHIVE": str(archive)}
    done = called(str(tmp_path / "data"), str(tmp_path / "kept"), "9", **given)
    assert done.returncode == 1 and "snli failed with exit code 3" in done.stderr
    assert len(log.read_text().splitlines()) == len(planned())
    shutil.rmtree(tmp_path / "kept")
    done = called(str(tmp_path / "data"), str(tmp_path / "kept"), "9", **given, ONLY="wine")
    assert done.returncode == 0, done.stderr
    assert len(log.read_text().splitlines()) == len(planned()) + 1
    assert (tmp_path / "kept/checkpoints/dp_loss/kept").exists()


def test_when_the_time_is_over_nothing_begins(tmp_path):
    done = called(str(tmp_path), str(tmp_path / "kept"), "0.2", PYTHON="false", DEVICE="cpu")
    assert done.returncode == 0 and "the time is over before mnist-loss" in done.stdout
    assert called("DATA").returncode == 2
    for minutes in ("0", "nine"):
        done = called(str(tmp_path), str(tmp_path / "kept"), minutes, DEVICE="cpu")
        assert done.returncode == 2 and "MINUTES must be a positive number" in done.stderr
