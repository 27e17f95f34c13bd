"""Figures of the training benchmark: ratios by model; ratios against batch and sequence length. Needs matplotlib.

Bars start at 0 and lines at 1 or below; a bar that would not fit is cut at a written number. The colours are told
apart by the colour-blind (Okabe and Ito), and hatches and markers tell them apart without colour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from . import report_data as data
from .report_data import GRAPHED, OK, OURS, Case, Cases, figure_names, label, measured, stamp, where

SHOWN = {  # colour, hatch, marker
    OURS: ("#0072B2", "", "o"),
    GRAPHED: ("#56B4E9", "--", "P"),
    "opacus hooks": ("#E69F00", "//", "s"),
    "opacus functorch": ("#D55E00", "\\\\", "^"),
    "opacus ew": ("#CC79A7", "..", "D"),
    "opacus ghost": ("#009E73", "xx", "v"),
}
WIDE, DPI = 8.0, 130  # inches, dots an inch
MOST, TOP = 5.0, 4.0  # the largest ratio that a bar is drawn to, and a line
FONT: dict[str, Any] = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6}


def draw(cases: Cases, folder: Path) -> None:
    """Write the figures that there are rows for."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    for name in figure_names(cases):
        suite = name.split("_")[1].removesuffix(".png")
        place = data.places(cases, suite)[0]
        with matplotlib.rc_context(FONT):
            make = sweeps if name.endswith("_sweep.png") else by_model
            save(make(cases, suite, place), folder / name, stamp(cases))


def save(figure: Figure, path: Path, comment: str) -> None:
    """As a PNG file of few colours, which is a third of the size."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(DPI)
    canvas.draw()
    facts = PngInfo()
    facts.add_text("Comment", comment)
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(64).save(path, optimize=True, pnginfo=facts)


def drawn(groups: Cases) -> list[str]:
    """Contenders that occur."""
    return [name for name in SHOWN if any(name in group for group in groups.values())]


# ---------------------------------------------------------------------- by model


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
            colour, hatch, _ = SHOWN[name]
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


# ---------------------------------------------------------------------- against batch and length


def sweeps(cases: Cases, suite: str, place: tuple[str, str]) -> Figure:
    """A panel for each sweep of a workload: time over ordinary training's against batch size or length."""
    panels: list[tuple[str, str, str, Cases]] = []
    for sweep in ("batch", "length"):
        mine = measured(cases, suite, place, sweep)
        for workload, dtype in dict.fromkeys((case.workload, case.dtype) for case in mine):
            some = {case: group for case, group in mine.items() if (case.workload, case.dtype) == (workload, dtype)}
            panels.append((sweep, workload, dtype, some))
    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    deep = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDE, 1.0 + 3.1 * deep), layout="constrained")
    grid = figure.subplots(deep, columns, squeeze=False)
    cut = False
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (sweep, _, _, some) in zip(grid.flat, panels, strict=False):
        cut |= _lines(axes, sweep, some)
    names = [name for name in SHOWN if any(name in drawn(some) for *_, some in panels)]
    handles = [Line2D([], [], color=SHOWN[name][0], marker=SHOWN[name][2], label=name) for name in names]
    handles.append(Line2D([], [], color="black", linewidth=1.8, label="floor of an exact step"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9.5)
    figure.supylabel("time / ordinary training" + f" (cut at {TOP:g})" * cut, fontsize=10.5)
    return figure


def _lines(axes: Axes, sweep: str, some: Cases) -> bool:
    """Whether a line leaves the panel."""

    def x_of(case: Case) -> float:
        return float(case.batch_size if sweep == "batch" else case.length)

    swept = sorted(some, key=x_of)
    lowest = highest = 1.0
    for name in drawn(some):
        colour, _, marker = SHOWN[name]
        points = [(x_of(case), value) for case in swept
                  if (value := data.number(some[case].get(name), "ratio")) is not None]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.6, zorder=3)
            lowest = min([lowest, *(value for _, value in points)])
            highest = max([highest, *(value for _, value in points)])
    floors = [(x_of(case), floor) for case in swept
              if (floor := data.number(some[case].get(OURS), "floor")) is not None]  # fmt: skip
    if floors:
        axes.plot(*zip(*floors, strict=True), color="black", linewidth=1.8, zorder=4)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks([x_of(case) for case in swept], [_tick(x_of(case), some[case]) for case in swept])
    axes.set_ylim(min(1.0, lowest) - 0.05, min(highest, TOP) + 0.1)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    fixed = {(case.length if sweep == "batch" else case.batch_size) for case in swept} - set(data.EMPTY)
    beside = f", {'length' if sweep == 'batch' else 'batch'} {', '.join(sorted(fixed))}" if fixed else ""
    axes.set_title(f"{label(swept[0])}{beside}", fontsize=10.5)
    axes.set_xlabel(("batch size" if sweep == "batch" else "length") + "\n(below: ms of ordinary training)", fontsize=9)
    return highest > TOP


def _tick(x: float, group: dict[str, data.Row]) -> str:
    plain = data.number(group.get(data.BASE), "step_ms")
    return f"{x:g}" + ("" if plain is None else f"\n{plain:.0f}")
