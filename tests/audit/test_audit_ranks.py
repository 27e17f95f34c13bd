"""The audit of a step that two processes make: it sees the union, and bugs that one process cannot have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .. import forked

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent / "audit_over_ranks.py"
SHORT = "no_clipping,minibatch_clipping,per_sample_independence,noise_scale"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo"),
]


def audit(step, *options):
    return forked.torchrun(2, "-m", "fastdp", "audit", str(step), *map(str, options))


def audit_by_torchrun(step, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fastdp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FASTDP_CALIBRATE": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, "audit", str(step), *options], env=environment, timeout=240, capture_output=True,
                          text=True)  # fmt: skip


def test_every_test_runs_on_the_union_of_two_ranks(tmp_path):
    done = audit(f"{ROOT / 'examples' / 'audit' / 'over_ranks.py'}:make_step", "--strict", "--json", tmp_path / "found")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert "poisson_sampling" in done.stdout and "no bug found by 15 tests" in done.stdout and found


def test_a_step_by_hand_is_right():
    done = audit(f"{HERE}:right", "--tests", SHORT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name, said", [("quiet_noise", "noise_scale"), ("clips_shares", "minibatch_clipping")])
def test_bugs_of_several_processes_are_found(name, said):
    done = audit(f"{HERE}:{name}", "--tests", said)
    assert "BUG" in done.stdout and said in done.stdout, done.stdout + done.stderr


def test_ranks_that_drift_apart_are_named():
    done = audit_by_torchrun(f"{HERE}:drifts_apart", "--tests", "no_clipping")
    assert "rank 1 holds other parameters than rank 0" in done.stdout + done.stderr
