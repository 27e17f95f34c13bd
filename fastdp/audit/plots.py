"""The curves behind the verdicts, one picture a test, with what a correct step would show beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .finding import NOT_TESTED, Finding
from .report import Report

OURS, REFERENCE = "#bb5566", "#999999"


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write TEST.png for every test that has a curve; returns the files. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    written = []
    for finding in report.findings:
        draw = DRAWN.get(finding.name)
        if draw is None or finding.verdict == NOT_TESTED or not finding.data:
            continue
        figure = Figure(figsize=(5, 3.6), layout="constrained")
        axes = figure.add_subplot()
        if not draw(axes, finding):
            continue
        axes.set_title(f"{finding.name}: {finding.verdict}", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{finding.name}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _no_clipping(axes: Any, finding: Finding) -> bool:
    data = finding.data
    for label, style in (("", "-"), ("ordinary_", "--")):
        changes = np.asarray(data[f"{label}changes"])
        shown = np.where(changes > 0, changes, np.nan)
        name = "ordinary sample" if label else "sample of a large gradient"
        axes.loglog(data[f"{label}norms"], shown, style, marker="o", ms=3, color=OURS, label=name)
    axes.set(xlabel="clipping norm C", ylabel="change of the parameters, one step, no noise")
    return True


def _minibatch(axes: Any, finding: Finding) -> bool:
    data = finding.data
    if "changes" not in data or "expected" not in data:
        return False
    if data["design"] == "singles":
        x, label = np.asarray(data["alone"]), "what single samples' steps add up to"
    else:
        x, label = np.asarray(data["sizes"], float), "batch size B"
    y = np.asarray(data["changes"], float)
    order = np.argsort(x)
    axes.loglog(x[order], y[order], marker="o", ms=3, color=OURS, label="measured")
    top = y[0] * (x[order] / x[0]) ** data["expected"]
    axes.loglog(x[order], top, ":", color=REFERENCE, label="clipped one by one")
    axes.set(xlabel=label, ylabel="change of the parameters, no noise")
    return True


def _distances(axes: Any, finding: Finding) -> bool:
    data = finding.data
    norms, distances = np.asarray(data["norms"]), np.asarray(data["distances"])
    axes.plot(norms, distances, marker="o", ms=3, color=OURS, label=f"sigma = {data['sigma']:.3g}")
    axes.plot(norms, distances[-1] * norms / norms[-1], ":", color=REFERENCE, label="in proportion to C")
    axes.axhline(data["without_noise"], color=REFERENCE, lw=0.8, label="sigma = 0")
    axes.set(xlabel="clipping norm C", ylabel="mean distance between models")
    return True


def _losses(axes: Any, finding: Finding) -> bool:
    data = finding.data
    over = "sizes" if "sizes" in data else "norms"
    axes.plot(data[over], data["losses"], marker="o", ms=3, color=OURS, label="measured")
    axes.set(
        xlabel="batch size B" if over == "sizes" else "clipping norm C", ylabel="change in loss, one step, no noise"
    )
    axes.set_xscale("linear" if over == "sizes" else "log")
    return True


def _distribution(axes: Any, finding: Finding) -> bool:
    data = finding.data
    if "sample" not in data:
        return False
    values = np.asarray(data["sample"]) / data.get("expected", data["std"])
    axes.hist(values, bins=60, range=(-5, 5), density=True, color=OURS, alpha=0.6, label="noise over its expected size")
    x = np.linspace(-5, 5, 200)
    axes.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color=REFERENCE, label="N(0, 1)")
    axes.set(xlabel="noise of a parameter", ylabel="density")
    return True


def _sizes(axes: Any, finding: Finding) -> bool:
    sizes = finding.data["sizes"]
    axes.plot(sizes, color=OURS, lw=0.8, label=f"rate {finding.data['rate']:.4g}")
    axes.axhline(np.mean(sizes) * finding.data["accounted"] / max(finding.data["rate"], 1e-12), color=REFERENCE,
                 label=f"accounted: {finding.data['accounted']:.4g}")  # fmt: skip
    axes.set(xlabel="step", ylabel="batch size")
    return True


def _canaries(axes: Any, finding: Finding) -> bool:
    for name, colour in (("scores_in", OURS), ("scores_out", REFERENCE)):
        axes.hist(finding.data[name], bins=30, alpha=0.6, color=colour, label=f"canaries {name[7:]}")
    axes.set(xlabel="score: was it there?", ylabel="canaries")
    return True


DRAWN: dict[str, Callable[[Any, Finding], bool]] = {
    "no_clipping": _no_clipping,
    "minibatch_clipping": _minibatch,
    "uncalibrated_noise": _distances,
    "noise_distribution": _distribution,
    "poisson_sampling": _sizes,
    "epsilon_bound": _canaries,
    "paper_no_clipping": _losses,
    "paper_minibatch_clipping": _losses,
    "paper_uncalibrated_noise": _distances,
}
