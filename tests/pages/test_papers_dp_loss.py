"""The experiments of the loss paper on synthetic images."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import fastdp
from examples.papers import common, dp_loss, dp_loss_report
from examples.papers import dp_loss_networks as networks
from fastdp.losses import DPLoss

pytestmark = pytest.mark.slow  # `make test-all` runs it


def fake(records: int = 60) -> common.Images:
    """Images of ten classes, each of its own pattern."""
    torch.manual_seed(0)
    patterns, y = torch.randn(10, 1, 28, 28), torch.arange(records) % 10
    return common.Images(patterns[y] + 0.1 * torch.randn(records, 1, 28, 28), y, patterns, torch.arange(10), "fake")


@pytest.fixture
def small(monkeypatch):
    """MNIST's setting with ten images of sixty in a batch."""
    monkeypatch.setattr(common, "mnist", lambda data: fake())
    monkeypatch.setitem(dp_loss.SETTINGS, "mnist", dp_loss.SETTINGS["mnist"]._replace(batch=10))


@pytest.mark.parametrize(
    ("make", "size", "shape"),
    [(networks.end_to_end, 26_010, (1, 28, 28)), (networks.end_to_end_cifar, 550_570, (3, 32, 32)),
     (networks.on_features, 20_778, (81, 7, 7)), (networks.on_features_cifar, 253_386, (243, 8, 8))],
)  # fmt: skip
def test_networks_are_the_papers(make, size, shape):
    """Of Table 2 the paper states the number of parameters; the others follow from their layers."""
    model = make()
    assert sum(p.numel() for p in model.parameters()) == size
    assert model(torch.randn(2, *shape)).shape == (2, 10)


def test_settings_cost_less_than_epsilon_3():
    for task, setting in dp_loss.SETTINGS.items():
        records = 50_000 if "cifar10" in task else 60_000
        steps = round(setting.epochs * records / setting.batch)
        spent = fastdp.accounting.epsilon_of([(setting.sigma, setting.batch / records, steps)], 1e-5, "rdp")
        assert 2 < spent < 3.1, (task, spent)


def test_every_loss_of_the_ablation_is_what_it_says():
    torch.manual_seed(0)
    model, setting = networks.end_to_end(), dp_loss.SETTINGS["mnist"]._replace(threshold=0.5, beta=3.0)
    x, y = torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])
    logits, found, terms = model(x).detach(), {}, {}
    for name in (*dp_loss.LOSSES, *dp_loss.ABLATION, *dp_loss.OTHERS):
        loss = dp_loss.loss_of(name, model, setting)
        found[name] = float(loss(model(x), y).detach())
        if isinstance(loss, DPLoss):
            terms[name] = loss.terms
            loss.remove()
    apart, truth, alpha = logits - F.one_hot(y, 10), float(F.cross_entropy(logits, y)), 1 / (1 + math.exp(0.5))
    p = logits.softmax(1)[torch.arange(4), y]
    focal, sse = float((-((1 - p) ** 5) * p.log()).mean()), float(apart.square().sum() / 8)
    wanted = {"cross-entropy": truth, "non-private": truth, "sse": sse, "sae": float(apart.abs().sum() / 4),
              "sse + cross-entropy": alpha * truth + (1 - alpha) * sse,
              "sse + focal": alpha * focal + (1 - alpha) * sse}  # fmt: skip
    wanted["dploss"] = wanted["sse + focal"] + (1 - alpha) / 3 * float(terms["dploss"]["reg"])
    for tenths in range(1, 11):
        huber = F.smooth_l1_loss(logits, F.one_hot(y, 10).float(), reduction="sum", beta=tenths / 10)
        wanted[f"huber {tenths / 10:g}"] = float(huber / 4)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_what_is_seen_of_a_model():
    """Norms of layers by hand; the singular value of a Hessian that is known."""
    torch.manual_seed(0)
    model, x = networks.end_to_end(), torch.randn(3, 1, 28, 28)
    found = dp_loss.layer_norms(model, x)
    with torch.no_grad():
        by_hand = [float(h.flatten(1).norm(dim=1).mean()) for h in (model[:1](x), model[:4](x), model[:8](x), model(x))]
    assert [*found["pre_activations"], found["logits"]] == pytest.approx(by_hand, rel=1e-5)
    assert found["weights"][0] == pytest.approx(float(model[0].weight.detach().norm()))
    line, inputs = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    seen = dp_loss.sharpness(line, lambda model: lambda out, y: out.square().mean(), inputs, torch.zeros(2))
    assert seen == pytest.approx(9.0, rel=1e-4)  # 2 / 2 x the largest eigenvalue of inputs' square


def test_a_run_writes_what_it_saw(tmp_path, small, monkeypatch):
    """And tells the loss the epoch, whole and counted from 0."""
    pytest.importorskip("matplotlib")
    seen, real = [], DPLoss.__call__
    monkeypatch.setattr(DPLoss, "__call__", lambda self, *args: seen.append(self.epoch) or real(self, *args))
    out = tmp_path / "papers_dp_loss.csv"
    rows = dp_loss.main(["--tasks", "mnist", "--epochs", "2", "--records", "40", "--out", str(out),
                         "--looks", "--losses", "cross-entropy", "dploss", "non-private"])  # fmt: skip
    assert set(seen) == {0.0, 1.0}
    assert {row["case"] for row in rows} == {"cross-entropy", "dploss", "non-private"}
    whole = {row["metric"]: row["value"] for row in rows if row["case"] == "dploss"}
    assert whole["epsilon_prv"] == pytest.approx(fastdp.accounting.epsilon_of([(1.23, 0.25, 8)], 1e-5, "prv"))
    assert {row["mode"] for row in rows} == {"short"} and {row["steps"] for row in rows if row.get("sigma")} == {8}
    epochs, details = (dp_loss_report.read(path) for path in dp_loss_report.files(out))
    mine = [row for row in epochs if row["case"] == "dploss"]
    assert [row["epoch"] for row in mine] == ["1", "2"]
    assert float(mine[-1]["accuracy"]) == pytest.approx(whole["accuracy"], rel=1e-5)
    assert float(mine[0]["epsilon_rdp"]) < float(mine[1]["epsilon_rdp"])
    assert len(mine[0]["weights"].split()) == 4 and len(mine[0]["pre_activations"].split()) == 3
    for case in ("cross-entropy", "dploss", "non-private"):
        private = {"cosine"} if case != "non-private" else set()
        assert {row["what"] for row in details if row["case"] == case} == {"confusion", "singular value", *private}
    assert len([1 for r in details if r["what"] == "cosine" and r["case"] == "dploss"]) == 4
    counted = [float(row["value"]) for row in details if row["what"] == "confusion" and row["epoch"] == "1"]
    assert sum(counted) == 3 * 40
    dp_loss.main(["--draw", "--out", str(out), "--plots", str(tmp_path / "plots")])
    assert (tmp_path / "plots" / "dp_loss_mnist_accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_modes_and_what_is_changed(tmp_path, monkeypatch):
    asked = []
    for name in ("mnist", "fashion_mnist", "cifar10"):
        monkeypatch.setattr(common, name, lambda data, name=name: asked.append(name) or fake())
    monkeypatch.setattr(dp_loss, "every", lambda options, task, data, setting, mode: [(task, setting, mode)])
    out = ["--out", str(tmp_path / "rows.csv")]
    assert {mode for _, _, mode in dp_loss.main(["--quick", *out])} == {"quick"} and asked == ["mnist", "fashion_mnist"]
    ((_, setting, mode),) = dp_loss.main(["--tasks", "mnist", "--beta", "7", "--threshold", "2", "--epochs", "4", *out])
    assert (setting.beta, setting.threshold, setting.epochs, mode) == (7.0, 2.0, 4, "short")
    assert [mode for _, _, mode in dp_loss.main(["--tasks", "mnist", *out])] == ["full"]
    with pytest.raises(SystemExit, match="nothing to draw"):
        dp_loss.main(["--draw", "--plots", str(tmp_path), *out])


def test_scatternet_features_are_normalised_and_kept(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="pip install kymatio"):
        patch.setitem(__import__("sys").modules, "kymatio.scattering2d.frontend.torch_frontend", None)
        networks.scattered(fake(), None)
    pytest.importorskip("kymatio.scattering2d.frontend.torch_frontend")
    found = networks.scattered(fake(), tmp_path)
    assert found.x.shape == (60, 81, 7, 7) and found.x.view(60, 3, -1).mean(2).abs().max() < 1e-5
    assert torch.equal(networks.scattered(fake(), tmp_path).x, found.x)
