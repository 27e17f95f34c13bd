"""Calibration by hand, on edges, and against torchmetrics and scikit-learn."""

from __future__ import annotations

import builtins
import math

import pytest
import torch
from torch import Tensor

from fastdp.calibration import (
    ConfidenceHistogram,
    calibration,
    confidence_histogram,
    ece,
    mce,
    nll,
    reliability_diagram,
)


def predictions(n: int = 2000, classes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are too sure, and labels that follow them in part."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=generator)
    noisy = logits / 2 + 1.5 * torch.randn(n, classes, generator=generator)
    return logits, noisy.argmax(1)


@pytest.mark.parametrize("bins", [1, 5, 10, 15, 100])
@pytest.mark.parametrize("classes", [2, 7])
def test_the_same_as_torchmetrics(bins, classes):
    torchmetrics = pytest.importorskip("torchmetrics")
    logits, labels = predictions(classes=classes)
    for norm, ours in (("l1", ece), ("max", mce)):
        theirs = torchmetrics.classification.MulticlassCalibrationError(classes, n_bins=bins, norm=norm)
        assert ours(logits, labels, bins) == pytest.approx(float(theirs(logits.softmax(1), labels)), abs=1e-5)


def test_the_same_as_scikit_learn():
    pytest.importorskip("sklearn")
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import log_loss

    logits, labels = predictions()
    shares = logits.double().softmax(1)
    assert nll(logits, labels) == pytest.approx(log_loss(labels, shares), rel=1e-9)
    assert nll(shares, labels, probabilities=True) == pytest.approx(log_loss(labels, shares), rel=1e-9)
    confidence, predicted = shares.max(1)
    share, mean = calibration_curve(predicted == labels, confidence, n_bins=12)
    found = calibration(logits, labels, 12)
    filled = found.bin_count > 0
    assert found.bin_accuracy[filled].tolist() == pytest.approx(share.tolist())
    assert found.bin_confidence[filled].tolist() == pytest.approx(mean.tolist())


@pytest.mark.parametrize("bins", [5, 10, 15, 49])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(bins, kind):
    edges = (torch.arange(1, bins + 1, dtype=torch.float64) / bins).to(kind)
    edges = edges[edges >= 0.5]  # of the predicted one of two classes
    labels = torch.ones(len(edges), dtype=torch.long)
    found = confidence_histogram(edges, labels, bins, probabilities=True)
    wanted = torch.zeros(bins, dtype=torch.long)
    wanted[bins - len(edges) :] = 1
    assert found.counts.tolist() == wanted.tolist()


def test_scikit_learn_puts_edges_below_too():
    pytest.importorskip("sklearn")
    from sklearn.calibration import calibration_curve

    confidence, right = torch.tensor([0.75, 0.7501, 0.5, 1.0]).double(), torch.tensor([1, 0, 1, 1])
    share, mean = calibration_curve(right, confidence, n_bins=4)
    found = calibration(torch.stack([confidence, 1 - confidence], 1), 1 - right, 4, probabilities=True)
    filled = found.bin_count > 0
    assert found.bin_accuracy[filled].tolist() == pytest.approx(share.tolist())
    assert found.bin_confidence[filled].tolist() == pytest.approx(mean.tolist())
    assert found.bin_count.tolist() == [0, 1, 1, 2]


def test_by_hand():
    """Two classes: confidences .9 (right), .9 (wrong), .6 (right); bins of a quarter."""
    shares, labels = torch.tensor([0.9, 0.9, 0.4]), torch.tensor([1, 0, 0])
    assert ece(shares, labels, 4, probabilities=True) == pytest.approx((2 * 0.4 + 0.4) / 3)
    assert mce(shares, labels, 4, probabilities=True) == pytest.approx(0.4)
    assert nll(shares, labels, probabilities=True) == pytest.approx(
        -(math.log(0.9) + math.log(0.1) + math.log(0.6)) / 3
    )
    found = confidence_histogram(shares, labels, 4, probabilities=True)
    assert found.counts.tolist() == [0, 0, 1, 2]
    assert (found.confidence, found.accuracy) == pytest.approx((0.8, 2 / 3))
    assert found.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    one_bin = calibration(shares, labels, 1, probabilities=True)
    assert one_bin.ece == one_bin.mce == pytest.approx(0.8 - 2 / 3)


def test_two_classes_by_one_logit_or_two():
    torch.manual_seed(0)
    one, labels = 2 * torch.randn(300), torch.randint(0, 2, (300,))
    two = torch.stack([torch.zeros(300), one], 1)
    for given, options in (
        (one, {}),
        (one.sigmoid(), {"probabilities": True}),
        (two.softmax(1), {"probabilities": True}),
    ):
        for ours in (ece, mce):
            assert ours(given, labels, **options) == pytest.approx(ours(two, labels), abs=1e-6)
        assert nll(given, labels, **options) == pytest.approx(nll(two, labels), rel=1e-5)


def test_what_is_impossible_costs_infinitely_much():
    shares = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert nll(shares, torch.tensor([1, 0]), probabilities=True) == math.inf
    assert nll(torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([0])) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    "given, labels, options, match",
    [
        (torch.tensor([[0.0, math.nan]]), torch.tensor([0]), {}, "sample 0 are NaN"),
        (torch.tensor([0.0, math.nan]), torch.tensor([0, 1]), {"probabilities": True}, "sample 1 are NaN"),
        (torch.tensor([[0.0, math.inf]]), torch.tensor([0]), {}, "infinite"),
        (torch.tensor([[-math.inf, -math.inf]]), torch.tensor([0]), {}, "infinite"),
        (torch.zeros(3, 1), torch.zeros(3).long(), {}, "one class"),
        (torch.zeros(0, 3), torch.zeros(0).long(), {}, "expected logits"),
        (torch.zeros(2, 3, 4), torch.zeros(2).long(), {}, "expected logits"),
        (torch.zeros(2, 3), torch.zeros(3).long(), {}, "expected logits"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), {}, "from 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([-100, 1]), {}, "from 0 to 2"),
        (torch.zeros(2), torch.tensor([0, 2]), {}, "from 0 to 1"),
        (torch.zeros(2, 3), torch.zeros(2), {}, "whole numbers"),
        (torch.zeros(2, 3).long(), torch.zeros(2).long(), {}, "floats"),
        (torch.tensor([[1.0, 2.0]]), torch.tensor([0]), {"probabilities": True}, "no probabilities"),
        (torch.tensor([[-0.5, 1.5]]), torch.tensor([0]), {"probabilities": True}, "no probabilities"),
        (torch.tensor([1.5]), torch.tensor([0]), {"probabilities": True}, "no probabilities"),
        (torch.tensor([[0.5, 0.52]]).bfloat16(), torch.tensor([0]), {"probabilities": True}, "no probabilities"),
        (torch.zeros(2, 3), torch.zeros(2).long(), {"bins": 0}, "bins"),
        (torch.zeros(2, 3), torch.zeros(2).long(), {"bins": 2.5}, "bins"),
    ],
)
def test_what_makes_no_sense_is_refused(given, labels, options, match):
    for ours in (calibration, ece, mce, confidence_histogram):
        with pytest.raises(ValueError, match=match):
            ours(given, labels, **options)
    if "bins" not in options:
        with pytest.raises(ValueError, match=match):
            nll(given, labels, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [4, 100])
def test_probabilities_of_16_bits_are_taken(dtype, classes):
    torch.manual_seed(0)
    logits, labels = torch.randn(500, classes) * 3, torch.randint(classes, (500,))
    assert ece(logits.softmax(1).to(dtype), labels, probabilities=True) == pytest.approx(ece(logits, labels), abs=0.01)


def test_drawings_in_characters(tmp_path, monkeypatch: pytest.MonkeyPatch):
    logits, labels = predictions()
    found = calibration(logits, labels, 5)
    text = reliability_diagram({"too sure": found})
    assert f"ECE {100 * found.ece:.1f} %" in text and "too sure" in text
    row = next(line for line in text.splitlines() if line.startswith("0.80-1.00"))
    assert row.split()[1].rstrip("|").count("#") == round(40 * float(found.bin_accuracy[4]))  # the bar ends before |
    assert row[10 + round(40 * float(found.bin_confidence[4]))] == "|"
    assert row.endswith(f"of {int(found.bin_count[4])}")
    histogram = confidence_histogram(logits, labels, 5)
    assert isinstance(histogram, ConfidenceHistogram) and "mean confidence" in str(histogram)
    assert str(histogram).splitlines()[4].count("#") == 40
    with pytest.raises(ValueError, match="no results"):
        reliability_diagram({})
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.warns(UserWarning, match="diagram.txt"):
        assert reliability_diagram({"too sure": found}, tmp_path / "diagram.png") == text
    assert (tmp_path / "diagram.txt").read_text() == text + "\n"
    assert not (tmp_path / "diagram.png").exists()


def test_a_png_by_matplotlib(tmp_path):
    pytest.importorskip("matplotlib")
    logits, labels = predictions()
    reliability_diagram({"a": calibration(logits, labels), "b": calibration(logits / 2, labels)}, tmp_path / "d.png")
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
