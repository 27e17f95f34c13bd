"""The figures of docs/private_bugs.md: the tests' curves, fastdp's above and the paper's below."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = ("no_clipping", "minibatch_clipping", "uncalibrated_noise")
KINDS = ("per-example", "no clipping", "mini-batch", "per-example, uncalibrated", "mini-batch, uncalibrated",
         "per-example, no noise")  # fmt: skip
COLOURS = ("#88ccee", "#bb5566", "#ddaa33", "#228833", "#000000", "#aa3377")
XLABEL = {"sizes": "batch size B", "alone": "mean of the steps alone", "norms": "clipping norm C"}
YLABEL = {"distances": "distance of models", "changes": "change of parameters", "losses": "change in loss"}


def read(file: Path) -> list[dict[str, Any]]:
    """The curves of a file; the last one of each, where there are several."""
    found = {}
    for line in file.read_text().splitlines():
        curve = json.loads(line)
        found[tuple(curve[name] for name in ("network", "optimizer", "implementation", "statistics", "test"))] = curve
    return list(found.values())


def plot(curves: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """A figure for each network and optimizer, as the paper's figures 2 to 8."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for network, optimizer in dict.fromkeys((curve["network"], curve["optimizer"]) for curve in curves):
        mine = [curve for curve in curves if (curve["network"], curve["optimizer"]) == (network, optimizer)]
        rows = [name for name in ("fastdp", "paper") if any(curve["statistics"] == name for curve in mine)]
        tests = [test for test in TESTS if any(curve["test"] == test for curve in mine)]
        if not tests:
            continue
        figure = Figure(figsize=(4.6 * len(tests), 3.5 * len(rows)), layout="constrained")
        for row, statistics in enumerate(rows):
            for column, test in enumerate(tests):
                axes = figure.add_subplot(len(rows), len(tests), row * len(tests) + column + 1)
                for curve in mine:
                    if (curve["statistics"], curve["test"]) == (statistics, test) and curve["implementation"] in KINDS:
                        draw(axes, curve)
                axes.set_title(f"{'fastdp' if statistics == 'fastdp' else 'the paper'}: {test}", fontsize=10)
                if axes.get_legend_handles_labels()[0]:
                    axes.legend(frameon=False, fontsize=7)
        figure.suptitle(f"{network}, {optimizer}")
        written.append(folder / (re.sub("[^a-z0-9]+", "_", f"private bugs {network} {optimizer}".lower()) + ".png"))
        figure.savefig(written[-1], dpi=75)
    return written


def draw(axes: Any, curve: dict[str, Any]) -> None:
    """One curve, over its largest value."""
    points = sorted(zip(map(float, curve["x"]), map(float, curve["y"]), strict=True))
    largest = max([abs(y) for _, y in points] + [1e-300])
    kind, paper = curve["implementation"], curve["statistics"] == "paper"
    place = KINDS.index(kind)  # curves often lie on one another: the first ones are broad
    p = "" if curve["p_value"] == "-" else f", p {float(curve['p_value']):.2g}"
    style = "-" if len(points) > 50 else "o-"
    axes.plot([x for x, _ in points], [y / largest for _, y in points], style, ms=3, lw=6 - place, color=COLOURS[place],
              label=f"{kind}: {curve['verdict']}{p}")  # fmt: skip
    axes.set(xlabel=XLABEL[curve["x_is"]], ylabel=f"{YLABEL[curve['y_is']]} / largest")
    if not paper or curve["test"] == "no_clipping":
        axes.set_xscale("log")
    if not paper:
        axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter("")  # over less than a decade their names lie on one another
