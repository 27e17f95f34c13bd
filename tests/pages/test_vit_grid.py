"""examples/papers/vit_grid.py: the diagonal where R is small, temperatures, and what the cells come to."""

from __future__ import annotations

import argparse
import csv
import math

import pytest
import torch

from examples.papers import common, pretrained, vit_grid

pytestmark = pytest.mark.slow  # `make test-all` runs it


def features(count=120, width=12, seed=0):
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(10, width, generator=draw)
    parts = []
    for _ in range(3):
        y = torch.randint(0, 10, (count,), generator=draw)
        parts.append((centres[y] + 0.5 * torch.randn(count, width, generator=draw), y))
    return pretrained.Features(*parts)


def options(**more):
    return argparse.Namespace(**{"batch": 30, "epochs": 3, **more})


def cell(data, case, lr, R, sigma, noise_seed=1):
    return vit_grid.train_cell(data, case, lr, R, 0, sigma, options(), noise_seed=noise_seed)[0]


@pytest.mark.parametrize("case", vit_grid.CASES, ids=str)
def test_where_r_is_small_only_lr_times_r_counts(case):
    data = features()
    one, two = (cell(data, case, lr, R, 1.0) for lr, R in ((300.0, 1e-3), (3000.0, 1e-4)))
    other = cell(data, case, 300.0, 1e-4, 1.0)
    assert one.metrics["clipped"] == two.metrics["clipped"] == 1.0 and one.metrics["accuracy"] > 0.2
    assert one.metrics["nll"] == pytest.approx(two.metrics["nll"], rel=1e-3)
    assert abs(one.metrics["nll"] - other.metrics["nll"]) > 0.02 * one.metrics["nll"]


def test_temperature_is_that_by_which_logits_are_too_large():
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40000, 5, generator=draw)
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    for wrong in (0.25, 1.0, 3.0):
        found = vit_grid.temperature(wrong * logits, labels)
        assert found == pytest.approx(wrong, rel=0.03)
        nll = lambda t, wrong=wrong: float(torch.nn.functional.cross_entropy(wrong * logits.double() / t, labels))
        assert nll(found) <= min(nll(0.99 * found), nll(1.01 * found))


def grid(accuracy):
    """Cells of lr x R, all clipped where R <= 1 and none where R >= 100."""
    cells = []
    for R in (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0):
        for lr in (0.001, 0.01, 0.1, 1.0):
            clipped = 1.0 if R <= 1 else 0.0 if R >= 100 else 0.5
            metrics = {"accuracy": accuracy(lr, R), "dev_accuracy": accuracy(lr, R) - 0.01, "clipped": clipped}
            cells.append(vit_grid.Cell("c", lr, R, 0, metrics))
    return cells


def test_what_accuracy_depends_on_is_told():
    found = vit_grid.summary(grid(lambda lr, R: 0.5 - 0.05 * abs(math.log10(lr * (R if R < 10 else 7)) + 2)))
    assert [found[name]["cells"] for name in ("any R", "small R", "large R")] == [24, 12, 8]
    small, large = found["small R"], found["large R"]
    assert small["accuracy_explained_by_lr_R"] == pytest.approx(1) and small["accuracy_explained_by_lr"] < 0.6
    assert large["accuracy_explained_by_lr"] == pytest.approx(1) and large["accuracy_explained_by_lr_R"] < 0.9
    assert small["best_lr"] * small["best_R"] == pytest.approx(0.01) and large["best_lr"] == 0.001
    cells = grid(lambda lr, R: 0.3)
    assert math.isnan(vit_grid.explained(cells, lambda cell: cell.lr))
    cells[5].metrics["dev_accuracy"], cells[7].metrics["accuracy"] = 0.9, 0.95
    best = vit_grid.summary(cells)["any R"]  # chosen on held-out images
    assert (best["best_lr"], best["best_R"], best["accuracy"]) == (cells[5].lr, cells[5].R, 0.3)


def test_the_experiment_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(vit_grid, "DEV", 120)
    torch.save([list(part) for part in features()], tmp_path / "kept")
    monkeypatch.setattr(vit_grid, "RADII", (1e-3, 1e3))
    monkeypatch.setattr(vit_grid, "RATES", (0.1, 1.0))
    arguments = ["--cache", str(tmp_path / "kept"), "--records", "120", "--test-records", "120", "--batch", "30",
                 "--epochs", "1", "--out", str(tmp_path / "o.csv"),
                 "--plots", str(tmp_path)]  # fmt: skip
    pytest.importorskip("matplotlib")
    cells = vit_grid.main(arguments)
    assert (tmp_path / "vit_grid.png").read_bytes()[:4] == b"\x89PNG"
    assert len(cells) == 4 * len(vit_grid.CASES)
    with (tmp_path / "vit_grid_cells.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == common.COLUMNS and len(written) == len(cells) * len(cells[0].metrics)
    assert "--cache FILE" in written[0]["command"] and " /" not in written[0]["command"]
    assert {float(row["epsilon"]) <= 2 for row in written} == {True} and len({row["sigma"] for row in written}) == 1
    with (tmp_path / "o.csv").open(newline="") as file:
        cases = {row["case"] for row in csv.DictReader(file)}
    assert {f"{case}; {R} R" for case in vit_grid.CASES for R in ("any", "small", "large")} == cases
    with pytest.raises(SystemExit, match="CIFAR-10"):
        vit_grid.main(arguments[2:])


def test_features_are_those_of_the_network():
    """In parts and together; bytes and floats alike."""
    body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 14, stride=14), torch.nn.Flatten())
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    one = pretrained.vit_features(body, images, 28, batch=2)
    two = pretrained.vit_features(body, images.float() / 255, 28, batch=5)
    assert one.shape == (5, 16)
    torch.testing.assert_close(one, two)
