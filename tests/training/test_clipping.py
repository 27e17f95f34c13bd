"""Clipping functions: their formulas, one's own, and a change between steps."""

from __future__ import annotations

import pytest
import torch

import fastdp
from fastdp.errors import ClippingError, StepError

from ..runs import backward, data, model_of, steps


def test_set_clipping_changes_factors_and_noise_but_not_the_accounting():
    model = model_of()
    optimizer = fastdp.DPSGD(
        model, lr=0.0, noise_multiplier=1.0, max_grad_norm=0.1, expected_batch_size=6, sample_rate=0.1
    )
    steps(optimizer, model, 1)
    optimizer.set_clipping("global", max_grad_norm=20.0)
    assert optimizer.max_grad_norm == 20.0 and optimizer._privacy.clipping.sensitivity == 20.0
    steps(optimizer, model, 1)
    assert optimizer.history == [(1.0, 0.1, 2)]
    backward(model, data())
    with pytest.raises(StepError, match="between steps"):
        optimizer.set_clipping("local")


def test_clipping_functions_have_their_formulas():
    norms = torch.tensor([0.0, 0.5, 1.0, 4.0])
    for clipping, want in {
        "local": [1, 1, 1, 0.25], "global": [1, 1, 0, 0], "automatic": [100, 1 / 0.51, 1 / 1.01, 1 / 4.01],
    }.items():  # fmt: skip
        found = fastdp.ops.clip_factors(norms.square(), 1.0, clipping)
        assert found.tolist() == pytest.approx(want, rel=2e-5, abs=1e-5), clipping
    assert fastdp.ops.clip_factors(norms.square(), 1.0, "automatic", gamma=0)[0] == 0
    with pytest.raises(ValueError, match="local"):
        fastdp.ops.clip_factors(norms, 1.0, "other")


def test_a_clipping_function_of_ones_own():
    model = model_of()
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, expected_batch_size=6, clipping=lambda n: 0.5 / (n + 1)
    )
    steps(optimizer, model, 1)
    for wrong, message in (
        (lambda n: n / n, "exceed"),
        (lambda n: n.sum(), "one factor"),
        (lambda n: -2 / n, "exceed"),
    ):
        optimizer.set_clipping(wrong)
        with pytest.raises(ClippingError, match=message):
            backward(model, 100 * data())
        optimizer.zero_grad()
