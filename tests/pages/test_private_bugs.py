"""The paper's experiment on tiny data: each bug is found and nothing else, and the page says what the rows say."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.slow  # `make test-all` runs it

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples/papers"))
pytest.importorskip("PIL")
pytest.importorskip("transformers")

import private_bugs as bugs  # noqa: E402
import private_bugs_networks as networks  # noqa: E402

import fastdp  # noqa: E402

from . import pictures  # noqa: E402

WORDS = "a film that is good bad dull fine".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 images, each of a grey that tells its class, and 110 sentences."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    pictures.write(folder / "cifar10_jpeg.npz", draw, 120, 10)
    lines = [f"{' '.join(draw.choice(WORDS, draw.integers(2, 7)))}\t{i % 2}" for i in range(110)]
    (folder / networks.SENTENCES).write_text("\n".join([*lines, "once upon\t1"]) + "\n")
    return folder


def ran(data: Path, folder: Path, *options: str, statistics: tuple[str, ...] = ("fastdp",)) -> list[dict[str, str]]:
    """The rows of a run of the command on tiny networks, which must end with status 0; fastdp's are as expected."""
    told = ["--data", str(data), "--quick", "--out", str(folder / "rows.csv"), "--statistics", *statistics, *options]
    status = bugs.main(told, resnet=(1, 8), bert=(1, 16))
    with (folder / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    wrong = [r for r in rows if r["statistics"] == "fastdp" and not bugs.as_expected(r)]
    assert not [(r["implementation"], r["test"], r["verdict"], r["sentence"]) for r in wrong]
    assert status == 0 and all(int(r["steps"]) > 0 for r in rows)
    return rows


@pytest.mark.parametrize(
    ("network", "optimizer", "kinds", "bugs_found"),
    [
        (
            "resnet",
            "sgd",
            ["per-example", "no clipping", "mini-batch, uncalibrated"],
            ["no_clipping", "uncalibrated_noise"],
        ),
        (
            "bert",
            "adam",
            ["per-example", "mini-batch", "per-example, uncalibrated"],
            ["minibatch_clipping", "uncalibrated_noise"],
        ),
    ],
)
def test_each_bug_is_found_and_nothing_else(network, optimizer, kinds, bugs_found, data, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = ran(data, tmp_path, "--networks", network, "--optimizers", optimizer, "--implementations", *kinds,
               "--plots", str(tmp_path), "--curves", str(tmp_path / "curves.jsonl"))  # fmt: skip
    assert "fastdp's tests: 7 of 7 verdicts are as expected" in capsys.readouterr().out and len(rows) == 7
    assert [row["test"] for row in rows if row["verdict"] == "bug"] == bugs_found
    (figure,) = tmp_path.glob("*.png")
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_papers_tests_run_beside_ours_and_a_run_goes_on(data, tmp_path, capsys):
    """Clipping or not, by the change in loss, on a BERT with Adam; and the figure of both."""
    pytest.importorskip("matplotlib")
    told = ["--networks", "bert", "--optimizers", "adam", "--tests", "no_clipping", "--plots", str(tmp_path),
            "--curves", str(tmp_path / "curves.jsonl")]  # fmt: skip
    rows = ran(data, tmp_path, *told, "--implementations", "per-example", "no clipping", statistics=("fastdp", "paper"))
    found = {(row["statistics"], row["implementation"]): row["verdict"] for row in rows}
    assert found == {(name, kind): verdict for name in ("fastdp", "paper")
                     for kind, verdict in (("per-example", "ok"), ("no clipping", "bug"))}  # fmt: skip
    assert {row["steps"] for row in rows if row["statistics"] == "paper"} == {"48"}  # 8 of 5 steps and one more
    again = ran(data, tmp_path, *told[:-4], "--implementations", "per-example", "mini-batch", statistics=("paper",))
    assert [row["implementation"] for row in again[len(rows) :]] == ["mini-batch"]
    assert len(list(tmp_path.glob("*.png"))) == 1
    with pytest.raises(SystemExit, match="--curves"):
        bugs.main(["--plots", str(tmp_path)])


def test_a_wrong_verdict_is_an_exit_status_and_a_line(data, monkeypatch, capsys):
    """An audit that finds nothing anywhere."""
    blind = lambda trainable, seed: bugs.Finding("no_clipping", "ok", "fine")
    monkeypatch.setitem(bugs.TESTS, ("fastdp", "no_clipping"), blind)
    told = ["--data", str(data), "--quick", "--networks", "resnet", "--optimizers", "sgd", "--tests", "no_clipping",
            "--statistics", "fastdp"]  # fmt: skip
    assert bugs.main(told, resnet=(1, 8)) == 1
    out = capsys.readouterr().out
    assert "2 of 3 verdicts" in out and "no clipping, no_clipping, seed 0: ok" in out


def test_missing_data_is_said_with_where_to_get_it(tmp_path):
    for network, words in (("resnet", "CIFAR-10"), ("bert", "Sentiment Treebank")):
        with pytest.raises(SystemExit, match=words):
            bugs.main(["--data", str(tmp_path), "--networks", network])
        with pytest.raises(SystemExit, match="--data"):
            bugs.main(["--networks", network])


# ---------------------------------------------------------------------- networks and data


def test_resnet_20_is_one():
    model = networks.resnet()
    assert sum(isinstance(m, torch.nn.Conv2d | torch.nn.Linear) for m in model.modules()) == 20
    assert sum(p.numel() for p in model.parameters()) == 269722  # He et al.: 0.27M
    x, y = torch.randn(3, 3, 32, 32), torch.tensor([1, 2, 3])
    assert model[:-3](x).shape == (3, 64, 8, 8)
    assert fastdp.verify(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y)).ok


def test_sentences_and_padding(data):
    task = networks.sentences(data, 111, 0, 1, 16)
    assert task.x.max() == len(WORDS) + 1 and (task.x == 1).sum() == 2  # "once upon" is met once
    torch.manual_seed(0)
    model = task.make().eval()
    short = task.x[:4, : int((task.x[:4] > 0).sum(1).max())]
    assert torch.allclose(model(short), model(task.x[:4]), atol=1e-5)
    x, y = task.x[:4], task.labels[:4]
    assert fastdp.verify(model.train(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y)).ok


# ---------------------------------------------------------------------- the page


def test_the_page_shows_the_rows_kept(tmp_path):
    doc = tmp_path / "page.md"
    doc.write_text(bugs.DOC.read_text())
    bugs.report(doc, draw=False)
    assert doc.read_text() == bugs.DOC.read_text(), "run python examples/papers/private_bugs.py --report"
    with bugs.RUNS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    said = re.findall(r"(\d+) of (\d+) verdicts are as expected", doc.read_text())
    assert sum(int(many) for _, many in said) == len(rows)
    assert sum(int(right) for right, _ in said) == sum(map(bugs.as_expected, rows))
