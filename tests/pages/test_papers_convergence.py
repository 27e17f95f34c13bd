"""The convergence paper's small experiments, on next to nothing: what they measure, write and refuse."""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from examples.papers import fixed_noise, housing, layerwise_loss, ntk_table, regression, resume, wine


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_as_rows(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "rows.csv"
    found = ntk_table.main(["--quick", "--networks", "2", "--steps", "20", "--out", str(out), "--plots", str(tmp_path)])
    rows = rows_of(out)
    assert len(rows) >= len(found) * 6 and {row["mode"] for row in rows} == {"quick"}
    values = {(row["case"], row["metric"]): float(row["value"]) for row in rows}
    assert values["no clipping", "share: symmetric"] == 1 and values["small R, flat", "share: symmetric"] < 1
    assert (tmp_path / "ntk_table.png").read_bytes().startswith(b"\x89PNG")


def test_small_layerwise_clipping_lifts_the_loss_and_a_large_r_does_not(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "rows.csv"
    small = "--quick --networks 5 --steps 500 --first-seed 2".split()
    curves = layerwise_loss.main([*small, "--out", str(out), "--plots", str(tmp_path)])
    assert bool(curves["layerwise", 0.1].rises.any()) and not bool(curves["layerwise", 100.0].rises.any())
    large = curves["layerwise", 100.0].losses
    assert bool((large[1:] <= large[:-1] * (1 + 1e-12)).all())
    values = {(row["case"], row["metric"]): float(row["value"]) for row in rows_of(out)}
    assert values["layerwise, R = 0.1 medians", "largest rise"] > 0.001
    assert values["layerwise, R = 100 medians", "largest rise"] == 0
    assert (tmp_path / "layerwise_loss.png").exists()


def test_noise_matters_less_at_a_smaller_learning_rate(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(fixed_noise, "TIME", 4.0)
    monkeypatch.setattr(fixed_noise, "RECORDS", 64)
    out = tmp_path / "rows.csv"
    curves = fixed_noise.main(["--quick", "--out", str(out), "--plots", str(tmp_path)])
    assert {key: len(found) for key, found in curves.items()} == {
        (r, s): 1 for r in (0.25, 0.0625) for s in (0.0, 16.0)
    }
    assert all(len(c[0]) == fixed_noise.POINTS + 1 for c in curves.values())
    values = {(row["case"], row["metric"]): float(row["value"]) for row in rows_of(out)}
    far = "largest distance from no noise"
    assert values["eta 0.25, noise 0", far] == 0 and values["eta 0.25, noise 16", far] > 0
    assert values["eta 0.25, neither noise nor clipping", far] > 0.01  # clipping matters, noise does not
    assert (tmp_path / "fixed_noise.png").exists()


def test_the_effect_of_noise_falls_with_the_learning_rate(monkeypatch):
    """As its root, so to a quarter at a sixteenth: 3 draws each, of noise that is far above the gradients."""
    monkeypatch.setattr(fixed_noise, "TIME", 16.0)
    monkeypatch.setattr(fixed_noise, "RECORDS", 64)
    far = {}
    for rate in (1.0, 0.0625):
        quiet = fixed_noise.train(0, rate, 0.0, 0.1)
        far[rate] = sum(float((fixed_noise.train(0, rate, 25.0, 0.1) - quiet).abs().max()) for _ in range(3))
    assert far[0.0625] < 0.7 * far[1.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made, draw = tmp_path_factory.mktemp("data"), torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=draw)
    table = torch.cat([x, x.sum(1, keepdim=True)], 1).tolist()
    lines = [";".join(["a", "b", "c", "target"]), *(";".join(f"{v:.4f}" for v in row) for row in table)]
    (made / wine.FILE).write_text("\n".join(lines) + "\n")
    with gzip.open(made / housing.FILE, "wt") as file:
        file.write("\n".join(lines).replace(";", ",") + "\n")
    return made


@pytest.mark.parametrize("script", [wine, housing], ids=["wine", "housing"])
def test_regression(script, folder, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(script, "PLAN", script.PLAN._replace(epochs=200, batch=0 if script is wine else 40))
    out = tmp_path / "rows.csv"
    found = script.main(["--data", str(folder), "--quick", "--seeds", "2", "--out", str(out), "--plots", str(tmp_path)])
    small, *_, last = (way.name for way in script.PLAN.ways)
    assert len(found) == 4 and {len(c) for c in found.values()} == {2} and last == "not private"
    rows = rows_of(out)
    spent = {row["metric"]: row for row in rows if row["case"] == small}
    train = str(int(100 * script.PLAN.share))
    assert float(spent["epsilon_prv"]["value"]) > 0 and spent["training loss"]["train_records"] == train
    assert not [row for row in rows if row["case"] == "not private" and row["metric"].startswith("epsilon")]
    assert all(c[0] > c[-1] for c in found["not private"])  # it learns
    assert (tmp_path / f"{script.__name__.rpartition('.')[2]}.png").exists()


def test_regression_has_the_papers_settings():
    """C.4: layers of 64, 64, 32 and 1, the numbers of records and steps; both noises cost the same epsilon."""
    sizes = [tuple(p.shape) for p in regression.network(11).parameters() if p.dim() > 1]
    assert sizes == [(64, 11), (64, 64), (32, 64), (1, 32)]
    for script, table, train, steps in ((wine, (1599, 12), 1279, 2000), (housing, (20640, 9), 18576, 3650)):
        plan = script.PLAN
        task = regression.split(torch.randn(table), plan.share)
        batch = plan.batch or train
        assert len(task.x) == train and plan.epochs * -(-train // batch) == steps
        found = regression.epsilons(plan.sigma, batch / train, steps, regression.delta_of(train))
        assert round(found["epsilon_gdp"], 1) == 4.4


def kept(folder=None, minutes=None):
    options = argparse.Namespace(checkpoints=folder, device="cpu", minutes=minutes)
    return resume.Checkpoint(options, "run", {"lr": 0.1})


def test_a_regression_run_measures_what_it_says(monkeypatch):
    """Without noise a step moves the weights by at most lr x R; the test loss is of the test part."""
    task = regression.split(torch.randn(50, 4, generator=torch.Generator().manual_seed(1)))
    task = task._replace(y=task.y + 20)  # so that all gradients point the same way
    way = regression.Way("local", "local", 0.01, 0.5)
    plan = wine.PLAN._replace(ways=(way,), sigma=0.0, epochs=40)
    models: list[nn.Module] = []
    network = regression.network
    monkeypatch.setattr(regression, "network", lambda *sizes: models.append(network(*sizes)) or models[-1])
    losses, metrics, steps = regression.run(plan, way, task, 0, plan.epochs, kept())
    torch.manual_seed(0)
    start = network(3)
    far = (
        torch.cat([(a - b).flatten() for a, b in zip(models[0].parameters(), start.parameters(), strict=True)])
        .norm()
        .detach()
    )
    assert steps == 40 and 0.5 < float(far) / (40 * way.lr * way.max_grad_norm) <= 1.0001
    for name, x, y in (("training loss", task.x, task.y), ("test loss", task.x_test, task.y_test)):
        assert metrics[name] == pytest.approx(regression.loss_of(models[0], x, y), rel=1e-6)
    assert len(losses) == regression.POINTS + 1 and metrics["training loss at half time"] == losses[10]
    assert losses[0] == pytest.approx(regression.loss_of(start, task.x, task.y), rel=1e-6)
    assert metrics["share longer than R"] > 0.9


def test_a_regression_run_goes_on_from_its_checkpoint(folder, tmp_path, monkeypatch):
    """Stopped after each part, it comes to the same curve and weights as a run in one go, where nothing is drawn."""
    _, numbers = regression.read(folder / wine.FILE, ";")
    task, way = regression.split(numbers), regression.Way("local", "local", 1.0, 0.1)
    plan = wine.PLAN._replace(sigma=0.0)
    whole, _, _ = regression.run(plan, way, task, 0, 40, kept())
    monkeypatch.setattr(resume.Checkpoint, "over", lambda self: True)
    stops = 0
    while True:
        try:
            losses, metrics, steps = regression.run(plan, way, task, 0, 40, kept(tmp_path))
            break
        except resume.Stopped:
            stops += 1
    assert stops == 19 and steps == 40 and losses == pytest.approx(whole, rel=1e-5) and whole[0] > 2 * whole[-1]


def test_the_split_is_the_same_in_every_run_and_standardized(folder):
    names, numbers = regression.read(folder / wine.FILE, ";")
    assert names == ["a", "b", "c", "target"] and numbers.shape == (100, 4)
    task = regression.split(numbers)
    assert (len(task.x), len(task.x_test)) == (80, 20) and task.y.shape == (80, 1)
    assert torch.allclose(task.x.mean(0), torch.zeros(3), atol=1e-5) and torch.allclose(task.x.std(0), torch.ones(3))
    assert torch.equal(task.x, regression.split(numbers).x)


def test_without_data_it_says_where_to_get_it(tmp_path):
    for script in (wine, housing):
        with pytest.raises(SystemExit, match="--data"):
            script.main(["--out", str(tmp_path / "rows.csv")])
        with pytest.raises(SystemExit, match="not in"):
            script.main(["--data", str(tmp_path), "--out", str(tmp_path / "rows.csv")])
