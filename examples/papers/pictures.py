"""Pictures of the experiments: panels of curves with bands, and grids of numbers. Needs matplotlib."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = ("#4477aa", "#bb5566", "#228833", "#ddaa33", "#aa3377", "#000000", "#66ccee")
Values = Sequence[float]


def picture(options: Any, name: str) -> Path | None:
    """Where to write the picture NAME.png, if --plots was given and matplotlib is here; else None (and why)."""
    if options.plots is None:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no pictures: they need matplotlib (pip install matplotlib)", file=sys.stderr)
        return None
    options.plots.mkdir(parents=True, exist_ok=True)
    return Path(options.plots) / f"{name}.png"


class Panel(NamedTuple):
    """Curves by name: (x, y), or (x, [y of a run, ...]), which is a line through the medians and a band from minimum to
    maximum. logs: "x", "y" or "xy"."""

    title: str
    curves: Mapping[str, tuple[Values, Any]]
    x: str = ""
    y: str = ""
    logs: str = ""


def _figure(count: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def panels(path: Path, given: Sequence[Panel], columns: int = 4) -> None:
    """Write panels side by side; a name has the same colour in all."""
    names = list(dict.fromkeys(name for panel in given for name in panel.curves))
    figure, places = _figure(len(given), min(columns, len(given)), (4.2, 3.5))
    for axes, panel in zip(places, given, strict=True):
        for name, (x, y) in panel.curves.items():
            colour, several = COLOURS[names.index(name) % len(COLOURS)], bool(y) and isinstance(y[0], Sequence)
            runs = list(zip(*y, strict=True)) if several else y
            axes.plot(x, [statistics.median(each) for each in runs] if several else y, color=colour, lw=1.4, label=name)
            if several:
                axes.fill_between(x, [min(r) for r in runs], [max(r) for r in runs], color=colour, alpha=0.2, lw=0)
        axes.set(xlabel=panel.x, ylabel=panel.y, xscale="log" if "x" in panel.logs else "linear",
                 yscale="log" if "y" in panel.logs else "linear")  # fmt: skip
        axes.set_title(panel.title, fontsize=9)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


class Grid(NamedTuple):
    """Numbers [rows, columns] as shades, each with a text."""

    title: str
    values: Sequence[Values]
    texts: Sequence[Sequence[str]]
    rows: Sequence[str]
    columns: Sequence[str]
    colours: str = "viridis"


def grids(path: Path, given: Sequence[Grid], columns: int = 2, size: tuple[float, float] = (6.0, 2.8)) -> None:
    """Write grids side by side."""
    figure, places = _figure(len(given), min(columns, len(given)), size)
    for axes, grid in zip(places, given, strict=True):
        image = axes.imshow(grid.values, cmap=grid.colours, aspect="auto")
        for y, line in enumerate(grid.texts):
            for x, text in enumerate(line):
                red, green, blue, _ = image.cmap(image.norm(grid.values[y][x]))
                dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        axes.set_xticks(range(len(grid.columns)), grid.columns, fontsize=7)
        axes.set_yticks(range(len(grid.rows)), grid.rows, fontsize=7)
        axes.set_title(grid.title, fontsize=9)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
