"""Norms by random projections: refused by the optimizers, for the reasons that benchmarks/jl.py measures."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from torch import nn

import fastdp
from benchmarks import jl
from fastdp.accounting import epsilon_of
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


def test_epsilon_of_one_step_is_the_integral_over_chi() -> None:
    """Without sampling, delta is the mean over chi of that of a Gaussian mechanism with mu = sqrt(k / chi) / sigma."""
    sigma, delta, projections = 2.0, 1e-3, 4

    def of_gaussian(mu: float, epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))

    def spent(epsilon: float) -> float:
        def at(log: float) -> float:
            x = math.exp(log)
            return of_gaussian(math.sqrt(projections / x) / sigma, epsilon) * chi2.pdf(x, projections) * x

        return float(quad(at, -12, 6, limit=200)[0])

    wanted = brentq(lambda epsilon: spent(epsilon) - delta, 0.01, 20)
    assert jl.epsilon(sigma, projections, rate=1.0, steps=1, delta=delta) == pytest.approx(wanted, rel=0.02)


def test_the_grid_agrees_with_prv_and_estimates_cost_epsilon() -> None:
    exact = jl.epsilon(1.0, None, rate=0.02, steps=100)
    assert exact == pytest.approx(epsilon_of([(1.0, 0.02, 100)], jl.DELTA), abs=0.03)
    assert exact < jl.epsilon(1.0, 128, rate=0.02, steps=100) < jl.epsilon(1.0, 32, rate=0.02, steps=100)
    values, chances = jl.sensitivities(16)
    assert np.dot(values, chances) > 1 and sum(chances) == pytest.approx(1)


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["jl", "--small", "--rounds", "1", "--system-allocator"])
    monkeypatch.setattr(jl, "sigma_for", lambda *_: 1.0)
    monkeypatch.setitem(jl.WORKLOADS, "mlp", ("tiny", (4, 6), lambda: nn.Linear(6, 10)))
    monkeypatch.setattr(jl, "peak_mib", lambda *_: 1.0)
    jl.main()
    out = capsys.readouterr().out
    assert "| tiny | 8 projections |" in out and "| k = 8 | 25% |" in out
