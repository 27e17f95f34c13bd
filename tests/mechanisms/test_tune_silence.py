"""`python -m fastdp tune`: what a run leaves in buffers, in the process and in error messages is not shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdp.__main__ import parsed
from fastdp.commands import tune
from fastdp.mechanisms import NegativeBinomialRuns

pytestmark = pytest.mark.slow  # `make test-all` runs it

HISTORY = "[(1.0, 0.1, 10)]"
SETTINGS = [{"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10}]
BUFFERS = """
import ctypes, sys

def train(setting, folder):
    print("SECRET by another name", file=sys.__stdout__)
    sys.__stderr__.write("SECRET part of a line")
    ctypes.CDLL(None).printf(b"SECRET of C")
    return 1.0, [(1.0, 0.1, 10)]
"""
DRAWS = """
import os, random
import numpy, torch

def train(setting, folder):
    with open({log!r}, "a") as file:
        print(float(torch.rand(())), random.random(), numpy.random.random(), file=file)
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    (folder / "model").write_text("")
    with open({log!r} + "2", "a") as file:
        print(os.stat(folder / "model").st_ino, os.stat(folder).st_ino, file=file)
    os.utime(folder / "model", (0, 0))
    os.chdir(folder)
    return 1.0, [(1.0, 0.1, 10)]
"""
IMPORT = """
from pathlib import Path
log = Path({log!r})
if log.exists():
    raise ValueError("SECRET record")
log.write_text("")

def train(setting, folder):
    return 1.0, [(1.0, 0.1, 10)]
"""
TWO = """
import fastdp, torch

def steps(count):
    model = torch.nn.Linear(2, 1)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, sample_rate=0.1, expected_batch_size=2)
    for _ in range(count):
        model(torch.randn(2, 2)).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer

def train(setting, folder):
    steps(1)
    return 1.0, steps(9)
"""
BASE = """
class Ends(BaseException):
    pass

def train(setting, folder):
    raise Ends("SECRET record")
"""
RETURNS = """
def train(setting, folder):
    return 1.0, [["SECRET record"]]
"""
LOADER = """
import fastdp, torch
data = torch.utils.data.TensorDataset(torch.randn(40, 2))

def train(setting, folder):
    model = torch.nn.Linear(2, 1)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0{options})
    for place, (x,) in enumerate({loader}):
        if place == {last}:
            break
        if len(x):
            model(x).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return 1.0, optimizer
"""
UNITS = """
import fastdp, torch
from pathlib import Path
data = torch.utils.data.TensorDataset(torch.randn(40, 2))

def train(setting, folder):
    log = Path({log!r})
    keys = [number // 2 for number in range(40)] if log.exists() else None
    log.write_text("")
    model = torch.nn.Linear(2, 1)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    for x, in fastdp.poisson_loader(data, sample_rate=0.1, steps=3, group_by=keys):
        if len(x):
            model(x).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return 1.0, optimizer
"""
POISSON = "fastdp.poisson_loader(data, sample_rate=0.1, steps=3{more})"
ORDINARY = "torch.utils.data.DataLoader(data, 20)"


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search of three runs by the function `train` of a script; (exit code, its folder)."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(NegativeBinomialRuns, "draw", lambda self: 3)

    def run(script):
        Path("script.py").write_text(script)
        Path("settings.json").write_text(json.dumps(SETTINGS))
        words = "tune script.py:train --settings settings.json --delta 1e-4 --held-out public --out out"
        return tune.main(parsed(words.split()), lambda *_: None), tmp_path / "out"

    return run


def test_what_waits_in_buffers_is_not_shown_once_a_run_is_over(tmp_path):
    """In a process whose output is a file, which is buffered as by default."""
    (tmp_path / "script.py").write_text(BUFFERS)
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    program = (
        "import sys; from fastdp.__main__ import main; from fastdp.mechanisms import NegativeBinomialRuns as runs\n"
        "runs.draw = lambda self: 3\n"
        "main()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    words = "tune script.py:train --settings settings.json --delta 1e-4 --held-out public --out out"
    made = subprocess.run(
        [sys.executable, "-c", program, *words.split()], cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0 and "done: the best setting" in made.stdout
    assert "SECRET" not in made.stdout


def test_runs_share_no_random_numbers_and_no_working_directory(search, tmp_path):
    code, out = search(DRAWS.format(log=str(tmp_path / "log")))
    drawn = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert code == 0 and len(drawn) == 3
    assert all(len(set(of_all)) == 3 for of_all in zip(*drawn, strict=True))  # the seeds of one are not the next's
    assert {path.name for path in out.iterdir()} == {"best", "search.json", "search_card.md"}
    assert [path.name for path in (out / "best").iterdir()] == ["model"]
    made = set(map(int, (tmp_path / "log2").read_text().splitlines()[0].split()))  # by the first run, which is the best
    for path in (out / "best", out / "best" / "model"):  # made anew at the end: no time of its own run is on them
        assert path.stat().st_ino not in made and path.stat().st_mtime > 1e9


@pytest.mark.parametrize(
    "script, match",
    [
        (IMPORT, "failed with ValueError in .*script.py, line 5"),
        (TWO, "more noised steps than the optimizer or history"),  # the first on a model that is gone
        (BASE, "failed with Ends in .*script.py"),
        (UNITS, r"Group in all settings, or in none"),
        (RETURNS, r"is not known: the function must return \(score, optimizer\)"),
    ],
)
def test_an_error_of_a_run_quotes_nothing(search, tmp_path, capfd, script, match):
    code, _ = search(script.format(log=str(tmp_path / "log")))
    told = "".join(capfd.readouterr())
    assert code == 1 and "SECRET" not in told
    assert re.search(match, told), told


@pytest.mark.parametrize(
    "options, loader, last, match",
    [
        ("", POISSON.format(more=", seed=3"), 9, "drawn its batches by seed="),
        (", sample_rate=0.001, expected_batch_size=1", ORDINARY, 9, "in doubt"),
        ("", POISSON.format(more=""), 2, "in doubt"),  # ended with a batch in hand
        ("", POISSON.format(more=""), 9, ""),
    ],
)
def test_an_account_that_is_in_doubt_ends_the_search(search, capsys, options, loader, last, match):
    """What `epsilon()` would warn of, which a silent run does not show."""
    code, _ = search(LOADER.format(options=options, loader=loader, last=last))
    told = capsys.readouterr().err
    assert (code == 0) == (not match) and match in told
