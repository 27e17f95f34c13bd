"""Plots of what the tests measured, one picture a test, with a correct step's curve beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from .finding import NOT_TESTED, Finding
from .report import Report

OURS, REFERENCE = "#bb5566", "#999999"
C, B = "clipping norm C", "batch size B"
CHANGE, LOSS = "change of the parameters, one step, no noise", "change in loss, one step, no noise"
DISTANCE = "mean distance between models"
CURVES = {  # test: data over data, axis labels, scales
    "no_clipping": ("norms", "changes", C, CHANGE, "log"),
    "minibatch_clipping": ("sizes", "changes", B, CHANGE, "log"),
    "uncalibrated_noise": ("norms", "distances", C, DISTANCE, "linear"),
    "poisson_sampling": ("steps", "sizes", "step", "batch size", "linear"),
    "paper_no_clipping": ("norms", "losses", C, LOSS, "log of C"),
    "paper_minibatch_clipping": ("sizes", "losses", B, LOSS, "linear"),
    "paper_uncalibrated_noise": ("norms", "distances", C, DISTANCE, "linear"),
}


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write TEST.png for every test that has a curve; returns the files. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    written = []
    for finding in report.findings:
        figure = Figure(figsize=(5, 3.6), layout="constrained")
        axes = figure.add_subplot()
        if finding.verdict == NOT_TESTED or not (_curve(axes, finding) or _histogram(axes, finding)):
            continue
        axes.set_title(f"{finding.name}: {finding.verdict}", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / f"{finding.name}.png")
        figure.savefig(written[-1], dpi=120)
    return written


def _curve(axes: Any, finding: Finding) -> bool:
    data = finding.data
    over, what, x_label, y_label, scale = CURVES.get(finding.name, ("", "", "", "", ""))
    if data.get("design") == "singles":
        over, x_label = "alone", "what single samples' steps add up to"
    if what not in data or over not in data and over != "steps":
        return False
    y = np.asarray(data[what], float)
    x = np.arange(len(y)) if over == "steps" else np.asarray(data[over], float)
    x, y = x[np.argsort(x)], y[np.argsort(x)]
    axes.set(xlabel=x_label, ylabel=y_label, xscale="linear" if scale == "linear" else "log",
             yscale="log" if scale == "log" else "linear")  # fmt: skip
    axes.plot(x, np.where((y > 0) | (scale != "log"), y, np.nan), ".-", color=OURS, label="measured")
    if "expected" in data:
        axes.plot(x, y[0] * (x / x[0]) ** data["expected"], ":", color=REFERENCE, label="clipped one by one")
    if "without_noise" in data:
        axes.plot(x, y[-1] * x / x[-1], ":", color=REFERENCE, label="in proportion to C")
        axes.axhline(data["without_noise"], color=REFERENCE, lw=0.8, label="sigma = 0")
    if "accounted" in data:
        due = np.mean(y) * data["accounted"] / max(data["rate"], 1e-12)
        axes.axhline(due, color=REFERENCE, label=f"accounted: {data['accounted']:.4g}")
    return True


def _histogram(axes: Any, finding: Finding) -> bool:
    data = finding.data
    if "sample" in data:
        axes.hist(
            np.asarray(data["sample"]) / data["std"], bins=60, density=True, color=OURS, label="noise, over its size"
        )
        x = np.linspace(-5, 5, 200)
        axes.plot(x, stats.norm.pdf(x), color=REFERENCE, label="N(0, 1)")
    elif "scores_in" in data:
        scores = [data["scores_in"], data["scores_out"]]
        axes.hist(scores, bins=30, color=[OURS, REFERENCE], label=["canaries in", "canaries out"])
        axes.set(xlabel="score: was it there?")
    return "sample" in data or "scores_in" in data
