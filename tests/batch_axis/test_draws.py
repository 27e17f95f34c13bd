"""Comparing results of trials, also of large ones, which are compared in parts."""

from __future__ import annotations

import pytest
import torch

from fastdp.batch_axis.probe_calls import are_close, is_close


@pytest.fixture(params=[1 << 18, 64])
def parts(request, monkeypatch):
    monkeypatch.setattr("fastdp.batch_axis.probe_calls._AT_ONCE", request.param)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("row", [0, 17, 39])
def test_one_number_of_one_row_is_seen(row):
    a = torch.randn(40, 9)
    b = a * (1 + 1e-7)
    assert is_close(a, b)
    b[row, 4] += 1e-2
    assert not is_close(a, b)
    chosen = torch.ones(40, dtype=torch.bool)
    assert not are_close(a, b, chosen)
    chosen[row] = False
    assert are_close(a, b, chosen)


@pytest.mark.usefixtures("parts")
def test_a_small_row_beside_a_large_one_is_judged_by_itself():
    a = torch.randn(40, 9)
    a[3] *= 1e8
    b = a.clone()
    b[4] += 1e-2
    assert not is_close(a, b)


@pytest.mark.usefixtures("parts")
def test_infinite_numbers_and_whole_ones():
    a = torch.full((40, 9), float("-inf"))
    assert is_close(a, a.clone()) and not is_close(a, -a)
    ids = torch.arange(360).view(40, 9)
    assert is_close(ids, ids.clone()) and not is_close(ids, ids + 1)
    assert are_close(ids, ids.clone(), torch.zeros(40, dtype=torch.bool))
