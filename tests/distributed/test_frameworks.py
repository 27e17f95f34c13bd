"""Two processes in the loops that people have make the steps of one, and their examples run."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from . import loops
from .ranks import results, start
from .started import accuracy_and_epsilon, torchrun

pytestmark = [
    pytest.mark.slow,
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


def test_opacus_names_in_parts():
    pytest.importorskip("sklearn")
    accuracy, epsilon = accuracy_and_epsilon(torchrun("examples/opacus_ddp.py", "--fsdp", "--quick"))
    assert accuracy > 0.5 and 2.9 < epsilon <= 3.0


def test_lightning_in_parts():
    pytest.importorskip("sklearn")
    out = torchrun("examples/lightning_module.py", "--quick", "--devices", "2", "--accelerator", "cpu", "--fsdp")
    accuracy, epsilon = accuracy_and_epsilon(out)
    assert accuracy > 0.6 and 2.9 < epsilon <= 3.0
