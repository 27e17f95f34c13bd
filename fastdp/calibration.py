"""How far predicted probabilities can be trusted: NLL, ECE, MCE, confidence histograms, reliability diagrams.

Source: Guo et al., On calibration of modern neural networks, 2017 (arXiv 1706.04599); used for private models by Bu et
al., On the convergence and calibration of deep learning with differential privacy, 2023 (arXiv 2106.07830).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .utils.number_checks import check_whole


class Calibration(NamedTuple):
    """NLL in nats; accuracy, ECE and MCE as shares in [0, 1]; and, per bin, mean confidence, accuracy and count."""

    nll: float
    accuracy: float
    ece: float
    mce: float
    bin_confidence: Tensor
    bin_accuracy: Tensor
    bin_count: Tensor


class ConfidenceHistogram(NamedTuple):
    """The number of predictions [bins] with a confidence in (k / bins, (k + 1) / bins], and their means."""

    edges: Tensor
    counts: Tensor
    confidence: float  # mean over all predictions
    accuracy: float


def calibration(logits: Tensor, labels: Tensor, bins: int = 15, *, probabilities: bool = False) -> Calibration:
    """Compute calibration errors in bins of equal width over the confidence of the predicted class.

    ECE = sum_m |B_m| / N |acc(B_m) - conf(B_m)|, and MCE is the largest of these gaps. A confidence on an edge belongs
    to the bin below. For given probabilities, the edge k / bins has their type; for logits, everything is float64.

    Args:
        logits: [N, C] for two or more classes, or [N] for two classes (class 1 against class 0), floats.
        labels: [N], whole numbers from 0 to C - 1.
        bins: the number of bins, at least 1.
        probabilities: whether `logits` are probabilities: rows that sum to 1 within 1e-3, or the probabilities of class
            1. A label with probability 0 makes the NLL infinite.

    Returns:
        A Calibration.

    Raises:
        ValueError: if a shape or label is wrong, there is no data, a number is NaN, or infinite logits leave no
            probabilities.

    >>> round(calibration(torch.tensor([0.9, 0.9, 0.4]), torch.tensor([1, 0, 0]), probabilities=True).ece, 4)
    0.4
    """
    found = _predictions(logits, labels, probabilities)
    confidence, right, which = found.confidence, found.right, _bin_of(found.confidence, bins)
    count = torch.bincount(which, minlength=bins)
    total = count.clamp(min=1)
    mean_confidence = torch.bincount(which, confidence.double(), bins) / total
    accuracy = torch.bincount(which, right, bins) / total
    gap = (accuracy - mean_confidence).abs()
    return Calibration(
        float(found.losses.mean()), float(right.mean()), float((gap * count).sum() / len(right)),
        float(gap.max()), mean_confidence, accuracy, count,
    )  # fmt: skip


def nll(logits: Tensor, labels: Tensor, *, probabilities: bool = False) -> float:
    """Mean negative log-likelihood in nats. The arguments are those of `calibration`."""
    return float(_predictions(logits, labels, probabilities).losses.mean())


def ece(logits: Tensor, labels: Tensor, bins: int = 15, *, probabilities: bool = False) -> float:
    """Expected calibration error, as a share. The arguments are those of `calibration`."""
    return calibration(logits, labels, bins, probabilities=probabilities).ece


def mce(logits: Tensor, labels: Tensor, bins: int = 15, *, probabilities: bool = False) -> float:
    """Maximum calibration error, as a share. The arguments are those of `calibration`."""
    return calibration(logits, labels, bins, probabilities=probabilities).mce


def confidence_histogram(
    logits: Tensor, labels: Tensor, bins: int = 15, *, probabilities: bool = False
) -> ConfidenceHistogram:
    """Count the confidences of the predicted classes by bin. The arguments are those of `calibration`."""
    found = _predictions(logits, labels, probabilities)
    count = torch.bincount(_bin_of(found.confidence, bins), minlength=bins)
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    return ConfidenceHistogram(edges, count, float(found.confidence.double().mean()), float(found.right.mean()))


class _Predictions(NamedTuple):
    """For each sample: the confidence of the predicted class, whether it is right (float64), the label's -log p."""

    confidence: Tensor
    right: Tensor
    losses: Tensor


def _predictions(logits: Tensor, labels: Tensor, probabilities: bool) -> _Predictions:
    what = "probabilities" if probabilities else "logits"
    if logits.dim() not in (1, 2) or labels.shape != logits.shape[:1] or not len(labels):
        raise ValueError(
            f"expected {what} [N, C] (or [N] of two classes) and labels [N]; got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if logits.dim() == 2 and logits.shape[1] < 2:
        raise ValueError(f"one class, of which every prediction is sure: for two classes give {what} [N] or [N, 2]")
    if not logits.is_floating_point():
        raise ValueError(f"{what} are floats, not {logits.dtype}")
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels are whole numbers, not {labels.dtype}")
    logits, labels = logits.detach(), labels.detach().long().to(logits.device)
    classes = logits.shape[1] if logits.dim() == 2 else 2
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"labels lie from 0 to {classes - 1}; got {int(labels.min())} to {int(labels.max())}")
    if bool(logits.isnan().any()):
        first = int(logits.reshape(len(labels), -1).isnan().any(1).nonzero()[0])
        raise ValueError(f"the {what} of sample {first} are NaN: a calibration of the others would not be the model's")
    if probabilities:
        shares = logits if logits.dim() == 2 else torch.stack([1 - logits, logits], 1)
        wide = shares.double()
        rounding = max(1e-3, torch.finfo(logits.dtype).eps)  # each of them is off by that share of itself at most
        if bool((wide < 0).any()) or bool(((wide.sum(1) - 1).abs() > rounding).any()):
            raise ValueError("these are no probabilities (negative, or rows that do not sum to 1): give logits as such")
        losses = -wide.gather(1, labels[:, None])[:, 0].log()
    else:
        wide = logits.double() if logits.dim() == 2 else F.pad(logits.double()[:, None], (1, 0))
        shares = wide.softmax(1)
        if bool(shares.isnan().any()):
            first = int(shares.isnan().any(1).nonzero()[0])
            raise ValueError(f"the logits of sample {first} are infinite and leave no probabilities")
        losses = F.cross_entropy(wide, labels, reduction="none")
    confidence, predicted = shares.max(1)
    return _Predictions(confidence, (predicted == labels).double(), losses)


def _bin_of(confidence: Tensor, bins: int) -> Tensor:
    """The number of the bin (k / bins, (k + 1) / bins] of each confidence."""
    check_whole(bins=bins)
    edges = (torch.arange(bins + 1, dtype=torch.float64) / bins).to(confidence.device, confidence.dtype)
    return (torch.bucketize(confidence, edges, right=False) - 1).clamp(0, bins - 1)


def reliability_diagram(results: Mapping[str, Calibration], path: str | Path | None = None) -> Any:
    """Draw accuracy against confidence for each model by matplotlib (of the extra `demo`), as a PNG at `path`.

    Args:
        results: a Calibration for each model, by name.
        path: the file to write. None: no file.

    Returns:
        The matplotlib Figure, which notebooks show; None, with a warning, if there is no matplotlib.

    Raises:
        ValueError: if there are no results.
    """
    if not results:
        raise ValueError("no results to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn(f"no matplotlib (pip install matplotlib): no diagram is drawn at {path}", stacklevel=2)
        return None
    figure = Figure(figsize=(4.2 * len(results), 4.4), layout="constrained")
    for position, (name, found) in enumerate(results.items()):
        axes = figure.add_subplot(1, len(results), position + 1)
        bins = len(found.bin_count)
        centres, filled = (torch.arange(bins) + 0.5) / bins, (found.bin_count > 0).cpu()
        axes.bar(centres[filled], found.bin_accuracy.cpu()[filled], 1 / bins, color="#4477aa", edgecolor="white")
        axes.plot([0, 1], [0, 1], "--", color="#bb5566", label="calibrated")
        axes.plot(found.bin_confidence.cpu()[filled], found.bin_accuracy.cpu()[filled], "o", ms=3, color="black")
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
        axes.set_title(f"{name}\nECE {100 * found.ece:.1f} %, NLL {found.nll:.3f}", fontsize=10)
        axes.legend(loc="upper left", frameon=False, fontsize=8)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
