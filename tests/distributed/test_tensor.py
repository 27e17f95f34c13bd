"""Models whose layers are split over processes make the step of one process: two to four ranks, each started once."""

from __future__ import annotations

import os
import re

import pytest
import torch

from fastdp.distributed.shards import Part, placed_within
from fastdp.ops.noise import Noise
from fastdp.optim import fused_update

from .. import forked
from .ranks import ROOT, Launches
from .tensor import CASES, COPIES, EXACT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo"),
]
TWO = [name for name in CASES if name not in COPIES]
THREE = ["words, sequence, loss", "same_noise"]
FOUR = [*COPIES, "same_noise"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return Launches("tests.distributed.tensor", tmp_path_factory, two=TWO, three=THREE, four=FOUR)


@pytest.mark.parametrize(
    ("world", "name"),
    [*((2, name) for name in TWO), *((3, name) for name in THREE), *((4, name) for name in FOUR)],
)
def test_the_steps_of_one_process(world, name, ranks):
    if ranks.of(world)[0][name] == "skipped":
        pytest.skip("transformers is not there, or too old")
    ranks.check(world, name, name in EXACT or name in COPIES)


def test_the_example():
    pytest.importorskip("sklearn")
    command = [str(ROOT / "examples" / "tensor_parallel.py"), "--quick"]
    done = forked.torchrun(2, *command, imports=["sklearn.datasets", "torch.distributed.fsdp"])
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+), epsilon ([\d.]+) at", done.stdout).groups())
    assert accuracy > 0.3 and 2.9 < epsilon <= 3.0


@pytest.mark.parametrize("in_vain", [0, 1 << 20])
def test_noise_by_runs_is_that_of_the_whole(in_vain, monkeypatch):
    monkeypatch.setattr(fused_update, "_IN_VAIN", {"cpu": in_vain})
    monkeypatch.setattr(fused_update, "_AT_ONCE", 100)
    total, noise = torch.randn(7, 10), Noise(3)
    whole = noise.add_scaled_(total.clone(), 0.7, 0.3, 5)
    for rank in range(3):
        part = Part(total.shape, 1, rank, 3)
        for inner in (None, Part(part.box.local_shape, 0, 1, 2)):
            place = placed_within(part, inner)
            rows = slice(None) if inner is None else slice(inner.low, inner.high)
            parameter = torch.nn.Parameter(total[rows, part.low : part.high].clone())
            key = id(parameter)
            sums, places = {key: parameter.detach().clone()}, {key: 5 + place.first}
            release = fused_update.Release(sums, places, noise, 0.7, 0.3, {key: place})
            assert torch.equal(release.gradient(parameter), whole[rows, part.low : part.high])
