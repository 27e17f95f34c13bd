"""docs/papers.md against its rows, and the two CNNs of the convergence paper on synthetic images."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fastdp
from examples.papers import accounting, cifar10_cnn, classify, common, confidence, mnist_cnn, report, resume
from fastdp.calibration import calibration

SCRIPTS = {"mnist_cnn": mnist_cnn, "cifar10_cnn": cifar10_cnn}


def fake(shape: tuple[int, ...], name: str = "fake", records: int = 60) -> common.Images:
    """Images of ten classes, each of its own pattern."""
    torch.manual_seed(0)
    patterns, y = torch.randn(10, *shape), torch.arange(records) % 10
    return common.Images(patterns[y] + 0.1 * torch.randn(records, *shape), y, patterns, torch.arange(10), name)


SHAPES = {"mnist_cnn": (1, 28, 28), "cifar10_cnn": (3, 32, 32)}


def ran(stem: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[common.Row]:
    """Rows of a script on synthetic images: six of a batch, so that a step is cheap."""
    script, images = SCRIPTS[stem], fake(SHAPES[stem])
    small = script.SETTING._replace(images=lambda data: images, batch=6, seeds=1)
    monkeypatch.setattr(script, "SETTING", small)
    return script.main(["--out", str(folder / f"papers_{stem}.csv"), "--epochs", "0.1", *more])


# ---------------------------------------------------------------------- the page


def test_the_page_is_what_the_rows_say():
    text = report.PAGE.read_text(encoding="utf-8")
    assert report.page(text, report.figures(report.FIGURES), report.read(report.DATA)) == text, (
        "run python examples/papers/report.py"
    )


def rows_of(values: dict[tuple[str, str], float], **columns: object) -> list[common.Row]:
    """Rows as they are read, by (mode, seed)."""
    blank = dict.fromkeys(common.COLUMNS, "")
    return [
        {**blank, "experiment": "E", "case": "c", "metric": "accuracy", "mode": mode, "seed": seed, "value": str(value),
         "command": f"python {mode}.py", **{k: str(v) for k, v in columns.items()}}
        for (mode, seed), value in values.items()
    ]  # fmt: skip


ASKED = [{"experiment": "E", "case": "c", "metric": "accuracy", "paper": "0.96", "source": "P", "why": "because"}]


def test_ours_is_the_median_of_the_highest_mode():
    rows = rows_of({("short", "0"): 0.1, ("quick", "0"): 0.2}, epochs=5)
    rows += rows_of({("full", "0"): 0.5, ("full", "1"): 0.7, ("full", "2"): 0.9}, epochs=60)
    table = report.experiment("E", {"accuracy": "correct"}, ASKED, rows).splitlines()
    assert table == [
        "| case | correct: paper | ours |",
        "| --- | --- | --- |",
        "| c | 96.0 % | 70.0 % (50.0 % to 90.0 %) |",
    ]
    found = report.ours(rows, "E", "c", "accuracy")
    assert found is not None and found.values == (0.5, 0.7, 0.9)
    assert report.ours(rows, "E", "other", "accuracy") is None


def test_runs_of_other_settings_and_runs_again_are_not_mixed():
    """A median over 10 and 60 epochs would be of nothing; a seed that was run again counts once."""
    rows = rows_of({("short", "0"): 0.1, ("short", "1"): 0.2}, epochs=10) + rows_of({("short", "0"): 0.6}, epochs=20)
    found = report.ours(rows, "E", "c", "accuracy")
    assert found is not None and found.values == (0.6,)
    again = report.ours(rows + rows_of({("short", "0"): 0.8}, epochs=20), "E", "c", "accuracy")
    assert again is not None and again.values == (0.8,)


def test_numbers_are_shown_in_their_units():
    shown = [report.number(*pair) for pair in (("ece", 0.00512), ("test_accuracy", 0.5), ("nll", 0.12345),
                                               ("epsilon_gdp", 2.3243), ("traceability", 0.5))]  # fmt: skip
    assert shown == ["0.51 %", "50.0 %", "0.123", "2.32", "0.5"]


def test_a_table_has_what_was_run_and_what_the_paper_states():
    """Cases without runs are left out; guarantees are bold; runs of different number or mode are told apart."""
    rows = rows_of({("full", "0"): 0.1, ("full", "1"): 0.1}) + rows_of({("short", "0"): 0.2}, case="d")
    asked = [
        {**ASKED[0], "case": case, "paper": said} for case, said in (("c", "guaranteed"), ("d", "not"), ("e", "0.3"))
    ]
    lines = report.experiment("E", {"accuracy": "correct"}, asked[:2], rows).splitlines()
    assert (
        lines[::2] == ["| case | runs | correct |", "| c | 2 full | **10.0 %** |"]
        and lines[3] == "| d | 1 short | 20.0 % |"
    )
    lines = report.experiment("E", {"accuracy": "correct"}, asked, rows).splitlines()
    assert lines[3:] == ["| d | 1 short |  | 20.0 % |"]


def test_wrong_files_are_refused(tmp_path):
    (tmp_path / "papers_x.csv").write_text("experiment,value\nE,1\n")
    with pytest.raises(ValueError, match=r"papers_x.csv has the columns experiment, value"):
        report.read(tmp_path)
    twice = tmp_path / "twice.csv"
    twice.write_text("experiment,case,metric,paper,source,why\n" + "E,c,accuracy,0.9,P,\n" * 2)
    with pytest.raises(ValueError, match="two rows for"):
        report.figures(twice)
    with pytest.raises(ValueError, match="must have the columns"):
        report.figures(tmp_path / "papers_x.csv")


def test_every_row_and_figure_kept_can_be_read():
    """Modes are known, values are numbers, commands name a script that there is and no folder."""
    for row in report.read(report.DATA):
        float(row["value"])
        script = row["command"].split()[1]
        assert (report.ROOT / script).exists() and " /" not in row["command"], row
    for row in report.figures(report.FIGURES):
        assert row["paper"] and row["source"], row


def test_check_tells_an_old_page(monkeypatch, tmp_path):
    page = tmp_path / "papers.md"
    shutil.copy(report.PAGE, page)
    monkeypatch.setattr(report, "PAGE", page)
    assert report.main(["--check"]) == 0
    page.write_text(page.read_text().replace("| 2.32 |", "| 2.31 |", 1))
    assert report.main(["--check"]) == 1
    report.main([])
    assert page.read_text() == (report.ROOT / "docs/papers.md").read_text()


# ---------------------------------------------------------------------- the accountant


def test_the_papers_epsilons_by_gdp_to_two_decimals(tmp_path):
    rows = accounting.main(["--out", str(tmp_path / "a.csv")])
    found = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert round(found["MNIST CNN", "epsilon_gdp"], 2) == 2.32
    assert round(found["CIFAR-10 CNN", "epsilon_gdp"], 2) == 1.96
    for case in ("MNIST CNN", "CIFAR-10 CNN", "Fashion-MNIST, DPLoss"):
        gdp, prv, rdp = (found[case, f"epsilon_{name}"] for name in ("gdp", "prv", "rdp"))
        assert gdp < prv < rdp < 3  # GDP says less than the truth here


# ---------------------------------------------------------------------- the scripts


@pytest.mark.parametrize("stem", SCRIPTS)
def test_help_and_wrong_arguments(stem, capsys, tmp_path):
    script = SCRIPTS[stem]
    with pytest.raises(SystemExit, match="0"):
        script.main(["--quick", "--help"])
    assert "--same-epsilon" in capsys.readouterr().out
    for wrong, words in ((["--cases", "locale"], "no case 'locale'; there are: local"),
                         (["--epochs", "-1"], "--epochs must be positive"), (["--seeds", "0"], "--seeds must be 1"),
                         (["--draw"], "--draw needs --plots"), (["--device", "abacus"], "--device abacus: "),
                         (["--minutes", "3"], "needs --checkpoints DIR")):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            script.main(wrong)
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--data DIR"):
        script.main([])
    with pytest.raises(SystemExit, match=r"(?s)missing.*(MNIST|CIFAR-10): "):
        script.main(["--data", str(tmp_path)])


@pytest.mark.parametrize("stem", SCRIPTS)
def test_a_step_of_every_case(stem, tmp_path, monkeypatch, capsys):
    """Rows say what was run: epsilon is the accountant's of these steps, private cases only."""
    pytest.importorskip("matplotlib")
    rows = ran(stem, tmp_path, monkeypatch, "--full", "--plots", str(tmp_path))
    setting = SCRIPTS[stem].SETTING
    for case in setting.cases:
        mine = [row for row in rows if row["case"] == case.name]
        found, first = {row["metric"]: row["value"] for row in mine}, mine[0]
        assert first["steps"] == int(10 * (case.epochs or 0.1)) and first["mode"] == "short" and first["lr"] == case.lr
        assert (
            0 <= found["accuracy"] <= 1 and found["nll"] > 0 and found["ece"] <= found["mce"] * (1 + 1e-12)
        )  # alike in one bin
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
    for kind in ("reliability", "confidence", "truth"):
        assert (tmp_path / f"papers_{stem}_{kind}.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / f"papers_{stem}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_the_papers_settings_are_the_defaults_and_full_runs_all():
    """The batch, noise, R and rate of both papers, in every run; --full has the paper's number of runs."""
    small, more = (
        classify.options_of("words", "cifar10_cnn", cifar10_cnn.SETTING, given) for given in ([], ["--full"])
    )
    assert set(small.cases) < set(more.cases) and len(more.cases) == len(cifar10_cnn.CASES)
    setting = mnist_cnn.SETTING
    assert classify.options_of("words", "mnist_cnn", setting, ["--full"]).seeds == 5
    assert (setting.batch, setting.sigma, setting.epochs) == (256, 1.1, 60)
    assert (cifar10_cnn.SETTING.batch, cifar10_cnn.SETTING.sigma) == (250, 1.3)
    pairs = {(case.R, case.lr) for script in (mnist_cnn, cifar10_cnn) for case in script.CASES[:2]}
    assert pairs == {(1.0, 0.15), (210.0, 0.0007), (1.5, 0.05), (75.0, 0.0007)}


def test_by_tensor_every_tensor_has_its_own_r():
    """1.5 for weights and 0.3 for biases; the noise is that of all tensors' sensitivity together."""
    model = cifar10_cnn.network()
    case = next(case for case in cifar10_cnn.CASES if case.R_bias)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, clipping="global", expected_batch_size=4,
                             style=classify.style_of(case, model))  # fmt: skip
    groups = {group.name: group.max_grad_norm for group in optimizer._privacy.clipping.groups}
    assert groups == {name: 1.5 if name.endswith("weight") else 0.3 for name, _ in model.named_parameters()}
    assert optimizer.max_grad_norm == pytest.approx((5 * 1.5**2 + 5 * 0.3**2) ** 0.5)
    optimizer.detach()


def test_a_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    """A pass in each process: the steps before count in epsilon and rows, momentum goes on; what is done is skipped."""
    case = next(case for case in mnist_cnn.CASES if case.name == "local, R = 1")._replace(momentum=0.9)
    monkeypatch.setattr(mnist_cnn, "SETTING", mnist_cnn.SETTING._replace(cases=(case,)))
    monkeypatch.setattr(resume.Checkpoint, "over", lambda self: True)
    more = ["--epochs", "3", "--checkpoints", str(tmp_path / "kept"), "--minutes", "9"]
    states, found = [], []
    for _ in range(4):
        found.append(ran("mnist_cnn", tmp_path, monkeypatch, *more))
        states.append(torch.load(next((tmp_path / "kept").glob("*.pt")), weights_only=True))
    assert [state["steps"] for state in states] == [10, 20, 30, 30] and [len(f) > 0 for f in found] == [0, 0, 1, 0]
    assert [state["done"] for state in states] == [False, False, True, True] and len(states[2]["losses"]) == 3
    row = next(row for row in found[2] if row["metric"] == "epsilon_gdp")
    assert row["steps"] == 30 and row["value"] == fastdp.accounting.epsilon_of([(1.1, 0.1, 30)], 1e-5, "gdp")
    assert sum(n for *_, n in states[1]["optimizer"]["fastdp"]["history"]) == 20
    first, second = (state["optimizer"]["state"][0]["momentum_buffer"] for state in states[:2])
    assert not torch.equal(first, second) and 0 < states[2]["counts"][0] <= states[2]["counts"][1]
    longer = ran("mnist_cnn", tmp_path, monkeypatch, *more[2:], "--epochs", "4")
    assert longer[0]["steps"] == 40 and "done before" in capsys.readouterr().out
    other = ran("mnist_cnn", tmp_path, monkeypatch, *more, "--records", "50")
    assert other == [] and len(list((tmp_path / "kept").glob("*.pt"))) == 2  # another setting is another run


def test_rows_that_were_cut_off_are_of_the_same_run(tmp_path, monkeypatch, capsys):
    """Killed with its rows half written, a run writes them of the weights that it had; nothing is trained again."""
    more = ["--cases", "local, R = 1", "--checkpoints", str(tmp_path / "kept"), "--epochs", "1"]
    written = common.write

    def killed(*arguments: object) -> None:
        written(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common, "write", killed)
        ran("mnist_cnn", tmp_path, monkeypatch, *more)
    again = {row["metric"]: row["value"] for row in ran("mnist_cnn", tmp_path, monkeypatch, *more)}
    with open(tmp_path / "papers_mnist_cnn.csv", newline="") as file:
        losses = [row["value"] for row in csv.DictReader(file) if row["metric"] == "nll"]
    assert len(losses) == 2 and losses[0] == losses[1] and float(losses[0]) == pytest.approx(again["nll"], rel=1e-5)
    fewer = ran("mnist_cnn", tmp_path, monkeypatch, *more, "--test-records", "5")
    assert fewer and ran("mnist_cnn", tmp_path, monkeypatch, *more, "--test-records", "5") == []
    capsys.readouterr()
    assert ran("mnist_cnn", tmp_path, monkeypatch, *more[:-1], "0.5") == []
    assert "--checkpoints has it after 10 steps, and these are 5: another folder begins anew" in capsys.readouterr().out


def test_same_epsilon_and_rows_on_the_way(tmp_path, monkeypatch):
    """Fewer steps with less noise cost the paper's epsilon; rows on the way are "short" and cost less."""
    rows = ran("mnist_cnn", tmp_path, monkeypatch, "--same-epsilon", "--every", "1", "--epochs", "1.1", "--cases",
               "local, R = 1")  # fmt: skip
    spent = [(row["steps"], row["value"]) for row in rows if row["metric"] == "epsilon_gdp"]
    assert [steps for steps, _ in spent] == [10, 11]
    assert spent[0][1] < spent[1][1] <= 2.32 < spent[1][1] + 0.02


def test_nothing_longer_than_R_makes_local_and_global_clipping_the_same():
    """So R = 210 tells the two functions apart only where gradients are longer."""
    data, weights = fake((1, 28, 28)), {}
    for clipping in ("local", "global"):
        torch.manual_seed(1)
        model = mnist_cnn.network()
        optimizer = fastdp.DPSGD(model, lr=7e-4, noise_multiplier=1.1, max_grad_norm=210.0, clipping=clipping,
                                 expected_batch_size=6, seed=3)  # fmt: skip
        for _ in range(3):
            F.cross_entropy(model(data.x[:6]), data.y[:6]).backward()
            assert float(optimizer.norms.max()) < 210
            optimizer.step()
            optimizer.zero_grad()
        optimizer.detach()
        weights[clipping] = torch.cat([p.detach().ravel() for p in model.parameters()])
    assert torch.equal(weights["local"], weights["global"])


def test_pictures_are_drawn_from_the_rows_kept(tmp_path):
    logits, labels = 3 * torch.randn(200, 10), torch.randint(0, 10, (200,))
    found, path = calibration(logits, labels), tmp_path / "x_bins.csv"
    few = torch.randn(20, 10)
    for mode, some in (("short", few), ("short", logits), ("quick", few)):  # a later run counts
        of = labels[: len(some)]
        confidence.keep(tmp_path / "x.csv", confidence.Run("E", "c", mode, 0), calibration(some, of), some, of)
    again = confidence.kept(path, None, ["c", "d"])["c"]
    assert again.bin_count.tolist() == found.bin_count.tolist()
    for name in ("nll", "accuracy", "ece", "mce"):
        assert getattr(again, name) == pytest.approx(getattr(found, name), abs=1e-5)
    p = logits.softmax(1)[torch.arange(200), labels]
    assert confidence.truth_bins(logits, labels).tolist() == torch.histc(p, 20, 0, 1).int().tolist()
