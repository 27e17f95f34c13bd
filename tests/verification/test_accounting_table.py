"""The papers' (epsilon, delta), to two decimals."""

from __future__ import annotations

import math

import pytest

from fastdp.accounting import PAPERS, Setting, epsilon_of, table
from fastdp.errors import AccountingError


def test_gdp_reproduces_what_the_papers_state():
    found = table(setting for setting, _ in PAPERS)
    assert [f"{spent.gdp:.2f}" for spent in found] == [f"{epsilon:.2f}" for _, epsilon in PAPERS] == ["2.32", "1.96"]
    for spent in found:  # the approximation says less than the accountant that is exact to 0.01, that less than RDP
        assert spent.gdp < spent.prv < spent.rdp
    assert [f"{spent.gdp_uniform:.2f}" for spent in found] == ["3.09", "2.52"]  # so it was not uniform sampling


def test_an_epoch_more_or_less_would_show():
    for setting, epsilon in PAPERS:
        for epochs in (setting.epochs - 1, setting.epochs + 1):
            other = setting._replace(epochs=epochs)
            runs = [(other.noise_multiplier, other.batch / other.records, other.steps)]
            assert f"{epsilon_of(runs, other.delta, 'gdp'):.2f}" != f"{epsilon:.2f}"


def test_another_source_of_the_same_formula():
    """Figures that the authors of GDP accounting publish with their code: MNIST, 15 epochs, sigma 1.3."""
    found = table([Setting("MNIST", 1.3, 256, 60_000, 15, 1e-5)])[0]
    assert found.gdp == pytest.approx(0.8345, abs=2e-4)
    assert found.gdp_uniform == pytest.approx(1.0685, abs=2e-4)


def test_steps_and_limits():
    assert Setting("", 1.0, 250, 50_000, 60, 1e-5).steps == 12_000
    assert Setting("", 1.1, 256, 60_000, 60, 1e-5).steps == 14_062
    assert Setting("", 1.0, 10, 30, 0.1, 1e-5).steps == 0
    with pytest.raises(AccountingError, match="no step"):
        table([Setting("", 1.0, 10, 30, 0.1, 1e-5)])
    with pytest.raises(AccountingError, match="batch <= records"):
        table([Setting("", 1.0, 31, 30, 10, 1e-5)])
    nothing = table([Setting("", 0.0, 10, 100, 1, 1e-5)])[0]
    assert nothing[1:] == (math.inf,) * 4
