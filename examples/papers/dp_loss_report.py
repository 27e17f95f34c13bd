"""The tables of docs/papers.md on what the loss paper looks at beside accuracy, and of its five runs.

From benchmarks/data/dp_loss_epochs.csv and dp_loss_details.csv, which dp_loss.py has written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from examples.papers.dp_loss_watch import read

NAMES = {"mnist": "MNIST", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
CASES = ("cross-entropy", "dploss")
FIVE = (1, 5, 10)  # epochs
Row = dict[str, str]
Found = dict[str, dict[int, float]]  # of each case: by epoch


class Look(NamedTuple):
    """One quantity, of which the paper says that DPLoss makes it smaller or larger than cross-entropy does."""

    name: str
    source: str
    smaller: bool
    values: Callable[[str, str, Path], dict[int, float]]  # of a task and case: by epoch
    early: bool = False  # the paper shows the first epoch alone


def looks(data: Path) -> list[list[str]]:
    """Lines of a table: quantity, what the paper says of it, and for each data set cross-entropy's and DPLoss's value
    in the first and last epoch that was looked at; bold where it is not as the paper says."""
    lines = []
    for look in LOOKS:
        cells = []
        for task in NAMES:
            found = {case: look.values(task, case, data) for case in CASES}
            epochs = sorted(set(found[CASES[0]]) & set(found[CASES[1]]))
            shown = []
            for epoch in epochs[:1] if look.early else sorted({*epochs[:1], *epochs[-1:]}):
                entropy, ours = (found[case][epoch] for case in CASES)
                text = f"{entropy:.3g} / {ours:.3g}"
                shown.append(text if ours != entropy and (ours < entropy) == look.smaller else f"**{text}**")
            cells.append("; ".join(shown))
        lines.append([look.name, f"{'smaller' if look.smaller else 'larger'} ({look.source})", *cells])
    return lines


HEAD = ("quantity", "with DPLoss, says the paper", *NAMES.values())


def _epochs(pick: Callable[[Row], float]) -> Callable[[str, str, Path], dict[int, float]]:
    """A column of the run that was looked at: the first seed's, the longest."""

    def values(task: str, case: str, data: Path) -> dict[int, float]:
        rows = read(data / "dp_loss_epochs.csv", task=task, case=case, seed=0)
        longest = max((int(row["epochs"]) for row in rows), default=0)
        return {int(row["epoch"]): pick(row) for row in rows if int(row["epochs"]) == longest}

    return values


def _last(column: str) -> Callable[[Row], float]:
    return lambda row: float(row[column].split()[-1])


def _steps(task: str, case: str, data: Path) -> dict[int, float]:
    """The median cosine of the steps of an epoch."""
    rows = read(data / "dp_loss_details.csv", task=task, case=case, seed=0, what="cosine")
    return {epoch: statistics.median(float(row["value"]) for row in rows if int(row["epoch"]) == epoch)
            for epoch in {int(row["epoch"]) for row in rows}}  # fmt: skip


def _singular(task: str, case: str, data: Path) -> dict[int, float]:
    rows = read(data / "dp_loss_details.csv", task=task, case=case, seed=0, what="singular value")
    return {int(row["epoch"]): float(row["value"]) for row in rows}


def _worst(task: str, case: str, data: Path) -> dict[int, float]:
    """The training accuracy, in percent, of the class with the lowest."""
    rows = read(data / "dp_loss_details.csv", task=task, case=case, seed=0, what="confusion")
    found = {}
    for epoch in {int(row["epoch"]) for row in rows}:
        mine = [row for row in rows if int(row["epoch"]) == epoch]
        shares = []
        for label in {row["i"] for row in mine}:
            counts = {row["j"]: float(row["value"]) for row in mine if row["i"] == label}
            shares.append(100 * counts.get(label, 0.0) / sum(counts.values()))
        found[epoch] = min(shares)
    return found


LOOKS = (
    Look("norm of the last layer's weights", "Figures 1b, 5", True, _epochs(_last("weights"))),
    Look("norm of the last pre-activation", "Figure 5", True, _epochs(_last("pre_activations"))),
    Look("norm of the logits", "Figures 1a, 5", True, _epochs(_last("logits"))),
    Look("median norm of gradients", "Figures 1c, 6", True, _epochs(_last("norm_median")), early=True),
    Look("90 % of gradients have a norm below", "Figures 1c, 6", True, _epochs(_last("norm_p90")), early=True),
    Look("median cosine of clipped and unclipped sums", "Figure 7", False, _steps, early=True),
    Look("cosine at the epoch's last step", "Figure 7", False, _epochs(_last("cosine")), early=True),
    Look("largest singular value of the Hessian", "Figure 2, MNIST", True, _singular),
    Look("training accuracy of the worst class, percent", "Figure 8", False, _worst),
)


def five(data: Path) -> list[list[str]]:
    """Lines of a table: data, epoch, epsilon; minimum, median and maximum of the accuracy with each loss."""
    lines = []
    for task, name in NAMES.items():
        for epoch in FIVE:
            cells, epsilon, seeds = [], "", set()
            for case in CASES:
                rows = read(data / "dp_loss_epochs.csv", task=task, case=case, epoch=epoch)
                by_seed = {row["seed"]: 100 * float(row["accuracy"]) for row in rows}
                seeds.add(len(by_seed))
                if by_seed:
                    epsilon = f"{float(rows[0]['epsilon_rdp']):.2f}"
                    shown = (min(by_seed.values()), statistics.median(by_seed.values()), max(by_seed.values()))
                    cells.append(", ".join(f"{value:.1f}" for value in shown))
            if seeds == {5}:
                lines.append([name, str(epoch), epsilon, *cells])
    return lines


FIVE_HEAD = ("data", "epoch", "epsilon", "cross-entropy", "DPLoss")


def blocks(data: Path, table: Callable[[Sequence[str], list[list[str]]], str]) -> dict[str, str]:
    """The bodies of docs/papers.md's tables of these names."""
    return {"five runs": table(FIVE_HEAD, five(data)), "looks": table(HEAD, looks(data))}
