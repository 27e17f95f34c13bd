"""Models that fully_shard has cut make the step of one process: two ranks and three, each started once."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from .loading import persons, records
from .ranks import results, start
from .sharded import EXACT, OTHERS
from .sharded_errors import CASES as ERRORS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo")
CASES = {**EXACT, **OTHERS, **ERRORS}
THREE = ["unequal and empty", "tied", "layerwise", "same_noise", "one_refuses", "in_order", "in_order_by_persons"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return results(start("tests.distributed.test_sharded", 2, folder), folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return results(start("tests.distributed.test_sharded", 3, folder, *THREE), folder)


def test_checkpoints_of_two_ranks_are_taken_up_by_three_and_by_one(tmp_path, monkeypatch):
    from .checkpoints import FOLDER, taken_up

    monkeypatch.setenv(FOLDER, str(tmp_path / "checkpoint"))
    found = []
    for world, name in ((2, "saved"), (3, "taken_up")):
        folder = tmp_path / name
        folder.mkdir()
        found += [
            by_case[name] for by_case in results(start("tests.distributed.checkpoints", world, folder, name), folder)
        ]
    found.append(taken_up(0, 1, wrap=lambda model: model))
    keys = {each[2] for each in found}
    assert len(keys) == 3  # of each run
    for weights, history, _ in found:
        assert history == [(1e-9, 0.1, 5)]
        for a, b in zip(weights, found[0][0], strict=True):
            assert np.abs(a - b).max() < 1e-6


def check(name, found):
    for rank, by_case in enumerate(found):
        said = by_case[name]
        assert not isinstance(said, str), f"rank {rank}: {said}"
        if name in EXACT:
            norms, weights, epsilon, truth = said
            assert norms < 1e-6 and weights < 1e-6 and epsilon == truth == found[0][name][2]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name, two):
    check(name, two)


@pytest.mark.parametrize("name", THREE)
def test_three_ranks(name, three):
    check(name, three)


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
