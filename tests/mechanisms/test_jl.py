"""Norms by random projections: refused by the optimizers, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastdp
from fastdp.errors import ClippingError
from fastdp.mechanisms import DPFTRL


def test_optimizers_refuse_it_with_the_reason() -> None:
    model = nn.Linear(3, 1)
    ways = (
        lambda norms: fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, norms=norms),
        lambda norms: DPFTRL(model, lr=0.1, noise_multiplier=1.0, norms=norms),
        lambda norms: fastdp.privatize(
            torch.optim.Adam(model.parameters()), model, noise_multiplier=1.0, norms=norms
        ),
    )  # fmt: skip
    for way in ways:
        with pytest.raises(ClippingError, match="docs/mechanisms.md.*Leave norms= out"):
            way("jl")
        with pytest.raises(ValueError, match="not 'sketch'"):
            way("sketch")
        way("exact").detach()
