"""Models that fully_shard has cut make the step of one process: two ranks and three, each started once."""

from __future__ import annotations

import os
import pickle
import re

import numpy as np
import pytest
import torch

from .. import forked
from .checkpoints import FOLDER, STATES, saved, taken_up
from .loading import persons, records
from .ranks import ROOT, results, start
from .sharded import EXACT, FOUR, OTHERS
from .sharded_errors import CASES as ERRORS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo")
TWO = {**EXACT, **OTHERS, **ERRORS, **STATES, "saved": saved}
CASES = {**TWO, **FOUR, "taken_up": taken_up}
THREE = [
    "unequal and empty",
    "tied",
    "layerwise",
    "same_noise",
    "one_refuses",
    "in_order",
    "in_order_by_persons",
    "taken_up",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Where two ranks save one, and others find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("saved") / "checkpoint"))
        yield


@pytest.fixture(scope="module")
def two(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("two")
    return results(start("tests.distributed.test_sharded", 2, folder, *TWO), folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory, two):
    folder = tmp_path_factory.mktemp("three")
    return results(start("tests.distributed.test_sharded", 3, folder, *THREE), folder)


def check(name, found):
    for rank, by_case in enumerate(found):
        said = by_case[name]
        assert not isinstance(said, str), f"rank {rank}: {said}"
        if name in EXACT or name in FOUR:
            norms, weights, epsilon, truth = said
            assert norms < 1e-6 and weights < 1e-6 and epsilon == truth == found[0][name][2]


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(name, two):
    check(name, two)


def test_four_ranks(tmp_path):
    found = results(start("tests.distributed.test_sharded", 4, tmp_path, *FOUR), tmp_path)
    for name in FOUR:
        check(name, found)


@pytest.mark.parametrize("name", THREE)
def test_three_ranks(name, three):
    check(name, three)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_checkpoints_of_two_ranks_are_taken_up_by_three_and_by_one(two, three):
    found = [by_case["saved"] for by_case in two] + [by_case["taken_up"] for by_case in three]
    found.append(taken_up(0, 1, wrap=lambda model: model))
    assert len({key for _, _, key in found}) == 3  # of each run another
    for weights, history, _ in found:
        assert history == [(1e-9, 0.1, 5)]
        assert max(np.abs(a - b).max() for a, b in zip(weights, found[0][0], strict=True)) < 1e-6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "case"), [("in_order", records), ("in_order_by_persons", persons)])
def test_the_records_do_not_depend_on_the_number_of_ranks(name, case, two, three):
    steps, _, weights, epsilon = case(0, 1)
    for found in (two, three):
        mine = [by_case[name] for by_case in found]
        parts = zip(*(each[0] for each in mine), strict=True)
        assert [sorted(sum(own, [])) for own in parts] == [sorted(step) for step in steps]
        for each in mine:
            assert each[3] == epsilon
            assert np.array_equal(each[2], mine[0][2]) and np.abs(each[2] - weights).max() < 1e-6


def test_the_example(tmp_path):
    pytest.importorskip("sklearn")
    command = [str(ROOT / "examples" / "fsdp.py"), "--quick", "--save", str(tmp_path / "checkpoint")]
    done = forked.torchrun(2, *command, imports=["sklearn.datasets", "torch.distributed.checkpoint"])
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+), epsilon ([\d.]+) at", done.stdout).groups())
    assert accuracy > 0.3 and 2.9 < epsilon <= 3.0
    assert (tmp_path / "checkpoint" / ".metadata").exists()


def test_a_rank_is_killed(tmp_path):
    processes = start("tests.distributed.killed", 2, tmp_path, "sharded_before_a_forward")
    try:
        processes[1].wait(60)
        processes[0].wait(60)
    finally:
        for process in processes:
            process.kill()
    found = pickle.loads((tmp_path / "0.pickle").read_bytes())["sharded_before_a_forward"]
    assert isinstance(found, float) and found < 10, found
