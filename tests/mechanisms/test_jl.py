"""Norms by random projections: refused by the optimizers, for the reasons that benchmarks/jl.py measures."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import fastdp
from benchmarks import jl
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


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["jl", "--small", "--rounds", "1", "--system-allocator"])
    monkeypatch.setattr(jl, "sigma_for", lambda *_: 1.0)
    monkeypatch.setitem(jl.WORKLOADS, "mlp", ("tiny", (4, 6), lambda: nn.Linear(6, 10)))
    monkeypatch.setattr(jl, "peak_mib", lambda *_: 1.0)
    jl.main()
    out = capsys.readouterr().out
    assert "| tiny | 8 projections |" in out and "| k = 8 | 25% |" in out
