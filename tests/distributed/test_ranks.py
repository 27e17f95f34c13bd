"""Several processes make the step of one: two ranks and three, each started once for all cases."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from .cases import CASES, EXACT
from .loading import check_records, correlated, persons, records
from .ranks import ROOT, Launches, killed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs gloo"),
]
THREE = ["unequal, layerwise, noise", "same_noise", "one_refuses", "records", "persons", "correlated"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return Launches("tests.distributed.cases", tmp_path_factory, two=CASES, three=THREE)


@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in CASES), *((3, name) for name in THREE)])
def test_the_steps_of_one_process(world, name, ranks):
    ranks.check(world, name, name in EXACT)


def test_all_ranks_hold_the_same_weights_by_a_secret_key_and_count_dropped_samples(ranks):
    two = ranks.of(2)
    assert two[0]["secret_key"] == two[1]["secret_key"]
    assert [found["drop_and_count"] for found in two] == [1, 1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [records, persons, correlated])
def test_the_records_do_not_depend_on_the_number_of_ranks(case, ranks):
    truth = case(0, 1)
    for found in (ranks.of(2), ranks.of(3)):
        mine = [by_case[case.__name__] for by_case in found]
        check_records(mine, truth)
        if case is persons:
            from .loading import PERSONS

            for parts in zip(*(each[0] for each in mine), strict=True):
                owners = [{PERSONS[record] for record in part} for part in parts]
                assert len(set().union(*owners)) == sum(map(len, owners))  # nobody is on two ranks


def test_loaders_for_correlated_noise_deal_one_batch_to_all(ranks):
    """Ranks agree on the key of a secret deal, make as many batches, and take each record of a pass once."""
    for kind, ((mark, mine), (other, others)) in enumerate(zip(*(each["cycles"] for each in ranks.of(2)), strict=True)):
        assert mark.partition("|")[0] == other.partition("|")[0] and len(mine) == len(others)  # | of a stream's loader
        if kind == 2:  # cyclic Poisson
            together = [{*a, *b} for a, b in zip(mine, others, strict=True)]
            assert all({number % 4 for number in batch} <= {step % 4} for step, batch in enumerate(together))
        else:
            assert sorted(sum(mine + others, [])) == [n for n in range(54 if kind == 0 else 60) for _ in range(2)]
        assert not any({*a} & {*b} for a, b in zip(mine, others, strict=True))


def test_the_example(tmp_path):
    """Started as people do; those of the other files are forked (tests/forked.py)."""
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FASTDP_CALIBRATE": "0", "PYTHONPATH": str(ROOT)}
    out = subprocess.run([*command, str(ROOT / "examples" / "ddp.py"), "--quick"], env=environment, timeout=200,
                         check=True, capture_output=True, text=True).stdout  # fmt: skip
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+), epsilon ([\d.]+) at", out).groups())
    assert accuracy > 0.3 and 2.9 < epsilon <= 3.0


@pytest.mark.parametrize("name", ["before_the_step", "within_the_step"])
def test_a_rank_is_killed(name, tmp_path):
    assert killed(name, tmp_path) < 10
