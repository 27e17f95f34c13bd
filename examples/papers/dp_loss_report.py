"""Tables and figures on what the loss paper looks at beside accuracy, and on its five runs.

From benchmarks/data/dp_loss_epochs.csv and dp_loss_details.csv, which dp_loss.py has written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import read_rows, table
from examples.papers.pictures import Panel, panels, picture

NAMES = {"mnist": "MNIST", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
CASES = ("cross-entropy", "dploss")
HEAD = ("quantity", "with DPLoss, says the paper", *NAMES.values())
FIVE_HEAD = ("data", "epoch", "epsilon", "cross-entropy", "DPLoss")
Row = dict[str, str]
ByEpoch = dict[int, float]


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


# ---------------------------------------------------------------------- what the losses do to gradients


class Seen(NamedTuple):
    """The first seed's longest run of a case: a row an epoch, and the details of some epochs by `what`."""

    epochs: list[Row]
    details: list[Row]

    def detail(self, what: str) -> dict[int, list[Row]]:
        """Rows of one kind by epoch."""
        found: dict[int, list[Row]] = {}
        for row in self.details:
            if row["what"] == what:
                found.setdefault(int(row["epoch"]), []).append(row)
        return found


def column(name: str) -> Callable[[Seen], ByEpoch]:
    """The last number of a column."""
    return lambda seen: {int(row["epoch"]): float(row[name].split()[-1]) for row in seen.epochs}


def median_of(what: str) -> Callable[[Seen], ByEpoch]:
    """The median of a kind of details."""
    return lambda seen: {
        epoch: statistics.median(float(r["value"]) for r in rows) for epoch, rows in seen.detail(what).items()
    }


def worst_class(seen: Seen) -> ByEpoch:
    """The training accuracy, in percent, of the class with the lowest."""
    found = {}
    for epoch, rows in seen.detail("confusion").items():
        right, all_of = dict.fromkeys(map(str, range(10)), 0.0), dict.fromkeys(map(str, range(10)), 0.0)
        for row in rows:
            all_of[row["i"]] += float(row["value"])
            right[row["i"]] += float(row["value"]) * (row["i"] == row["j"])
        found[epoch] = min(100 * right[label] / all_of[label] for label in all_of if all_of[label])
    return found


class Look(NamedTuple):
    """One quantity, of which the paper says that DPLoss makes it smaller or larger than cross-entropy does."""

    name: str
    source: str
    smaller: bool
    values: Callable[[Seen], ByEpoch]
    early: bool = False  # the paper shows the first epoch alone


LOOKS = (
    Look("norm of the last layer's weights", "Figures 1b, 5", True, column("weights")),
    Look("norm of the last pre-activation", "Figure 5", True, column("pre_activations")),
    Look("norm of the logits", "Figures 1a, 5", True, column("logits")),
    Look("median norm of gradients", "Figures 1c, 6", True, column("norm_median"), early=True),
    Look("90 % of gradients have a norm below", "Figures 1c, 6", True, column("norm_p90"), early=True),
    Look("median cosine of clipped and unclipped sums", "Figure 7", False, median_of("cosine"), early=True),
    Look("cosine at the epoch's last step", "Figure 7", False, column("cosine"), early=True),
    Look("largest singular value of the Hessian", "Figure 2, MNIST", True, median_of("singular value")),
    Look("training accuracy of the worst class, percent", "Figure 8", False, worst_class),
)


def seen_of(data: Path, task: str, case: str) -> Seen:
    """The run that was looked at."""
    epochs, details = (read(path, task=task, case=case, seed=0) for path in files(data / "papers_dp_loss.csv"))
    longest = max((int(row["epochs"]) for row in epochs), default=0)
    return Seen([row for row in epochs if int(row["epochs"]) == longest], details)


def looks(data: Path) -> list[list[str]]:
    """Lines of a table: quantity, what the paper says of it, and for each data set cross-entropy's and DPLoss's value
    in the first and last epoch that was looked at; bold where it is not as the paper says."""
    runs = {task: [seen_of(data, task, case) for case in CASES] for task in NAMES}
    lines = []
    for look in LOOKS:
        cells = []
        for pair in runs.values():
            entropy, ours = map(look.values, pair)
            epochs = sorted(set(entropy) & set(ours))
            shown = []
            for epoch in epochs[:1] if look.early else sorted({*epochs[:1], *epochs[-1:]}):
                text = f"{entropy[epoch]:.3g} / {ours[epoch]:.3g}"
                as_said = ours[epoch] != entropy[epoch] and (ours[epoch] < entropy[epoch]) == look.smaller
                shown.append(text if as_said else f"**{text}**")
            cells.append("; ".join(shown))
        lines.append([look.name, f"{'smaller' if look.smaller else 'larger'} ({look.source})", *cells])
    return lines


# ---------------------------------------------------------------------- five runs, and accuracy by epsilon


def five(data: Path) -> list[list[str]]:
    """Lines of a table: data, epoch, epsilon; minimum, median and maximum of the accuracy with each loss."""
    lines = []
    for task, name in NAMES.items():
        for epoch in (1, 5, 10):
            runs = [read(data / "dp_loss_epochs.csv", task=task, case=case, epoch=epoch) for case in CASES]
            by_seed = [{row["seed"]: 100 * float(row["accuracy"]) for row in rows}.values() for rows in runs]
            if all(len(values) == 5 for values in by_seed):
                epsilon = f"{float(runs[1][0]['epsilon_rdp']):.2f}"
                cells = [f"{min(v):.1f}, {statistics.median(v):.1f}, {max(v):.1f}" for v in by_seed]
                lines.append([name, str(epoch), epsilon, *cells])
    return lines


def blocks(data: Path) -> dict[str, str]:
    """The bodies of docs/papers.md's tables of these names."""
    return {"five runs": table(FIVE_HEAD, five(data)), "looks": table(HEAD, looks(data))}


def draw(options: Any) -> None:
    """Test accuracy by epsilon of each task that has rows, into --plots. Exits where there is nothing to draw."""
    rows = [row for row in read(files(options.out)[0]) if row["task"] in options.tasks and row["epsilon_rdp"]]
    if not rows:
        raise SystemExit(f"nothing to draw: there are no rows in {files(options.out)[0]}")
    for task in dict.fromkeys(row["task"] for row in rows):
        path = picture(options, f"dp_loss_{task}_accuracy")
        if path is not None:
            curves = accuracy([row for row in rows if row["task"] == task])
            panels(path, [Panel("", curves, "epsilon (RDP)", "test accuracy")])


def accuracy(rows: Sequence[Row]) -> dict[str, Any]:
    """Test accuracy by epsilon, of each case, of those runs that came so far."""
    curves = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        runs: dict[str, list[Row]] = {}
        for row in rows:
            if row["case"] == case:
                runs.setdefault(row["seed"], []).append(row)
        shortest = min(map(len, runs.values()))
        found = [[float(row["accuracy"]) for row in run[:shortest]] for run in runs.values()]
        first = next(iter(runs.values()))[:shortest]
        curves[f"{case} (n {len(runs)})"] = [float(row["epsilon_rdp"]) for row in first], found
    return curves
