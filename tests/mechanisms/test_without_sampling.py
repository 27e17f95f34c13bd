"""examples/without_sampling.py: three ways at one epsilon, each accounted for as what it is."""

from __future__ import annotations

import pytest
import torch

from examples import without_sampling
from examples.papers.images import Images
from examples.without_sampling import ORDERED, SAMPLED, TREE
from fastdp.accounting import epsilon_of

pytestmark = pytest.mark.slow  # `make test-all` runs it


def images(train: int = 11_000, test: int = 500) -> Images:
    """Ten patterns, with noise."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (train + test,), generator=draw)
    patterns = torch.randn(10, 1, 28, 28, generator=draw)
    x = 0.3 * patterns[y] + torch.randn(len(y), 1, 28, 28, generator=draw)
    return Images(x[:train], y[:train], x[train:], y[train:], "patterns")


def test_a_tree_needs_less_noise_than_one_order_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = without_sampling.main(["--quick", "--seeds", "1", "--epsilons", "0.5"], images())[0.5]
    sampled, ordered, tree = (found[way][0] for way in (SAMPLED, ORDERED, TREE))
    assert sampled > tree > ordered + 0.05 > 0.2
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line[:18].strip() for line in lines] == [SAMPLED, ORDERED, TREE]
    assert all(0.48 < float(line[18:].split()[0]) <= 0.505 for line in lines)


def test_a_record_is_in_one_step_of_each_pass() -> None:
    task = without_sampling.task_of(images(5_600, 10), passes=3, batch=100, records=None)
    assert (len(task.train), task.steps) == (600, 6)
    assert not set(map(float, task.train.tensors[0][:, 0])) & set(map(float, task.held_out[0][:, 0]))
    sigma = without_sampling.noise_of(task, ORDERED, 2.0)
    # three Gaussian mechanisms are one, with less noise
    assert epsilon_of([(sigma / 3**0.5, 1.0, 1)], without_sampling.DELTA) == pytest.approx(2.0, abs=0.02)
    # and a pass of 6 steps is a tree of at most 3 nodes over each leaf
    assert without_sampling.noise_of(task, TREE, 2.0) == pytest.approx(3**0.5 * sigma, rel=1e-2)
    assert without_sampling.noise_of(task, SAMPLED, 2.0) < sigma
