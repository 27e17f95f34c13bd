"""Bins of the confidence in the predicted class, kept in `<stem>_bins.csv` beside a run's rows, and the reliability
diagrams drawn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import read_rows
from benchmarks.timing import append
from examples.papers import common
from examples.papers.pictures import picture
from fastdp.calibration import Calibration, calibration, reliability_diagram

BINS = ("experiment", "case", "mode", "seed", "bin", "count", "confidence", "accuracy", "nll", "ece", "commit")


def beside(out: Path) -> Path:
    """The file of bins beside a file of rows."""
    return out.with_name(f"{out.stem}_bins.csv")


def keep(out: Path, run: Mapping[str, Any], logits: Tensor, labels: Tensor) -> None:
    """Add a run's bins to the file beside `out`. run: its experiment, case, mode and seed."""
    found, base = calibration(logits, labels), {**run, "commit": common.COMMIT}
    rows = []
    for number, count in enumerate(found.bin_count.tolist()):
        values = {"confidence": found.bin_confidence[number], "accuracy": found.bin_accuracy[number],
                  "nll": found.nll, "ece": found.ece}  # fmt: skip
        rows.append({**base, "bin": number, "count": count, **{k: f"{float(v):.6g}" for k, v in values.items()}})
    append(beside(out), rows, BINS)


def kept(path: Path, cases: Sequence[str]) -> dict[str, Calibration]:
    """The calibration of the last run kept of each case, in its highest mode; in the order of `cases`."""
    rows, found = read_rows(path), dict[str, Calibration]()
    for case in cases:
        mine = [row for row in rows if row["case"] == case]
        best = max((row["mode"] for row in mine), key=common.MODES.index, default="")
        runs = [row for row in mine if row["mode"] == best]
        if not runs:
            continue
        last = runs[max(k for k, row in enumerate(runs) if row["bin"] == "0") :]
        count, right, mean = (
            torch.tensor([float(row[name]) for row in last], dtype=torch.float64)
            for name in ("count", "accuracy", "confidence")
        )
        accuracy, gap = float((right * count).sum() / count.sum()), float((right - mean).abs()[count > 0].max())
        nll, ece = float(last[0]["nll"]), float(last[0]["ece"])
        found[case] = Calibration(nll, accuracy, ece, gap, mean, right, count)
    return found


def draw(options: Any, cases: Mapping[str, str], stem: str) -> None:
    """Into --plots: reliability diagrams. cases: their names in the rows, and in the picture."""
    path, bins = picture(options, f"{stem}_reliability"), beside(options.out)
    if path is None:
        return
    found = kept(bins, list(cases))
    if not found:
        raise SystemExit(f"nothing to draw: there are no rows of these cases in {bins}; run without --draw first")
    reliability_diagram({cases[case]: one for case, one in found.items()}, path)
