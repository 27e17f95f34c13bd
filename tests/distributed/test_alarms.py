"""No rank waits for one that has left by an error: two ranks and three, each started once."""

from __future__ import annotations

import os

import pytest
import torch

from .alarms import CASES
from .ranks import Launches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo"),
]
THREE = ["in_a_forward", "in_the_middle_of_a_backward", "by_all"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return Launches("tests.distributed.alarms", tmp_path_factory, two=CASES, three=THREE)


@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in CASES), *((3, name) for name in THREE)])
def test_none_waits(world, name, ranks):
    ranks.check(world, name)
