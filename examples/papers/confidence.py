"""Rows of confidence, and the pictures drawn from them: reliability diagrams, confidence histograms, and how probable
the true class is.

A run keeps two files beside its rows: `<stem>_bins.csv`, bins of the confidence in the predicted class, and
`<stem>_truth_bins.csv`, of the probability of the true class.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.papers import common
from fastdp.calibration import Calibration, reliability_diagram

BINS = ("experiment", "case", "mode", "seed", "bin", "count", "confidence", "accuracy", "nll", "ece", "commit")
TRUTH = ("experiment", "case", "mode", "seed", "bin", "count", "commit")
WIDTH = 20  # bins of the true class's probability


class Run(NamedTuple):
    """Whose bins they are."""

    experiment: str
    case: str
    mode: str
    seed: int


def beside(out: Path, kind: str = "bins") -> Path:
    """The file of bins beside a file of rows; kind "truth_bins": of the true class."""
    return out.with_name(f"{out.stem}_{kind}.csv")


def keep(out: Path, run: Run, found: Calibration, logits: Tensor, labels: Tensor) -> None:
    """Add a run's bins to both files beside `out`."""
    rows = []
    for number, count in enumerate(found.bin_count.tolist()):
        values = [found.bin_confidence[number], found.bin_accuracy[number], found.nll, found.ece]
        rows.append([*run, number, count, *(f"{float(value):.6g}" for value in values), common.COMMIT])
    _append(beside(out), BINS, rows)
    truth = enumerate(truth_bins(logits, labels).tolist())
    _append(beside(out, "truth_bins"), TRUTH, [[*run, number, count, common.COMMIT] for number, count in truth])


def truth_bins(logits: Tensor, labels: Tensor) -> Tensor:
    """How many samples give their true class a probability in [k / WIDTH, (k + 1) / WIDTH): [WIDTH]."""
    p = logits.double().softmax(1).gather(1, labels[:, None].long())[:, 0]
    return torch.bincount((p * WIDTH).long().clamp(max=WIDTH - 1), minlength=WIDTH)


def _append(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(columns)
        writer.writerows(rows)


def _last(path: Path, mode: str | None, cases: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """Rows of the last run kept of each case; mode None: of the highest mode that the case has."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for case in cases:
        mine = [row for row in rows if row["case"] == case and mode in (None, row["mode"])]
        best = max((row["mode"] for row in mine), key=common.MODES.index, default="")
        runs = [row for row in mine if row["mode"] == best]
        if runs:
            found[case] = runs[max(k for k, row in enumerate(runs) if row["bin"] == "0") :]
    return found


def kept(path: Path, mode: str | None, cases: Sequence[str]) -> dict[str, Calibration]:
    """The calibration of the last run kept of each case, in the order of `cases`; mode None: the highest it has."""
    found: dict[str, Calibration] = {}
    for case, last in _last(path, mode, cases).items():
        column = lambda name, of=last: torch.tensor([float(row[name]) for row in of], dtype=torch.float64)
        count, right = column("count"), column("accuracy")
        gaps = (right - column("confidence")).abs()[count > 0]
        found[case] = Calibration(
            float(last[0]["nll"]), float((right * count).sum() / count.sum()), float(last[0]["ece"]), float(gaps.max()),
            column("confidence"), right, count,
        )  # fmt: skip
    return found


# ---------------------------------------------------------------------- pictures


def draw(options: Any, cases: Sequence[str], stem: str, mode: str | None = None,
         names: Mapping[str, str] | None = None) -> None:  # fmt: skip
    """Into --plots: reliability diagrams, confidence histograms and, where it was kept, the true class's probability.

    names: of a case in the picture, where it is not its own.
    """
    path = common.picture(options, f"{stem}_reliability")
    if path is None:
        return
    bins = beside(options.out)
    found = kept(bins, mode, cases)
    if not found:
        raise SystemExit(f"nothing to draw: there are no rows of these cases in {bins}; run without --draw first")
    named = {(names or {}).get(case, case): one for case, one in found.items()}
    reliability_diagram(named, path)
    print(f"wrote {path}")
    histograms({name: (one.bin_count, one) for name, one in named.items()}, "confidence in the predicted class",
               path.with_name(f"{stem}_confidence.png"))  # fmt: skip
    truth = _last(beside(options.out, "truth_bins"), mode, cases)
    if truth:
        counts = {(names or {}).get(case, case): (torch.tensor([float(row["count"]) for row in rows]), None)
                  for case, rows in truth.items()}  # fmt: skip
        histograms(counts, "probability of the true class", path.with_name(f"{stem}_truth.png"))


def histograms(found: Mapping[str, tuple[Tensor, Calibration | None]], what: str, path: Path) -> None:
    """A histogram a case, side by side: shares of the test set; mean confidence and accuracy as lines where known."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(found), 3.2), layout="constrained")
    every = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (name, (count, calibration)) in zip(every, found.items(), strict=True):
        bins, total = len(count), float(count.sum())
        centres = (torch.arange(bins) + 0.5) / bins
        axes.bar(centres, count.double() / total, 1 / bins, color="#4477aa", edgecolor="white")
        if calibration is not None:
            mean = float((calibration.bin_confidence * count).sum() / total)
            axes.axvline(mean, color="#bb5566", label=f"mean confidence {100 * mean:.1f} %")
            right = calibration.accuracy
            axes.axvline(right, color="black", ls="--", label=f"accuracy {100 * right:.1f} %")
            axes.legend(frameon=False, fontsize=7, loc="upper left")
        axes.set(xlim=(0, 1), xlabel=what)
        axes.set_title(name, fontsize=9)
    every[0].set(ylabel="share of the test set")
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")
