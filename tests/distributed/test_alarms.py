"""No rank waits for one that has left by an error: two ranks and three, each started once."""

from __future__ import annotations

import os

import pytest
import torch

from .alarms import CASES
from .ranks import results, start

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo")
THREE = ["in_a_forward", "in_the_middle_of_a_backward", "by_all"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return results(start("tests.distributed.alarms", 2, folder, *CASES), folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return results(start("tests.distributed.alarms", 3, folder, *THREE), folder)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name, two):
    for rank, by_case in enumerate(two):
        assert by_case[name] is None, f"rank {rank}: {by_case[name]}"


@pytest.mark.parametrize("name", THREE)
def test_three_ranks(name, three):
    for rank, by_case in enumerate(three):
        assert by_case[name] is None, f"rank {rank}: {by_case[name]}"
