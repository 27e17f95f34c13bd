"""The experiment of the loss paper on synthetic images."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import fastdp
from examples.papers import common, dp_loss
from fastdp.losses import DPLoss


def fake(records: int = 60) -> common.Images:
    """Images of ten classes, each of its own pattern."""
    torch.manual_seed(0)
    patterns, y = torch.randn(10, 1, 28, 28), torch.arange(records) % 10
    return common.Images(patterns[y] + 0.1 * torch.randn(records, 1, 28, 28), y, patterns, torch.arange(10), "fake")


def test_networks_are_the_papers():
    sizes = [sum(p.numel() for p in make().parameters()) for make in (dp_loss.tanh_mnist, dp_loss.tanh_cifar)]
    assert sizes == [26010, 605226]
    assert dp_loss.tanh_mnist()(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert dp_loss.tanh_cifar()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_every_loss_of_the_ablation_is_what_it_says_and_couples_no_samples():
    torch.manual_seed(0)
    model, setting = dp_loss.tanh_mnist(), dp_loss.SETTINGS["mnist"]._replace(threshold=0.5, beta=300.0)
    x, y = torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])
    found = {}
    for name in (*dp_loss.LOSSES, *dp_loss.ABLATION):
        loss = dp_loss.loss_of(name, model, setting)
        assert fastdp.verify(model, lambda m, b, loss=loss: loss(m(b[0]), b[1]), (x, y)).ok
        found[name] = float(loss(model(x), y).detach())
        if isinstance(loss, DPLoss):
            alpha, terms = loss.alpha, loss.terms
            assert (alpha == 0) == name.startswith("sse")
            assert ("reg" in terms) == (name.startswith("dploss") or "reg" in name)
            loss.remove()
            found["terms"] = terms
    assert found["cross-entropy"] == pytest.approx(float(F.cross_entropy(model(x), y).detach()))
    alpha, share = 1 / (1 + math.exp(0.5)), math.exp(0.5) / (1 + math.exp(0.5))
    assert found["focal + sse"] == pytest.approx(alpha * found["focal"] + share * found["sse"], rel=1e-5)
    assert found["dploss"] == pytest.approx(found["focal + sse"] + share / 300 * found["terms"]["reg"], rel=1e-5)
    assert found["sse + reg"] == pytest.approx(found["sse"] + found["terms"]["reg"] / 300, rel=1e-5)
    assert len({round(value, 6) for name, value in found.items() if name != "terms"}) == 9


def test_a_run_writes_what_it_saw(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(common, "mnist", lambda data: fake())
    monkeypatch.setitem(dp_loss.SETTINGS, "mnist", dp_loss.SETTINGS["mnist"]._replace(batch=10))
    out = tmp_path / "rows.csv"
    rows = dp_loss.main(["--tasks", "mnist", "--epochs", "2", "--records", "40", "--seeds", "2", "--out", str(out),
                         "--plots", str(tmp_path)])  # fmt: skip
    assert out.read_text(encoding="utf-8").count("\n") == len(rows) + 1
    runs = {(row["case"], row["seed"]) for row in rows}
    assert runs == {(name, seed) for name in ("cross-entropy", "dploss") for seed in (0, 1)}
    mine = [row for row in rows if row["case"] == "dploss" and row["seed"] == 1]
    whole = {row["metric"]: row["value"] for row in mine if row["experiment"] == "DPLoss, MNIST"}
    assert whole["threshold"] == 1.0 and 0 <= whole["accuracy"] <= 1
    assert whole["epsilon_prv"] == pytest.approx(fastdp.accounting.epsilon_of([(2.15, 0.25, 8)], 1e-5, "prv"))
    assert {row["mode"] for row in rows} == {"short"} and {row["steps"] for row in mine if row["steps"]} == {8}
    by_epoch = {(row["epochs"], row["metric"]) for row in mine if "by epoch" in row["experiment"]}
    assert by_epoch == {(e, m) for e in (1, 2) for m in ("accuracy", *dp_loss.LOOKED_AT)}
    cosines = [row["value"] for row in mine if row["metric"] == "cosine"]
    assert all(0 < cosine <= 1 + 1e-6 for cosine in cosines) and len(set(cosines)) == 2
    assert (tmp_path / "papers_dp_loss_mnist_short.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "again").mkdir()
    dp_loss.main(["--draw", "--out", str(out), "--plots", str(tmp_path / "again")])
    assert (tmp_path / "again" / "papers_dp_loss_mnist_short.png").stat().st_size > 10_000
    assert dp_loss.kept(40) == [1, 5, 10, 15, 20, 25, 30, 35, 40] and dp_loss.kept(3) == [1, 2, 3]


def test_quick_leaves_cifar_out_unless_it_is_all(tmp_path, monkeypatch):
    asked = []
    for name in ("mnist", "fashion_mnist", "cifar10"):
        monkeypatch.setattr(common, name, lambda data, name=name: asked.append(name) or fake())
    monkeypatch.setattr(dp_loss, "write", lambda options, task, data, setting, mode: [(task, setting, mode)])
    out = ["--out", str(tmp_path / "rows.csv")]
    found = dp_loss.main(["--quick", *out])
    assert asked == ["mnist", "fashion_mnist"]
    assert {mode for _, _, mode in found} == {"quick"}
    assert [setting.threshold for _, setting, _ in dp_loss.main(["--tasks", "cifar10", *out])] == [15.0]
    ((_, setting, mode),) = dp_loss.main(["--tasks", "mnist", "--beta", "7", "--threshold", "2", "--epochs", "4", *out])
    assert (setting.beta, setting.threshold, setting.epochs, mode) == (7.0, 2.0, 4, "short")
    assert [mode for _, _, mode in dp_loss.main(["--tasks", "mnist", *out])] == ["full"]


def test_settings_are_trained_with_and_named(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(common, "mnist", lambda data: fake())
    monkeypatch.setattr(
        fastdp, "DPSGD", lambda *args, real=fastdp.DPSGD, **given: made.append(given) or real(*args, **given)
    )
    monkeypatch.setitem(dp_loss.SETTINGS, "mnist", dp_loss.SETTINGS["mnist"]._replace(batch=10))
    given = ["--tasks", "mnist", "--losses", "cross-entropy", "--epochs", "1", "--out", str(tmp_path / "rows.csv")]
    assert {row["case"] for row in dp_loss.main(given)} == {"cross-entropy"}
    assert {row["case"] for row in dp_loss.main([*given, "--momentum", "0", "--lr", "3"])} == {
        "cross-entropy, lr 3, momentum 0"
    }
    assert [(g["momentum"], g["lr"]) for g in made] == [(0.9, 4.0), (0.0, 3.0)]


def test_settings_are_chosen_on_training_images(tmp_path, monkeypatch):
    whole, seen = fake(), []
    monkeypatch.setattr(common, "mnist", lambda data: whole)
    monkeypatch.setattr(dp_loss, "run", lambda task, name, data, *rest: seen.append(data) or stop())
    with pytest.raises(KeyboardInterrupt):
        dp_loss.main(["--tasks", "mnist", "--held-out", "20", "--out", str(tmp_path / "rows.csv")])
    assert torch.equal(seen[0].x, whole.x[:40]) and torch.equal(seen[0].x_test, whole.x[40:])
    assert torch.equal(seen[0].y_test, whole.y[40:]) and len(seen[0].y) == 40
    with pytest.raises(ValueError, match="--held-out must be between 1 and 59"):
        dp_loss.held_out(whole, 60)


def stop():
    raise KeyboardInterrupt
