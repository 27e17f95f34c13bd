"""Models that fully_shard has cut make the step of one process: two ranks and three, each started once."""

from __future__ import annotations

import itertools
import os
import re

import numpy as np
import pytest
import torch

from fastdp.distributed.scatter import BUCKET, ends
from fastdp.distributed.shards import Part

from .. import forked
from .checkpoints import FOLDER, STATES, saved, taken_up
from .loading import check_records, correlated, persons, records
from .messages import CASES as MESSAGES
from .ranks import ROOT, Launches, killed
from .restarted import check_restart
from .sharded import EXACT, FOUR, OTHERS
from .sharded_errors import CASES as ERRORS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo"),
]
TWO = {**EXACT, **OTHERS, **ERRORS, **MESSAGES, **STATES, "saved": saved}
CASES = {**TWO, **FOUR, "taken_up": taken_up}
THREE = [
    "unequal and empty",
    "tied",
    "layerwise",
    "same_noise",
    "one_refuses",
    "in_order",
    "in_order_by_persons",
    "in_order_correlated",
    "taken_up",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Where two ranks save a checkpoint, three find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("saved") / "checkpoint"))
        launches = Launches("tests.distributed.test_sharded", tmp_path_factory, two=TWO, three=THREE, four=FOUR)
        launches.of(2)
        yield launches


@pytest.mark.parametrize(
    ("world", "name"),
    [*((2, name) for name in TWO), *((3, name) for name in THREE), *((4, name) for name in FOUR)],
)
def test_the_steps_of_one_process(world, name, ranks):
    ranks.check(world, name, name in EXACT or name in FOUR)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_checkpoints_of_two_ranks_are_taken_up_by_three_and_by_one(ranks):
    found = [by_case["saved"] for by_case in ranks.of(2)] + [by_case["taken_up"] for by_case in ranks.of(3)]
    found.append(taken_up(0, 1, wrap=lambda model: model))
    assert len({key for _, _, key in found}) == 3  # of each run another
    for each, history, _ in found:
        assert history == [(1e-9, 0.1, 5)]
        assert max(np.abs(a - b).max() for a, b in zip(each, found[0][0], strict=True)) < 1e-6


def test_groups_share_collectives_within_the_memory_of_two_and_a_bucket():
    def most_held(sizes, last):
        """Until each group; small sums are laid out beside themselves when the collective begins."""
        held, running, collected, laid = [], 0, 0, 0
        for size, end in zip(sizes, last, strict=True):
            collected, laid = collected + size, laid + size * (size < million)
            held.append(running + collected + laid)
            running, collected, laid = (collected, 0, 0) if end else (running, collected, laid)
        return list(itertools.accumulate(held, max))

    def wholes(size):
        return [(torch.empty(size // 4, device="meta"), Part(torch.Size([size // 4]), 0, 0, 1))]

    million, saved = 1 << 20, {}
    models = {
        "a head and blocks": [525] + [218] * 32 + [525, 0.004],
        "blocks and a norm": [70] * 12 + [0.004],
        "equal blocks": [70] * 12,
        "small groups": [0.5] * 24,
        "adapters": [9.9] * 80,
    }
    some = itertools.product([0.3, 2, 30, 100, 400], repeat=4)
    for name, sizes in [*models.items(), *(("", each) for each in some)]:
        sizes = [int(size * million) for size in sizes]
        last = ends([wholes(size) for size in sizes])
        saved[name] = last.count(False)
        assert last[-1]
        for held, alone in zip(most_held(sizes, last), most_held(sizes, [True] * len(sizes)), strict=True):
            # of small groups up to two buckets run and wait
            assert held <= alone + (BUCKET if min(sizes) >= BUCKET else 3 * BUCKET), sizes
    assert saved["equal blocks"] == 0
    assert saved["adapters"] == 80 - 27
    assert saved["small groups"] == 23
    assert min(saved["a head and blocks"], saved["blocks and a norm"]) >= 1


@pytest.mark.filterwarnings("ignore")
def test_torchrun_begins_all_ranks_anew(tmp_path):
    check_restart(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "case"),
    [("in_order", records), ("in_order_by_persons", persons), ("in_order_correlated", correlated)],
)
def test_the_records_do_not_depend_on_the_number_of_ranks(name, case, ranks):
    truth = case(0, 1)
    for found in (ranks.of(2), ranks.of(3)):
        check_records([by_case[name] for by_case in found], truth)


def test_the_example(tmp_path):
    pytest.importorskip("sklearn")
    command = [str(ROOT / "examples" / "fsdp.py"), "--quick", "--save", str(tmp_path / "checkpoint")]
    done = forked.torchrun(2, *command, imports=["sklearn.datasets", "torch.distributed.checkpoint"])
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+), epsilon ([\d.]+) at", done.stdout).groups())
    assert accuracy > 0.3 and 2.9 < epsilon <= 3.0
    assert (tmp_path / "checkpoint" / ".metadata").exists()


def test_a_rank_is_killed(tmp_path):
    assert killed("sharded_before_a_forward", tmp_path) < 10
