"""The figures of the loss paper, drawn from the rows that dp_loss.py wrote."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.papers import common
from examples.papers import dp_loss_watch as watch

Row = dict[str, str]
COLOURS = ("#3b6ea8", "#c0504d", "#5b8c5a", "#8064a2", "#d08a2e", "#4d4d4d")
LAYERS = 6  # panels show no more


def files(out: Path) -> tuple[Path, Path]:
    """Where what is seen by epoch, and the details, are kept: beside --out, without "papers_"."""
    stem = out.stem.removeprefix("papers_")
    return out.with_name(f"{stem}_epochs.csv"), out.with_name(f"{stem}_details.csv")


def draw(options: Any) -> None:
    """Every figure for which there are rows, into --plots. Exits where there is nothing to draw."""
    epochs, details = (watch.read(path) for path in files(options.out))
    if not epochs:
        raise SystemExit(f"nothing to draw: there is no {files(options.out)[0]}")
    made = []
    for task in dict.fromkeys(row["task"] for row in epochs if row["task"] in options.tasks):
        mine = [row for row in epochs if row["task"] == task]
        seen = [row for row in details if row["task"] == task]
        for name, function, rows in (("accuracy", accuracy, mine), ("norms", norms, mine), ("looks", looks, seen),
                                     ("confusion", confusion, seen)):  # fmt: skip
            path = common.picture(options, f"dp_loss_{task}_{name}")
            if rows and path is not None and function(rows, path):
                made.append(path.name)
    print("wrote " + ", ".join(made))


def by_case(rows: Sequence[Row], private: bool = True, shorter: bool = False) -> dict[str, list[Row]]:
    """Rows of each case of the most epochs that it was run for, or of shorter runs, too (nothing depends on how long a
    run is meant to be); without what has no epsilon, if private."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if not private or row["epsilon_rdp"]:
            found.setdefault(row["case"], []).append(row)
    for case, mine in () if shorter else found.items():
        longest = max(int(row["epochs"]) for row in mine)
        found[case] = [row for row in mine if int(row["epochs"]) == longest]
    return found


def bands(rows: Sequence[Row], column: str) -> list[tuple[float, float, float, float]]:
    """(epsilon, minimum, median, maximum) of the seeds, by epoch."""
    at: dict[int, list[Row]] = {}
    for row in rows:
        at.setdefault(int(row["epoch"]), []).append(row)
    found = []
    for epoch in sorted(at):
        values = [float(row[column]) for row in at[epoch]]
        found.append((float(at[epoch][0]["epsilon_rdp"]), min(values), statistics.median(values), max(values)))
    return found


def accuracy(rows: Sequence[Row], path: Path) -> bool:
    """Test accuracy by epsilon, of each case: a line through the medians, a band from minimum to maximum of those runs
    that came so far."""
    cases = by_case(rows, shorter=True)
    figure, (axes,) = _figure(1, 1, (6.4, 4.2))
    for colour, (case, mine) in zip(COLOURS * 9, cases.items(), strict=False):
        epsilon, low, middle, high = zip(*bands(mine, "accuracy"), strict=True)
        seeds = len({row["seed"] for row in mine})
        axes.plot(epsilon, middle, color=colour, lw=1.5, label=f"{case} (n {seeds})")
        axes.fill_between(epsilon, low, high, color=colour, alpha=0.2, lw=0)
    axes.set(xlabel="epsilon (RDP)", ylabel="test accuracy")
    axes.legend(frameon=False, fontsize=8)
    return _save(figure, path, bool(cases))


def norms(rows: Sequence[Row], path: Path) -> bool:
    """By epoch: norms of weights and pre-activations of each layer, of logits, and of gradients."""
    cases = {name: mine for name, mine in by_case(rows).items() if name in ("cross-entropy", "dploss")}
    if not cases:
        return False
    first = next(iter(cases.values()))[0]
    layers = [len(first[column].split()) for column in ("weights", "pre_activations")]
    panels = [(column, i) for column, count in zip(("weights", "pre_activations"), layers, strict=True)
              for i in _some(count)]  # fmt: skip
    panels += [("logits", 0), ("norm_median", 0)]
    figure, grid = _figure((len(panels) + 3) // 4, 4, (12, 2.6 * ((len(panels) + 3) // 4)))
    for axes, (column, place) in zip(grid, panels, strict=False):
        for colour, (case, mine) in zip(COLOURS, cases.items(), strict=False):
            seed = mine[0]["seed"]
            points = sorted((int(r["epoch"]), float(r[column].split()[place])) for r in mine if r["seed"] == seed)
            axes.plot(*zip(*points, strict=True), color=colour, lw=1.3, label=case)
        words = column.replace("_", "-")
        axes.set_title(f"{words}, layer {place + 1}" if column not in ("logits", "norm_median") else words, fontsize=8)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    grid[0].legend(frameon=False, fontsize=7)
    return _save(figure, path, True)


def _some(count: int) -> list[int]:
    """The first and last layers of many."""
    return list(range(count)) if count <= LAYERS else [0, 1, *range(count - LAYERS + 2, count)]


def looks(rows: Sequence[Row], path: Path) -> bool:
    """Histograms of gradient norms of the first and last epoch, cosines of the first epoch, singular values."""
    figure, grid = _figure(1, 4, (14, 3.2))
    spans = _seen_of_all(rows, "norms")
    for axes, epoch in zip(grid[:2], spans[:: max(len(spans) - 1, 1)], strict=False):
        for colour, case in zip(COLOURS, _cases(rows), strict=False):
            mine = [r for r in _of(rows, case, "norms") if int(r["epoch"]) == epoch]
            edges = [float(r["i"]) for r in mine] + [float(r["j"]) for r in mine[-1:]]
            if mine:
                axes.stairs([float(r["value"]) for r in mine], edges, color=colour, label=case, fill=True, alpha=0.5)
        axes.set(yscale="log", xscale="log")
        axes.tick_params(axis="x", which="minor", labelbottom=False)
        axes.set_title(f"gradient norms, epoch {epoch}", fontsize=9)
    for colour, case in zip(COLOURS, _cases(rows), strict=False):
        cosines = [(int(r["i"]), float(r["value"])) for r in _of(rows, case, "cosine")]
        sharp = [(int(r["epoch"]), float(r["value"])) for r in _of(rows, case, "singular value")]
        for axes, points in ((grid[2], cosines), (grid[3], sharp)):
            if points:
                axes.plot(*zip(*sorted(points), strict=True), color=colour, lw=1.3, label=case)
    grid[2].set(xlabel="step of the first epoch")
    grid[2].set_title("cosine of clipped and unclipped sums", fontsize=9)
    grid[3].set(xlabel="epoch", yscale="log")
    grid[3].set_title("largest singular value of the Hessian", fontsize=9)
    grid[3].legend(frameon=False, fontsize=8)
    return _save(figure, path, bool(spans))


def confusion(rows: Sequence[Row], path: Path) -> bool:
    """Errors by class on the training set, in percent of a class, at epoch 2 and at the last."""
    cases = [case for case in ("dploss", "cross-entropy", "non-private") if _of(rows, case, "confusion")]
    if not cases:
        return False
    figure, grid = _figure(2, len(cases), (3.4 * len(cases), 6.6))
    for column, case in enumerate(cases):
        mine = _of(rows, case, "confusion")
        epochs = _seen_of_all(rows, "confusion")
        for line, epoch in enumerate((2 if 2 in epochs else epochs[0], epochs[-1])):
            shares = [[0.0] * 10 for _ in range(10)]
            for row in mine:
                if int(row["epoch"]) == epoch:
                    shares[int(row["i"])][int(row["j"])] = float(row["value"])
            shares = [[100 * value / max(sum(line), 1) for value in line] for line in shares]
            axes = grid[line * len(cases) + column]
            axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
            for i in range(10):
                axes.text(i, i, f"{shares[i][i]:.0f}", ha="center", va="center", fontsize=6, color="#c0504d")
            axes.set_title(f"{case}, epoch {epoch}", fontsize=8)
            axes.tick_params(labelsize=6)
    return _save(figure, path, True)


def _seen_of_all(rows: Sequence[Row], what: str) -> list[int]:
    """The epochs at which all cases were looked at."""
    seen: dict[str, set[int]] = {}
    for row in rows:
        if row["what"] == what:
            seen.setdefault(row["case"], set()).add(int(row["epoch"]))
    return sorted(set.intersection(*seen.values())) if seen else []


def _cases(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows if row["case"] != "non-private"))


def _of(rows: Sequence[Row], case: str, what: str) -> list[Row]:
    """Of the first seed."""
    mine = [row for row in rows if row["case"] == case and row["what"] == what]
    return [row for row in mine if row["seed"] == mine[0]["seed"]]


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]


def _save(figure: Any, path: Path, drawn: bool) -> bool:
    if drawn:
        figure.savefig(path, dpi=100)
    return drawn
