"""The step without devices: what it holds and sends, beside an ordinary one."""

from __future__ import annotations

import csv

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastdp
from fastdp.errors import ParameterError

pytest.importorskip("torch.testing._internal.distributed.fake_pg")
scale = pytest.importorskip("benchmarks.scale")


@pytest.mark.parametrize("lora, copies", [(0, 1), (4, 1), (0, 2)])
def test_a_private_step_sends_what_an_ordinary_one_does(lora, copies):
    setting = scale.Setting("small", 8, 32, lora, copies)
    ordinary, private = (scale.one_step(setting, kind) for kind in (False, True))
    assert private.sent["all-gather"] == ordinary.sent["all-gather"]
    (number, size), (ordinary_number, ordinary_size) = (m.sent["reduce-scatter"] for m in (private, ordinary))
    assert number == ordinary_number and size <= 1.03 * ordinary_size  # padded to whole shares
    more = private.sent["all-reduce"][1] - ordinary.sent.get("all-reduce", (0, 0))[1]
    assert more <= 8 + 0.01 * ordinary_size  # the number of samples that contribute nothing
    assert private.peak_by["weights"] == ordinary.peak_by["weights"]
    assert private.peak_by["moments"] == ordinary.peak_by["moments"]


def test_sums_too_large_for_a_common_buffer_go_out_in_one_call_a_group():
    found = [scale.one_step(scale.Setting("layer", 64, 64), kind) for kind in (False, True)]
    ordinary, private = (meter.sent["reduce-scatter"] for meter in found)
    assert private[0] == ordinary[0] == 4 and private[1] <= 1.03 * ordinary[1]  # layer, tokens, head, the last norm


def test_adapters_hold_no_more_than_an_ordinary_step():
    found = [scale.one_step(scale.Setting("layer", 64, 2048, 16), kind) for kind in (False, True)]
    ordinary, private = (sum(meter.peak_by.values()) for meter in found)
    assert private <= 1.05 * ordinary


def test_rows_and_text(tmp_path, capsys):
    scale.main(
        ["--sizes", "small", "--ranks", "4", "--tokens", "16", "--lora", "0", "--out", str(tmp_path / "rows.csv")]
    )
    assert "reduce-scatter" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["step"] for row in rows] == ["ordinary", "private"] and all(float(row["peak_gib"]) > 0 for row in rows)


def test_parameters_without_numbers_are_refused():
    with FakeTensorMode(), pytest.raises(ParameterError, match="fake, without values"):
        fastdp.DPSGD(nn.Linear(2, 2), lr=0.1, noise_multiplier=1.0, expected_batch_size=2)
    torch.manual_seed(0)
