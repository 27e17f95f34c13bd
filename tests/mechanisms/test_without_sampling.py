"""examples/without_sampling.py: three ways at one epsilon, each accounted for as what it is."""

from __future__ import annotations

import pytest
import torch

from examples import without_sampling
from examples.papers.images import Images
from examples.without_sampling import ORDERED, SAMPLED, TREE

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
