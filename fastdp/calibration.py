"""How far predicted probabilities can be trusted: NLL, ECE, MCE, reliability diagrams.

Source: Guo et al. 2017; used for private models by Bu et al., Convergence and calibration of DP deep learning.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Calibration(NamedTuple):
    """NLL in nats; accuracy, ECE and MCE as shares; per bin: mean confidence, accuracy, count."""

    nll: float
    accuracy: float
    ece: float
    mce: float
    bin_confidence: Tensor
    bin_accuracy: Tensor
    bin_count: Tensor


def calibration(logits: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """Of class logits [N,C] and labels [N]: bins of equal width over the confidence of the predicted class.

    ECE = sum_m |B_m| / N |acc(B_m) - conf(B_m)|; MCE the largest of these gaps. A confidence on an edge belongs
    to the bin below. Raises ValueError on shapes or without data.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise ValueError(f"expected logits [N,C] and labels [N]; got {tuple(logits.shape)} and {tuple(labels.shape)}")
    logits = logits.detach().double()
    confidence, predicted = logits.softmax(1).max(1)
    right = (predicted == labels).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=logits.device)
    which = (torch.bucketize(confidence, edges, right=False) - 1).clamp(0, bins - 1)
    count = torch.bincount(which, minlength=bins)
    total = count.clamp(min=1)
    mean_confidence = torch.bincount(which, confidence, bins) / total
    accuracy = torch.bincount(which, right, bins) / total
    gap = (accuracy - mean_confidence).abs()
    return Calibration(
        float(F.cross_entropy(logits, labels)), float(right.mean()), float((gap * count).sum() / len(labels)),
        float(gap.max()), mean_confidence, accuracy, count,
    )  # fmt: skip


def reliability_diagram(results: dict[str, Calibration], path: str | Path) -> None:
    """Accuracy against confidence of each model, as PNG. Needs matplotlib (the extra `plots`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(results), 4.4), layout="constrained")
    for position, (name, found) in enumerate(results.items()):
        axes = figure.add_subplot(1, len(results), position + 1)
        bins = len(found.bin_count)
        centres = (torch.arange(bins) + 0.5) / bins
        filled = found.bin_count > 0
        axes.bar(centres[filled], found.bin_accuracy[filled].cpu(), 1 / bins, color="#4477aa", edgecolor="white")
        axes.plot([0, 1], [0, 1], "--", color="#bb5566", label="calibrated")
        axes.plot(found.bin_confidence[filled].cpu(), found.bin_accuracy[filled].cpu(), "o", ms=3, color="black")
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
        axes.set_title(f"{name}\nECE {100 * found.ece:.1f} %, NLL {found.nll:.3f}", fontsize=10)
        axes.legend(loc="upper left", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
