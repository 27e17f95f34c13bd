"""Two processes in the loops that people have make the steps of one, and their examples run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from .. import forked
from . import loops
from .ranks import LOOPS, ROOT, results, start

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo"),
    pytest.mark.filterwarnings("ignore"),
]
pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of one process, and of two."""
    folders = [tmp_path_factory.mktemp("ranks") for _ in range(2)]
    begun = [
        start("tests.distributed.loops", world, folder, *names)
        for world, folder, names in zip((1, 2), folders, (loops.ALONE, ()), strict=True)
    ]
    return [results(each, folder) for each, folder in zip(begun, folders, strict=True)]


@pytest.mark.parametrize("name", loops.CASES)
def test_two_ranks(name, found):
    (one,), two = found
    for rank, by_case in enumerate(two):
        assert not isinstance(by_case[name], str), f"rank {rank}: {by_case[name]}"
    if name not in loops.ALONE:
        return
    assert not isinstance(one[name], str), f"one process: {one[name]}"
    weights, history, epsilon, *more = one[name]
    for mine, spent, theirs, *others in (by_case[name] for by_case in two):
        assert spent == history and theirs == epsilon
        assert max(np.abs(np.subtract(p, q)).max() for p, q in zip(mine, weights, strict=True)) < 1e-5
        assert mine == two[0][name][0]  # all processes hold the same, bit for bit
        for logs, truth in zip(others, more, strict=True):
            assert [log.keys() for log in logs] == [log.keys() for log in truth]
            for log, true in zip(logs, truth, strict=True):
                assert all(log[key] == pytest.approx(value, abs=1e-3) for key, value in true.items())


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(*command: str) -> str:
    """As people start it."""
    environment = {**os.environ, **forked.SETTINGS}
    return said_by(subprocess.run([sys.executable, *command], env=environment, timeout=200, capture_output=True,
                                  text=True, cwd=ROOT))  # fmt: skip


def torchrun(*command: str) -> str:
    return said_by(forked.torchrun(2, *command, imports=LOOPS))


def accuracy_and_epsilon(out: str) -> tuple[float, float]:
    found = re.findall(r"^accuracy ([\d.]+).*epsilon ([\d.]+)", out, flags=re.M)
    assert len(found) == 1, out  # said by one process
    return float(found[0][0]), float(found[0][1])


def test_accelerate():
    pytest.importorskip("sklearn")
    accuracy, epsilon = accuracy_and_epsilon(torchrun("examples/accelerate_loop.py", "--cpu", "--quick"))
    assert accuracy > 0.6 and 2.9 < epsilon <= 3.0


def test_trainer_of_transformers(tmp_path):
    pytest.importorskip("sklearn")
    out = torchrun("examples/hf_ddp.py", "--quick", "--output", str(tmp_path))
    accuracy, epsilon = accuracy_and_epsilon(out)
    assert accuracy > 0.5 and 2.9 < epsilon <= 3.0
    assert {"model.safetensors", "privacy.json"} <= {path.name for path in tmp_path.iterdir()}
    assert out.count("'train_loss'") == 1  # logged by one process


ON_CPU = "tests/distributed/fsdp_on_cpu.py"


def test_accelerate_in_parts():
    pytest.importorskip("sklearn")
    found = accuracy_and_epsilon(torchrun(ON_CPU, "examples/accelerate_loop.py", "--cpu", "--fsdp", "--quick"))
    assert found[0] > 0.6 and 2.9 < found[1] <= 3.0


def test_trainer_of_transformers_in_parts(tmp_path):
    pytest.importorskip("sklearn")
    out = torchrun(ON_CPU, "examples/hf_ddp.py", "--fsdp", "--quick", "--output", str(tmp_path))
    accuracy, epsilon = accuracy_and_epsilon(out)
    assert accuracy > 0.5 and 2.9 < epsilon <= 3.0
    assert {"model.safetensors", "privacy.json"} <= {path.name for path in tmp_path.iterdir()}


def test_lightning():
    pytest.importorskip("sklearn")
    out = run("examples/lightning_module.py", "--quick", "--devices", "2", "--accelerator", "cpu")
    accuracy, epsilon = accuracy_and_epsilon(out)
    assert accuracy > 0.6 and 2.9 < epsilon <= 3.0


def test_lightning_in_parts():
    pytest.importorskip("sklearn")
    out = run("examples/lightning_module.py", "--quick", "--devices", "2", "--accelerator", "cpu", "--fsdp")
    accuracy, epsilon = accuracy_and_epsilon(out)
    assert accuracy > 0.6 and 2.9 < epsilon <= 3.0


@pytest.mark.parametrize("words", [["examples/opacus_ddp.py"], ["examples/opacus_ddp.py", "--fsdp"]])
def test_opacus_names(words):
    pytest.importorskip("sklearn")
    accuracy, epsilon = accuracy_and_epsilon(torchrun(*words, "--quick"))
    assert accuracy > 0.5 and 2.9 < epsilon <= 3.0


def test_the_command_finetune(tmp_path):
    more = ["--seed", "7", "--device", "cpu", "--accountant", "gdp", "--max-physical-batch-size", "32"]
    said = run("examples/finetune_ddp.py", "--out", str(tmp_path / "out"), *more)
    assert said.count("done: epsilon") == 1 and "2 share each step" in said  # said by one process
    card = json.loads((tmp_path / "out" / "privacy_card.json").read_text())
    assert card["epsilon"] <= 8 and (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert (tmp_path / "out" / "journal.jsonl").read_text().count('"digest"') == card["steps"]
    assert not (tmp_path / "out.secret.key").exists()


def test_ray():
    pytest.importorskip("ray.train.torch")
    pytest.importorskip("sklearn")
    accuracy, epsilon = accuracy_and_epsilon(run("examples/ray_ddp.py", "--quick"))
    assert accuracy > 0.5 and 2.9 < epsilon <= 3.0
