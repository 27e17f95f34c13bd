"""Two processes in the loops that people have make the steps of one, and their examples run."""

from __future__ import annotations

import os

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
    loops.check_loop(name, one, two)


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
