"""Plots of what the tests measured, one picture a test, with a correct step's curve beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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
    measured = np.where((y > 0) | (scale != "log"), y, np.nan)
    axes.plot(x, measured, marker="" if over == "steps" else "o", ms=3, color=OURS, label="measured")
    axes.set(xlabel=x_label, ylabel=y_label, xscale="linear" if scale == "linear" else "log",
             yscale="log" if scale == "log" else "linear")  # fmt: skip
    if "ordinary_changes" in data:
        axes.plot(data["ordinary_norms"], data["ordinary_changes"], "--", color=OURS, label="an ordinary sample")
    if "expected" in data and what == "changes":
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
    if finding.name == "noise_distribution" and "sample" in data:
        values, x = np.asarray(data["sample"]) / data.get("expected", data["std"]), np.linspace(-5, 5, 200)
        axes.hist(values, bins=60, range=(-5, 5), density=True, color=OURS, alpha=0.6, label="over its expected size")
        axes.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color=REFERENCE, label="N(0, 1)")
        axes.set(xlabel="noise of a parameter", ylabel="density")
        return True
    for name, colour in (("scores_in", OURS), ("scores_out", REFERENCE)):
        axes.hist(data.get(name, []), bins=30, alpha=0.6, color=colour, label=f"canaries {name[7:]}")
    axes.set(xlabel="score: was it there?", ylabel="canaries")
    return "scores_in" in data
