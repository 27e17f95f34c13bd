"""examples/bayesian.py: DP-SGD as a sampler against Hamiltonian Monte Carlo, what it spends, and what it refuses."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from fastdp.accounting import epsilon_of

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import bayesian

pytestmark = pytest.mark.slow  # `make test-all` runs it


def test_it_runs_and_says_what_it_spends(capsys: pytest.CaptureFixture[str]) -> None:
    bayesian.main(["--quick"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("regr", "netw"))]
    spent = [float(row[-1]) for row in rows]
    assert len(rows) == 2 + 3 + 2 + 2 and spent.count(math.inf) == 4  # the references are not private
    assert min(spent) > 0


def test_samples_predict_as_the_reference_at_the_epsilon_of_their_time() -> None:
    """Epsilon is that of one Gaussian mechanism with mu = R sqrt(time / 2 T), whatever step and momentum are."""
    data, (problem, _) = bayesian.cells(), bayesian.problems()
    assert (torch.cat([data.x, torch.ones(len(data.x), 1)], 1).norm(dim=1) <= problem.bound + 1e-6).all()
    truth = bayesian.reference(data, problem, 1.0, 200, seed=1)
    found, epsilon = bayesian.private(data, problem, bayesian.Way("", momentum=0.9), 6.0, 0.002, seed=1)
    prior = torch.full_like(truth, 0.5)
    assert float((found - truth).abs().mean()) < 0.03 < 0.2 < float((prior - truth).abs().mean())
    mu = problem.bound * math.sqrt(6.0 / 2)
    assert epsilon == pytest.approx(epsilon_of([(1 / mu, 1.0, 1)], bayesian.DELTA), rel=0.01)
