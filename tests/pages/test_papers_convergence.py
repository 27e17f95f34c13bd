"""The convergence paper's small experiments, on next to nothing: what they measure, write and refuse."""

from __future__ import annotations

import csv
import gzip

import pytest
import torch

from examples.papers import fixed_noise, housing, layerwise_loss, regression, wine

pytestmark = pytest.mark.slow  # `make test-all` runs it


def values_of(path):
    with path.open(newline="") as file:
        return {(row["case"], row["metric"]): row for row in csv.DictReader(file)}


def test_small_layerwise_clipping_lifts_the_loss_and_a_large_r_does_not(tmp_path):
    out = tmp_path / "rows.csv"
    small = "--quick --networks 5 --steps 500 --first-seed 2".split()
    curves = layerwise_loss.main([*small, "--out", str(out)])
    assert bool(curves["layerwise", 0.1].rises.any()) and not bool(curves["layerwise", 100.0].rises.any())
    large = curves["layerwise", 100.0].losses
    assert bool((large[1:] <= large[:-1] * (1 + 1e-12)).all())
    rises = {case: float(row["value"]) for (case, metric), row in values_of(out).items() if metric == "largest rise"}
    assert rises["layerwise, R = 0.1 medians"] > 0.001 and rises["layerwise, R = 100 medians"] == 0


def test_noise_matters_less_at_a_smaller_learning_rate(monkeypatch, tmp_path):
    """As the root of it, so to a quarter at a sixteenth: 3 draws each, of noise that is far above the gradients."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(fixed_noise, "TIME", 16.0)
    monkeypatch.setattr(fixed_noise, "RECORDS", 64)
    far = {}
    for rate in (1.0, 0.0625):
        quiet = fixed_noise.train(0, rate, 0.0, 0.1)
        far[rate] = sum(float((fixed_noise.train(0, rate, 25.0, 0.1) - quiet).abs().max()) for _ in range(3))
    assert far[0.0625] < 0.7 * far[1.0]
    monkeypatch.setattr(fixed_noise, "TIME", 4.0)
    out = tmp_path / "rows.csv"
    fixed_noise.main(["--quick", "--out", str(out), "--plots", str(tmp_path)])
    name = "largest distance from no noise"
    found = {case: float(row["value"]) for (case, metric), row in values_of(out).items() if metric == name}
    assert found["eta 0.25, noise 0"] == 0 and found["eta 0.25, noise 16"] > 0
    assert found["eta 0.25, neither noise nor clipping"] > 0.01  # clipping matters, noise does not
    assert (tmp_path / "fixed_noise.png").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made, draw = tmp_path_factory.mktemp("data"), torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=draw)
    table = torch.cat([x, x.sum(1, keepdim=True)], 1).tolist()
    lines = [";".join(["a", "b", "c", "target"]), *(";".join(f"{v:.4f}" for v in row) for row in table)]
    (made / wine.PLAN.file).write_text("\n".join(lines) + "\n")
    with gzip.open(made / housing.PLAN.file, "wt") as file:
        file.write("\n".join(lines).replace(";", ",") + "\n")
    return made


@pytest.mark.parametrize("script", [wine, housing], ids=["wine", "housing"])
def test_regression(script, folder, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="missing"):
        script.main(["--data", str(tmp_path), "--out", str(tmp_path / "rows.csv")])
    monkeypatch.setattr(script, "PLAN", script.PLAN._replace(epochs=200, batch=0 if script is wine else 40))
    out, stem = tmp_path / "rows.csv", script.__name__.rpartition(".")[2]
    found = script.main(["--data", str(folder), "--quick", "--seeds", "2", "--out", str(out), "--plots", str(tmp_path)])
    assert len(found) == 4 and {len(c) for c in found.values()} == {2}
    rows, small = values_of(out), script.PLAN.ways[0].name
    assert float(rows[small, "epsilon_prv"]["value"]) > 0
    assert rows[small, "training loss"]["train_records"] == str(int(100 * script.PLAN.share))
    assert ("not private", "epsilon_prv") not in rows
    assert all(c[0] > c[-1] for c in found["not private"])  # it learns
    assert (tmp_path / f"{stem}.png").exists()


def test_regression_has_the_papers_settings(folder):
    """C.4: layers of 64, 64, 32 and 1, the numbers of records and steps; both noises cost the same epsilon. The split
    is the same in every run, and standardized."""
    sizes = [tuple(p.shape) for p in regression.network(11).parameters() if p.dim() > 1]
    assert sizes == [(64, 11), (64, 64), (32, 64), (1, 32)]
    for script, table, train, steps in ((wine, (1599, 12), 1279, 2000), (housing, (20640, 9), 18576, 3650)):
        plan = script.PLAN
        batch = plan.batch or train
        assert len(regression.split(torch.randn(table), plan.share).x) == train
        assert plan.epochs * -(-train // batch) == steps
        found = regression.epsilons(plan.sigma, batch / train, steps, 1 / (1.1 * train))
        assert round(found["epsilon_gdp"], 1) == 4.4
    names, numbers = regression.read(folder / wine.PLAN.file, ";")
    task = regression.split(numbers)
    assert names == ["a", "b", "c", "target"] and task.y.shape == (80, 1)
    assert torch.allclose(task.x.mean(0), torch.zeros(3), atol=1e-5) and torch.allclose(task.x.std(0), torch.ones(3))
    assert torch.equal(task.x, regression.split(numbers).x)
