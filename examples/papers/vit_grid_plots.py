"""Pictures of vit_grid.py: heat maps of accuracy and ECE by lr and R; ECE and temperature by R. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

COLOURS = ("#4477aa", "#bb5566", "#228833")


def _mean(cells: Sequence[Any], metric: str, **which: Any) -> float:
    """Of the cells with these attributes, over seeds; not-a-numbers stay."""
    found = [c.metrics[metric] for c in cells if all(getattr(c, name) == value for name, value in which.items())]
    return sum(found) / len(found)


def _cases(cells: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(c.case for c in cells))


def _axes(cells: Sequence[Any], case: str) -> tuple[list[float], list[float]]:
    """Learning rates and clipping norms of a case, in order."""
    mine = [c for c in cells if c.case == case]
    return sorted({c.lr for c in mine}), sorted({c.R for c in mine})


def heat_maps(cells: Sequence[Any], path: str | Path) -> None:
    """A row of two maps for each case: test accuracy and ECE in %, means over seeds; lr across, R upwards."""
    from matplotlib.figure import Figure

    cases = _cases(cells)
    figure = Figure(figsize=(12, 0.8 + 2.6 * len(cases)), layout="constrained")
    for row, case in enumerate(cases):
        rates, radii = _axes(cells, case)
        for column, (metric, colours) in enumerate((("accuracy", "viridis"), ("ece", "magma_r"))):
            values = torch.tensor([[100 * _mean(cells, metric, case=case, lr=lr, R=R) for lr in rates] for R in radii])
            axes = figure.add_subplot(len(cases), 2, 2 * row + column + 1)
            axes.imshow(values, origin="lower", cmap=colours, aspect="auto")
            middle = float(values.min() + values.max()) / 2
            for i in range(len(radii)):
                for k in range(len(rates)):
                    bright = (values[i, k] > middle) == (colours == "viridis")
                    axes.text(k, i, f"{values[i, k]:.0f}", ha="center", va="center", fontsize=7,
                              color="black" if bright else "white")  # fmt: skip
            axes.set_xticks(range(len(rates)), [f"{lr:.2g}" for lr in rates], fontsize=7)
            axes.set_yticks(range(len(radii)), [f"{R:.2g}" for R in radii], fontsize=7)
            axes.set(xlabel="learning rate", ylabel="clipping norm R")
            axes.set_title(f"{'accuracy' if metric == 'accuracy' else 'ECE'}, %: {case}", fontsize=9)
    figure.savefig(path, dpi=120)


def best_rates(cells: Sequence[Any], case: str) -> list[tuple[float, float]]:
    """(R, the lr of the best mean accuracy on held-out images) of each R."""
    rates, radii = _axes(cells, case)
    score = lambda lr, R: _mean(cells, "dev_accuracy", case=case, lr=lr, R=R)
    return [(R, max(rates, key=lambda lr: score(lr, R))) for R in radii]


def by_radius(cells: Sequence[Any], path: str | Path) -> None:
    """Accuracy, ECE and the best temperature by R, each R at its best learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    told = (("accuracy", "accuracy, %", 100), ("ece", "ECE, %", 100), ("temperature", "best temperature", 1))
    for place, (metric, label, scale) in enumerate(told):
        axes = figure.add_subplot(1, len(told), place + 1)
        for case, colour in zip(_cases(cells), COLOURS, strict=False):
            best = best_rates(cells, case)
            values = [scale * _mean(cells, metric, case=case, lr=lr, R=R) for R, lr in best]
            axes.plot([R for R, _ in best], values, "o-", ms=4, color=colour, label=case)
        axes.set(xscale="log", xlabel="clipping norm R (each at its best learning rate)", ylabel=label)
        if metric == "temperature":
            axes.axhline(1, ls="--", color="grey", lw=1)
            axes.set_yscale("log")
        if not place:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
