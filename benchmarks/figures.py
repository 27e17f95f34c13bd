"""The figure of the training benchmark: time and memory by model. Needs matplotlib.

A bar that would not fit is cut at a written number. The colours are told apart by the colour-blind (Okabe and Ito), and
hatches tell them apart without colour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from . import report_data as data
from .report_data import GRAPHED, OK, OURS, Cases, figure_names, label, measured, stamp, where

SHOWN = {  # colour, hatch
    OURS: ("#0072B2", ""),
    GRAPHED: ("#56B4E9", "--"),
    "opacus hooks": ("#E69F00", "//"),
    "opacus functorch": ("#D55E00", "\\\\"),
    "opacus ew": ("#CC79A7", ".."),
    "opacus ghost": ("#009E73", "xx"),
}
WIDE, DPI = 8.0, 130  # inches, dots an inch
MOST = 5.0  # the largest ratio that a bar is drawn to
FONT: dict[str, Any] = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6}


def draw(cases: Cases, folder: Path) -> None:
    """Write the figures that there are rows for."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    for name in figure_names(cases):
        suite = name.split("_")[1].removesuffix(".png")
        place = data.places(cases, suite)[0]
        with matplotlib.rc_context(FONT):
            save(by_model(cases, suite, place), folder / name, stamp(cases))


def save(figure: Figure, path: Path, comment: str) -> None:
    """As a PNG file whose comment tells the rows that it was drawn from."""
    figure.savefig(path, dpi=DPI, metadata={"Comment": comment})


def drawn(groups: Cases) -> list[str]:
    """Contenders that occur."""
    return [name for name in SHOWN if any(name in group for group in groups.values())]


def by_model(cases: Cases, suite: str, place: tuple[str, str]) -> Figure:
    """Bars of time (with the floor) and of memory over ordinary training's, a group a workload."""
    mine = measured(cases, suite, place)
    figure = Figure(figsize=(WIDE, 6.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    names = drawn(mine)
    _bars(upper, mine, names, "ratio", "time / ordinary training")
    _bars(lower, mine, names, "memory_ratio", "peak memory / ordinary")
    for at, group in enumerate(mine.values()):
        floor = data.number(group.get(OURS), "floor")
        if floor is not None:
            upper.plot([at - 0.46, at + 0.46], [floor, floor], color="black", linewidth=1.8, zorder=4)
    lower.set_xticks(range(len(mine)), [label(case) for case in mine], rotation=35, ha="right", rotation_mode="anchor")
    handles: list[Patch | Line2D] = [
        Patch(facecolor=SHOWN[name][0], hatch=SHOWN[name][1], edgecolor="white", label=name) for name in names
    ]
    handles.append(Line2D([], [], color="black", linewidth=1.8, label="floor of an exact step"))
    handles.append(Line2D([], [], color="0.45", linewidth=1, linestyle="--", label="ordinary training"))
    handles.append(Line2D([], [], color="black", marker="x", linestyle="", label="raises, wrong or out of time/memory"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9.5)
    figure.supxlabel(where(suite, place), fontsize=9)
    return figure


def _bars(axes: Axes, mine: Cases, names: list[str], column: str, title: str) -> None:
    width = 0.86 / max(len(names), 1)
    highest = 1.0
    for at, group in enumerate(mine.values()):
        for number, name in enumerate(names):
            colour, hatch = SHOWN[name]
            x, value = at + (number - (len(names) - 1) / 2) * width, data.number(group.get(name), column)
            if value is None:
                if name in group and group[name]["status"] != OK:
                    axes.plot([x], [0.07], marker="x", color=colour, markersize=5, markeredgewidth=1.6, zorder=4)
                continue
            axes.bar(x, min(value, MOST), width, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, zorder=2)
            highest = max(highest, min(value, MOST))
            if value > MOST:  # cut, and said so
                axes.text(x, MOST, f" {value:.1f}", rotation=90, ha="center", va="bottom", fontsize=8)
    axes.axhline(1, color="0.45", linewidth=1, linestyle="--", zorder=3)
    axes.set_ylim(0, highest * 1.1)
    axes.set_xlim(-0.6, len(mine) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(title)
