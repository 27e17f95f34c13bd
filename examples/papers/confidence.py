"""Rows of confidence, and the pictures drawn from them: reliability diagrams, confidence histograms, and how probable
the true class is.

A run keeps two files beside its rows: `<stem>_bins.csv`, bins of the confidence in the predicted class, and
`<stem>_truth_bins.csv`, of the probability of the true class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.tables import read_rows
from benchmarks.timing import append
from examples.papers import common
from examples.papers.pictures import bars, picture
from fastdp.calibration import Calibration, calibration, reliability_diagram

TRUTH = ("experiment", "case", "mode", "seed", "bin", "count", "commit")
BINS = (*TRUTH[:-1], "confidence", "accuracy", "nll", "ece", "commit")
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


def keep(out: Path, run: Run, logits: Tensor, labels: Tensor) -> None:
    """Add a run's bins to both files beside `out`."""
    found, base = calibration(logits, labels), {**run._asdict(), "commit": common.COMMIT}
    rows = []
    for number, count in enumerate(found.bin_count.tolist()):
        values = {"confidence": found.bin_confidence[number], "accuracy": found.bin_accuracy[number],
                  "nll": found.nll, "ece": found.ece}  # fmt: skip
        rows.append({**base, "bin": number, "count": count, **{k: f"{float(v):.6g}" for k, v in values.items()}})
    append(beside(out), rows, BINS)
    truth = enumerate(truth_bins(logits, labels).tolist())
    append(beside(out, "truth_bins"), [{**base, "bin": number, "count": count} for number, count in truth], TRUTH)


def truth_bins(logits: Tensor, labels: Tensor) -> Tensor:
    """How many samples give their true class a probability in [k / WIDTH, (k + 1) / WIDTH): [WIDTH]."""
    p = logits.double().softmax(1).gather(1, labels[:, None].long())[:, 0]
    return torch.bincount((p * WIDTH).long().clamp(max=WIDTH - 1), minlength=WIDTH)


def _last(path: Path, mode: str | None, cases: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """Rows of the last run kept of each case; mode None: of the highest mode that the case has."""
    rows, found = read_rows(path), {}
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


def draw(options: Any, cases: Mapping[str, str], stem: str, mode: str | None = None) -> None:
    """Into --plots: reliability diagrams, confidence histograms and the true class's probability.

    cases: their names in the rows, and in the picture.
    """
    path, bins = picture(options, f"{stem}_reliability"), beside(options.out)
    if path is None:
        return
    found = kept(bins, mode, list(cases))
    if not found:
        raise SystemExit(f"nothing to draw: there are no rows of these cases in {bins}; run without --draw first")
    named = {cases[case]: one for case, one in found.items()}
    reliability_diagram(named, path)
    shares = {}
    for name, one in named.items():
        mean = float((one.bin_confidence * one.bin_count).sum() / one.bin_count.sum())
        shares[name] = (one.bin_count.tolist(), {"mean confidence": mean, "accuracy": one.accuracy})
    bars(path.with_name(f"{stem}_confidence.png"), shares, "confidence in the predicted class")
    truth = {cases[case]: ([float(row["count"]) for row in rows], {})
             for case, rows in _last(beside(options.out, "truth_bins"), mode, list(cases)).items()}  # fmt: skip
    if truth:
        bars(path.with_name(f"{stem}_truth.png"), truth, "probability of the true class")
