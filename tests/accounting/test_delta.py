"""A delta of 1 / records or more is warned of where epsilon is asked for."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.accounting import delta_problem, noise_multiplier_for


def test_where_delta_ends_to_mean_something():
    assert delta_problem(0.0099, 100) == "" and delta_problem(1e-5, 100) == ""
    assert "delta=0.01 is not below 1/100" in delta_problem(0.01, 100)
    assert delta_problem(1 / 3, 3) and delta_problem(1 / 49, 49) and delta_problem(1 / 60_000, 60_000)


def test_an_optimizer_warns_where_it_knows_the_records():
    model, data = nn.Linear(4, 2), TensorDataset(torch.randn(50, 4))
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    for (x,) in fastdp.poisson_loader(data, sample_rate=0.2, steps=2):
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        small = optimizer.epsilon(0.01)
    with pytest.warns(UserWarning, match=r"delta=0\.02 is not below 1/50.*0\.002 or less") as found:
        assert optimizer.epsilon(0.02) < small
    assert found[0].filename == __file__
    told = fastdp.DPSGD(nn.Linear(4, 2), lr=0.1, noise_multiplier=1.0, sample_rate=0.1, expected_batch_size=10)
    with pytest.warns(UserWarning, match="not below 1/100"):
        told.epsilon(0.5)


def test_a_noise_multiplier_for_no_delta():
    given = dict(target_epsilon=3.0, sample_rate=0.01, steps=10)
    with pytest.warns(UserWarning, match=r"delta=0\.01 is not below the sample rate 0\.01") as found:
        noise_multiplier_for(**given, delta=0.01)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noise_multiplier_for(**given, delta=1e-5)
