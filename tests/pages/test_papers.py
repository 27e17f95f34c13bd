"""docs/papers.md against its rows, and the two CNNs of the convergence paper on synthetic images."""

from __future__ import annotations

import contextlib
import csv

import pytest
import torch

import fastdp
from examples.papers import accounting, cifar10_cnn, classify, common, confidence, mnist_cnn, report

pytestmark = pytest.mark.slow  # `make test-all` runs it

SCRIPTS = {"mnist_cnn": mnist_cnn, "cifar10_cnn": cifar10_cnn}
SHAPES = {"mnist_cnn": (1, 28, 28), "cifar10_cnn": (3, 32, 32)}


def ran(stem, folder, monkeypatch, *more):
    """Rows of a script on synthetic images, ten classes of their own pattern, six of a batch: a step is cheap."""
    torch.manual_seed(0)
    patterns, y = torch.randn(10, *SHAPES[stem]), torch.arange(60) % 10
    images = common.Images(patterns[y] + 0.1 * torch.randn(60, *SHAPES[stem]), y, patterns, torch.arange(10), "fake")
    small = SCRIPTS[stem].SETTING._replace(images=lambda data: images, batch=6, seeds=1)
    monkeypatch.setattr(SCRIPTS[stem], "SETTING", small)
    return SCRIPTS[stem].main(["--out", str(folder / f"papers_{stem}.csv"), "--epochs", "0.1", *more])


# ---------------------------------------------------------------------- the page


def test_the_page_is_what_the_rows_say(monkeypatch, tmp_path):
    """The command writes it, and with --check tells an old one."""
    page = tmp_path / "papers.md"
    page.write_text(report.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(report, "PAGE", page)
    assert report.main(["--check"]) == 0, "run python examples/papers/report.py"
    page.write_text(page.read_text(encoding="utf-8").replace("| 2.32 |", "| 2.31 |", 1), encoding="utf-8")
    assert report.main(["--check"]) == 1 and report.main([]) == 0 and report.main(["--check"]) == 0


def rows_of(values, **columns):
    """Rows as they are read, by (mode, seed)."""
    blank = {**dict.fromkeys(common.COLUMNS, ""), "experiment": "E", "case": "c", "metric": "accuracy"}
    return [{**blank, "mode": mode, "seed": seed, "value": str(value), **{k: str(v) for k, v in columns.items()}}
            for (mode, seed), value in values.items()]  # fmt: skip


def test_a_cell_is_the_median_of_the_last_setting_in_the_highest_mode():
    """A seed that was run again counts once, runs of other settings are not mixed in; guarantees are bold."""
    asked = {"experiment": "E", "metric": "accuracy", "source": "P", "why": ""}
    asked = [{**asked, "case": c, "paper": said} for c, said in (("c", "0.96"), ("d", "guaranteed"), ("e", "0.3"))]
    rows = rows_of({("short", "0"): 0.1, ("quick", "0"): 0.2}, epochs=5) + rows_of({("full", "0"): 0.3}, epochs=10)
    rows += rows_of({("full", "0"): 0.4, ("full", "1"): 0.7, ("full", "2"): 0.9}, epochs=60)
    rows += rows_of({("full", "0"): 0.5}, epochs=60) + rows_of({("short", "0"): 0.00512}, case="d")
    assert report.experiment("E", {"accuracy": "correct"}, asked, rows).splitlines() == [
        "| case | runs | correct: paper | ours |", "| --- | --- | --- | --- |",
        "| c | 3 full | 96.0 % | 70.0 % (50.0 % to 90.0 %) |", "| d | 1 short |  | **0.51 %** |",
    ]  # fmt: skip
    shown = [report.number(*pair) for pair in (("nll", 0.12345), ("epsilon_gdp", 2.3243), ("traceability", 0.5))]
    assert shown == ["0.123", "2.32", "0.5"]


def test_files_of_other_columns_are_refused(tmp_path):
    (tmp_path / "papers_x.csv").write_text("experiment,value\nE,1\n")
    with pytest.raises(ValueError, match=r"papers_x.csv has the columns experiment, value"):
        report.read(tmp_path)


def test_the_papers_epsilons_by_gdp_to_two_decimals(tmp_path):
    rows = accounting.main(["--out", str(tmp_path / "a.csv")])
    found = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert round(found["MNIST CNN", "epsilon_gdp"], 2) == 2.32
    assert round(found["CIFAR-10 CNN", "epsilon_gdp"], 2) == 1.96
    for case in ("MNIST CNN", "CIFAR-10 CNN", "Fashion-MNIST, DPLoss"):
        gdp, prv, rdp = (found[case, f"epsilon_{name}"] for name in ("gdp", "prv", "rdp"))
        assert gdp < prv < rdp < 3  # GDP says less than the truth here


# ---------------------------------------------------------------------- the scripts


def test_help_and_wrong_arguments(capsys, tmp_path):
    for wrong, words in ((["--cases", "locale"], "no case 'locale'; there are: local"),
                         (["--epochs", "-1"], "--epochs must be positive"), (["--seeds", "0"], "--seeds must be 1"),
                         (["--draw"], "--draw needs --plots"),
                         (["--device", "abacus"], "--device abacus: ")):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            mnist_cnn.main(wrong)
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"(?s)missing.*CIFAR-10: "):
        cifar10_cnn.main(["--data", str(tmp_path)])


@pytest.mark.parametrize("stem", SCRIPTS)
def test_a_step_of_every_case(stem, tmp_path, monkeypatch):
    """Rows say what was run: epsilon is the accountant's of these steps, private cases only."""
    pytest.importorskip("matplotlib")
    rows = ran(stem, tmp_path, monkeypatch, "--full", "--plots", str(tmp_path))
    setting = SCRIPTS[stem].SETTING
    for case in setting.cases:
        mine = [row for row in rows if row["case"] == case.name]
        found, first = {row["metric"]: row["value"] for row in mine}, mine[0]
        assert first["steps"] == int(10 * (case.epochs or 0.1)) and first["mode"] == "short" and first["lr"] == case.lr
        assert 0 <= found["accuracy"] <= 1 and found["nll"] > 0 and found["ece"] <= found["mce"] * (1 + 1e-12)
        assert ("membership_auc" in found) == setting.membership
        if not case.private:
            assert "epsilon_gdp" not in found and "sigma" not in first
            continue
        sigma = setting.sigma if case.sigma is None else case.sigma
        spent = fastdp.accounting.epsilon_of([(sigma, 0.1, 1)], setting.delta, "gdp") if sigma else float("inf")
        assert first["epsilon"] == found["epsilon_gdp"] == spent and first["sigma"] == sigma
        both = f"{case.R:g}, biases {case.R_bias:g}" if case.R_bias else case.R
        assert (first["R"], first["style"], first["clipping"]) == (both, case.style, case.clipping)
        assert 0 <= found["dropped" if case.clipping == "global" else "clipped"] <= 1
    assert (tmp_path / f"papers_{stem}_reliability.png").read_bytes().startswith(b"\x89PNG")
    logits = confidence.kept(tmp_path / f"papers_{stem}_bins.csv", [setting.cases[0].name])[setting.cases[0].name]
    assert logits.accuracy == pytest.approx(next(row["value"] for row in rows if row["metric"] == "accuracy"), abs=1e-5)
    with (tmp_path / f"papers_{stem}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_the_papers_settings_are_the_defaults_and_full_runs_all():
    """The batch, noise, R and rate of both papers, in every run; --full has the paper's number of runs."""
    small, more = (classify.options_of("words", "mnist_cnn", mnist_cnn.SETTING, given) for given in ([], ["--full"]))
    assert set(small.cases) < set(more.cases) and len(more.cases) == len(mnist_cnn.CASES) and more.seeds == 5
    settings = [(s.batch, s.sigma, s.epochs) for s in (mnist_cnn.SETTING, cifar10_cnn.SETTING)]
    assert settings == [(256, 1.1, 60), (250, 1.3, 60)]
    pairs = {(case.R, case.lr) for script in (mnist_cnn, cifar10_cnn) for case in script.CASES[:2]}
    assert pairs == {(1.0, 0.15), (210.0, 0.0007), (1.5, 0.05), (75.0, 0.0007)}
    model = cifar10_cnn.network()  # by tensor: 1.5 for weights, 0.3 for biases
    groups = classify.style_of(next(case for case in cifar10_cnn.CASES if case.R_bias), model)
    assert {g["name"]: g["max_grad_norm"] for g in groups} == {
        name: 1.5 if name.endswith("weight") else 0.3 for name, _ in model.named_parameters()
    }


def test_a_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    """A pass in each process: the steps before count in epsilon and rows, momentum goes on; what is done is skipped."""
    case = next(case for case in mnist_cnn.CASES if case.name == "local, R = 1")._replace(momentum=0.9)
    monkeypatch.setattr(mnist_cnn, "SETTING", mnist_cnn.SETTING._replace(cases=(case,)))
    more = ["--epochs", "3", "--checkpoints", str(tmp_path / "kept")]
    states, found, keep = [], [], common.Checkpoint.keep

    def stopped(self, **state):
        keep(self, **state)
        if state.get("steps", 30) < 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(common.Checkpoint, "keep", stopped)
    for _ in range(4):
        found.append([])
        with contextlib.suppress(KeyboardInterrupt):
            found[-1] = ran("mnist_cnn", tmp_path, monkeypatch, *more)
        states.append(torch.load(next((tmp_path / "kept").glob("*.pt")), weights_only=True))
    assert [state["steps"] for state in states] == [10, 20, 30, 30] and [len(f) > 0 for f in found] == [0, 0, 1, 0]
    assert [state.get("done", False) for state in states] == [False, False, True, True] and len(
        states[2]["losses"]
    ) == 3
    row = next(row for row in found[2] if row["metric"] == "epsilon_gdp")
    assert row["steps"] == 30 and row["value"] == fastdp.accounting.epsilon_of([(1.1, 0.1, 30)], 1e-5, "gdp")
    first, second = (state["optimizer"]["state"][0]["momentum_buffer"] for state in states[:2])
    assert not torch.equal(first, second) and 0 < states[2]["counts"][0] <= states[2]["counts"][1]
    assert "done before" in capsys.readouterr().out
    with contextlib.suppress(KeyboardInterrupt):
        ran("mnist_cnn", tmp_path, monkeypatch, *more, "--records", "50")
    assert len(list((tmp_path / "kept").glob("*.pt"))) == 2  # another setting is another run
