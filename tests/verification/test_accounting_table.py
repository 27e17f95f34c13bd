"""The papers' (epsilon, delta) by GDP, to two decimals, and the same formula from another source."""

from __future__ import annotations

import pytest

from fastdp.accounting import epsilon_by

# noise multiplier, batch, records, epochs; the epsilon that Bu et al. (TMLR 2023) state at delta 1e-5
PAPERS = [(1.1, 256, 60_000, 60, 2.32), (1.3, 250, 50_000, 60, 1.96)]


def spent(sigma: float, batch: int, records: int, epochs: int, accountant: str) -> float:
    return epsilon_by([(sigma, batch / records, epochs * records // batch)], 1e-5, accountant)


@pytest.mark.parametrize("sigma, batch, records, epochs, stated", PAPERS)
def test_gdp_reproduces_what_the_papers_state(sigma, batch, records, epochs, stated):
    gdp, prv, rdp = (spent(sigma, batch, records, epochs, name) for name in ("gdp", "prv", "rdp"))
    assert f"{gdp:.2f}" == f"{stated:.2f}" and gdp < prv < rdp
    for other in (epochs - 1, epochs + 1):
        assert f"{spent(sigma, batch, records, other, 'gdp'):.2f}" != f"{stated:.2f}"


def test_another_source_of_the_same_formula():
    """Figures that the authors of GDP accounting publish with their code: MNIST, 15 epochs, sigma 1.3."""
    assert spent(1.3, 256, 60_000, 15, "gdp") == pytest.approx(0.8345, abs=2e-4)
