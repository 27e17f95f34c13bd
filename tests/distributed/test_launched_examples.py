"""Examples and commands that start a second process themselves share their steps with it."""

from __future__ import annotations

import json
import os

import pytest
import torch

from ..finetune.finetune_models import classifier, reviews
from .started import accuracy_and_epsilon, run, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo"),
    pytest.mark.filterwarnings("ignore"),
]
pytest.importorskip("transformers")


def test_the_command_finetune(tmp_path):
    model, data = classifier(tmp_path / "model", dropout=0.0), reviews(tmp_path / "reviews.csv", 120)
    more = ["--seed", "7", "--device", "cpu", "--accountant", "gdp", "--max-physical-batch-size", "32"]
    said = torchrun("-m", "fastdp", "finetune", str(model), str(data), "--task", "classify", "--epsilon", "8",
                    "--batch-size", "32", "--epochs", "2", "--out", str(tmp_path / "out"), *more)  # fmt: skip
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
