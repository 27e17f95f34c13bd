"""Tables and figures on what the loss paper looks at beside accuracy, and on its five runs.

From benchmarks/data/dp_loss_epochs.csv and dp_loss_details.csv, which dp_loss.py has written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import read_rows
from examples.papers.pictures import Grid, Panel, grids, panels, picture

NAMES = {"mnist": "MNIST", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
CASES = ("cross-entropy", "dploss")
FIVE = (1, 5, 10)  # epochs
Row = dict[str, str]
Found = dict[str, dict[int, float]]  # of each case: by epoch


def files(out: Path) -> tuple[Path, Path]:
    """Where what is seen by epoch, and the details, are kept: beside --out, without "papers_"."""
    stem = out.stem.removeprefix("papers_")
    return out.with_name(f"{stem}_epochs.csv"), out.with_name(f"{stem}_details.csv")


def read(path: Path, **wanted: Any) -> list[Row]:
    """Rows of such a file with the wanted values; of a (task, case, seed, what, epoch, i, j) that is there twice, the
    later one."""
    rows = [row for row in read_rows(path) if all(row[k] == str(v) for k, v in wanted.items())]
    names = ("task", "case", "seed", "what", "epoch", "i", "j")
    return list({tuple(row.get(name) for name in names): row for row in rows}.values())


# ---------------------------------------------------------------------- tables


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


# ---------------------------------------------------------------------- figures


def draw(options: Any) -> None:
    """Every figure for which there are rows, into --plots. Exits where there is nothing to draw."""
    epochs, details = (read(path) for path in files(options.out))
    if not epochs:
        raise SystemExit(f"nothing to draw: there is no {files(options.out)[0]}")
    for task in dict.fromkeys(row["task"] for row in epochs if row["task"] in options.tasks):
        mine = [row for row in epochs if row["task"] == task and row["epsilon_rdp"]]
        seen = [row for row in details if row["task"] == task]
        for name, made in (("accuracy", accuracy(mine)), ("norms", norms(mine)), ("looks", details_of(seen))):
            path = picture(options, f"dp_loss_{task}_{name}")
            if made and path is not None:
                panels(path, made)
        path, errors = picture(options, f"dp_loss_{task}_confusion"), confusion(seen)
        if errors and path is not None:
            grids(path, errors, len(errors) // 2, (3.4, 3.2))


def accuracy(rows: Sequence[Row]) -> list[Panel]:
    """Test accuracy by epsilon, of each case, of those runs that came so far."""
    curves = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        seeds = [[row for row in mine if row["seed"] == seed] for seed in dict.fromkeys(row["seed"] for row in mine)]
        shortest = min(map(len, seeds))
        runs = [[float(row["accuracy"]) for row in run[:shortest]] for run in seeds]
        curves[f"{case} (n {len(seeds)})"] = [float(row["epsilon_rdp"]) for row in seeds[0][:shortest]], runs
    return [Panel("", curves, "epsilon (RDP)", "test accuracy")] if curves else []


def norms(rows: Sequence[Row]) -> list[Panel]:
    """By epoch: norms of weights and pre-activations of the first and last layers, of logits, and of gradients."""
    first = {case: [row for row in rows if row["case"] == case and row["seed"] == "0"] for case in CASES}
    first = {case: mine for case, mine in first.items() if mine}
    found = []
    for column in ("weights", "pre_activations", "logits", "norm_median"):
        count = len(next(iter(first.values()))[0][column].split()) if first else 0
        for layer in sorted({0, 1, count - 2, count - 1} & set(range(count))):
            curves = {case: ([int(r["epoch"]) for r in mine], [float(r[column].split()[layer]) for r in mine])
                      for case, mine in first.items()}  # fmt: skip
            place = f", layer {layer + 1}" if count > 1 else ""
            found.append(Panel(column.replace("_", "-") + place, curves, "epoch"))
    return found


def details_of(rows: Sequence[Row]) -> list[Panel]:
    """Gradient norms of the first and last epoch, cosines of the first epoch, singular values; of the first seed."""

    def curves(what: str, x: str, **wanted: str) -> dict[str, tuple[list[float], list[float]]]:
        found = {}
        for case in dict.fromkeys(row["case"] for row in rows if row["case"] != "non-private"):
            mine = [row for row in rows if (row["case"], row["what"], row["seed"]) == (case, what, "0")]
            mine = [row for row in mine if all(row[k] == v for k, v in wanted.items())]
            if mine:
                found[case] = [float(row[x]) for row in mine], [float(row["value"]) for row in mine]
        return found

    seen = [row["epoch"] for row in rows if row["what"] == "norms"]
    found = [Panel(f"gradient norms, epoch {epoch}", curves("norms", "j", epoch=epoch), logs="xy")
             for epoch in dict.fromkeys([*seen[:1], *seen[-1:]])]  # fmt: skip
    found.append(Panel("cosine of clipped and unclipped sums", curves("cosine", "i"), "step of the first epoch"))
    sharp = curves("singular value", "epoch")
    found.append(Panel("largest singular value of the Hessian", sharp, "epoch", logs="y"))
    return found if seen else []


def confusion(rows: Sequence[Row]) -> list[Grid]:
    """Errors by class on the training set, in percent of a class, at epoch 2 (or the first) and at the last."""
    mine = [row for row in rows if row["what"] == "confusion" and row["seed"] == "0"]
    cases = [case for case in ("dploss", "cross-entropy", "non-private") if any(row["case"] == case for row in mine)]
    epochs = sorted({int(row["epoch"]) for row in mine})
    found, names = [], [str(label) for label in range(10)]
    for epoch in (2 if 2 in epochs else epochs[0], epochs[-1]) if epochs else ():
        for case in cases:
            counts = [[0.0] * 10 for _ in names]
            for row in mine:
                if row["case"] == case and int(row["epoch"]) == epoch:
                    counts[int(row["i"])][int(row["j"])] = float(row["value"])
            shares = [[100 * value / max(sum(line), 1) for value in line] for line in counts]
            texts = [
                [f"{value:.0f}" if i == j else "" for j, value in enumerate(line)] for i, line in enumerate(shares)
            ]
            found.append(Grid(f"{case}, epoch {epoch}", shares, texts, names, names, "Blues"))
    return found
