"""Networks that tell images apart, trained by SGD with this clipping and that: what mnist_cnn.py, cifar10_cnn.py do.

Bu, Wang, Dai and Long 2023, "On the convergence and calibration of deep learning with differential privacy": the same
noise and the same epsilon, a small clipping norm R or a large one; local clipping min(1, R / n) or global 1[n <= R].
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fastdp
from examples.papers import common
from fastdp.calibration import Calibration, calibration, reliability_diagram

BINS = ("experiment", "case", "mode", "seed", "bin", "count", "confidence", "accuracy", "nll", "ece", "commit")


class Case(NamedTuple):
    """A way to clip, with its learning rate (of the mean of the clipped gradients); clipping "none": not private.

    epochs: of this case alone, in the place of the experiment's.
    """

    name: str
    clipping: str
    R: float | None
    lr: float
    style: str = "flat"
    epochs: float | None = None

    @property
    def private(self) -> bool:
        return self.clipping != "none"


class Setting(NamedTuple):
    """What all cases of an experiment share. epsilon: the paper's, by GDP; quick_epochs: what fits two minutes."""

    experiment: str
    network: Callable[[], nn.Module]
    images: Callable[[Path | None], common.Images]
    cases: tuple[Case, ...]
    batch: int
    epochs: float
    sigma: float
    delta: float
    epsilon: float
    quick_epochs: float


def options_of(description: str, stem: str, setting: Setting, arguments: Sequence[str] | None) -> Any:
    """Parse the command line of a script; exits with a message on cases that there are not."""
    made = common.parser(description, stem)
    made.add_argument("--cases", nargs="+", default=[case.name for case in setting.cases], metavar="CASE",
                      help=f"of: {'; '.join(case.name for case in setting.cases)}")  # fmt: skip
    made.add_argument("--epochs", type=float, help=f"default: {setting.epochs:g}, the paper's; with --quick "
                      f"{setting.quick_epochs:g}. The noise is the paper's: fewer cost less epsilon")  # fmt: skip
    made.add_argument("--same-epsilon", action="store_true", help="with fewer --epochs: as little noise as makes them "
                      f"cost the paper's epsilon, {setting.epsilon:g} by GDP")  # fmt: skip
    made.add_argument("--records", type=int, help="train on so many records only")
    made.add_argument("--test-records", type=int, help="test on so many only")
    made.add_argument("--every", type=int, default=0, metavar="N", help="write rows after each N epochs, too")
    made.add_argument("--draw", action="store_true", help="train nothing: draw the pictures of the rows in --out")
    options = made.parse_args(arguments)
    names = [case.name for case in setting.cases]
    if unknown := [name for name in options.cases if name not in names]:
        made.error(f"no case {', '.join(map(repr, unknown))}; there are: {'; '.join(names)}")
    for name in ("epochs", "records", "test_records"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            made.error(f"--{name.replace('_', '-')} must be positive")
    if options.every < 0:
        made.error("--every must be 0 (never) or more")
    if options.draw and options.plots is None:
        made.error("--draw needs --plots DIR, to draw into")
    return options


class Found(NamedTuple):
    """What a run came to: the setting's columns of its rows, metrics, calibration on the test set; done: it is over."""

    columns: dict[str, Any]
    metrics: dict[str, float]
    calibration: Calibration
    done: bool


def run(case: Case, setting: Setting, data: common.Images, seed: int, epochs: float, text: str,
        tell: Callable[[Found], object], same_epsilon: bool = False, every: int = 0) -> None:  # fmt: skip
    """Train once. tell: called with what was found at the end, and after each `every` passes (0: none).

    The number of steps is that of the paper's accounting: epochs * records / batch, rounded down. same_epsilon: the
    noise is that which costs the paper's epsilon in these steps, not the paper's.
    """
    torch.manual_seed(seed)
    model = setting.network().to(memory_format=torch.channels_last)  # on a CPU the MNIST CNN's step: 26 ms, not 43
    batch = min(setting.batch, len(data.x) // 2)
    batches = common.loader(data.x, data.y, batch, seed=None if case.private else seed)
    steps, sigma = max(1, int(epochs * len(data.x) / batch)), setting.sigma
    if same_epsilon:
        sigma = fastdp.noise_multiplier_for(target_epsilon=setting.epsilon, delta=setting.delta, steps=steps,
                                            sample_rate=batches.sample_rate, accountant="gdp")  # fmt: skip
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    if case.private:
        assert case.R is not None
        fastdp.privatize(optimizer, model, noise_multiplier=sigma, max_grad_norm=case.R,
                         clipping=case.clipping, style=case.style, accountant="gdp")  # fmt: skip

    def so_far(until: common.Run) -> None:
        if until.steps < steps and not (every and len(until.losses) % every == 0):
            return
        columns: dict[str, Any] = {
            "train_records": len(data.x), "epochs": round(until.steps * batch / len(data.x), 2), "steps": until.steps,
            "batch": batch, "lr": case.lr, "seconds": round(until.seconds, 1),
        }  # fmt: skip
        found = calibration(common.logits_of(model, data.x_test), data.y_test)
        metrics = {"accuracy": found.accuracy, "nll": found.nll, "ece": found.ece, "mce": found.mce,
                   "train_loss": until.losses[-1]}  # fmt: skip
        if isinstance(optimizer, fastdp.training.optim.PrivateOptimizer):
            metrics |= common.epsilons(sigma, batches.sample_rate, until.steps, setting.delta)
            spent = optimizer.epsilon(setting.delta)
            if abs(spent - metrics["epsilon_gdp"]) > 1e-9:
                raise AssertionError(f"the optimizer counts epsilon {spent}, not {metrics['epsilon_gdp']}")
            metrics["dropped" if case.clipping == "global" else "clipped"] = until.clipped or 0.0
            columns |= {"sigma": sigma, "epsilon": spent, "delta": setting.delta, "accountant": "gdp", "R": case.R,
                        "clipping": case.clipping, "style": case.style}  # fmt: skip
        tell(Found(columns, metrics, found, until.steps == steps))

    common.train(model, optimizer, batches, steps=steps, text=text, so_far=so_far)
    if isinstance(optimizer, fastdp.training.optim.PrivateOptimizer):
        optimizer.detach()


def main(setting: Setting, options: Any) -> list[common.Row]:
    """Run every case with every seed, write rows and pictures, print what was found; returns the rows."""
    bins = options.out.with_name(f"{options.out.stem}_bins.csv")
    if options.draw:
        draw(options, bins, setting)
        return []
    data = common.subset(setting.images(options.data), options.records, options.test_records)
    epochs = options.epochs or (setting.quick_epochs if options.quick else setting.epochs)
    full = epochs == setting.epochs and options.records is None and options.test_records is None
    print(f"{data.name}: {len(data.x):,} to train on, {len(data.x_test):,} to test; batch {setting.batch}, "
          f"{epochs:g} epochs", flush=True)  # fmt: skip
    all_rows: list[common.Row] = []
    for seed in common.seeds(options):
        for case in (case for case in setting.cases if case.name in options.cases):

            def tell(found: Found, case: Case = case, seed: int = seed) -> None:
                mode = "quick" if options.quick else "full" if full and found.done else "short"
                rows = common.rows(options, setting.experiment, case.name, mode, seed, found.metrics, **found.columns)
                common.write(options.out, rows)
                keep(bins, setting.experiment, case.name, mode, seed, found.calibration)
                all_rows.extend(rows)
                told = ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items())
                print(f"{case.name}, seed {seed}, {found.columns['epochs']:g} epochs: {told}; "
                      f"{found.columns['seconds']:.0f} s", flush=True)  # fmt: skip

            run(case, setting, data, seed, case.epochs or epochs, f"{case.name}, seed {seed}", tell,
                options.same_epsilon, options.every)  # fmt: skip
    draw(options, bins, setting, "quick" if options.quick else None)
    return all_rows


# ---------------------------------------------------------------------- reliability diagrams


def keep(path: Path, experiment: str, case: str, mode: str, seed: int, found: Calibration) -> None:
    """Add a run's bins of confidence to a CSV file, from which its picture can be drawn again."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(BINS)
        for number, count in enumerate(found.bin_count.tolist()):
            values = [found.bin_confidence[number], found.bin_accuracy[number], found.nll, found.ece]
            cells = [f"{float(value):.6g}" for value in values]
            writer.writerow([experiment, case, mode, seed, number, count, *cells, common.COMMIT])


def kept(path: Path, mode: str | None, cases: Sequence[str]) -> dict[str, Calibration]:
    """The calibration of the last run kept of each case, in the order of `cases`; mode None: the highest there is."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if mode is None:
        mode = max((row["mode"] for row in rows), key=common.MODES.index)
    found: dict[str, Calibration] = {}
    for case in cases:
        runs = [row for row in rows if row["case"] == case and row["mode"] == mode]
        if not runs:
            continue
        last = runs[max(k for k, row in enumerate(runs) if row["bin"] == "0") :]
        column = lambda name, of=last: torch.tensor([float(row[name]) for row in of], dtype=torch.float64)
        count, right = column("count"), column("accuracy")
        gaps = (right - column("confidence")).abs()[count > 0]
        found[case] = Calibration(
            float(last[0]["nll"]), float((right * count).sum() / count.sum()), float(last[0]["ece"]), float(gaps.max()),
            column("confidence"), right, count,
        )  # fmt: skip
    return found


def draw(options: Any, bins: Path, setting: Setting, mode: str | None = None) -> None:
    """The reliability diagrams of all cases side by side, into --plots."""
    path = common.picture(options, f"{options.out.stem}_reliability")
    if path is None:
        return
    if not bins.exists():
        raise SystemExit(f"nothing to draw: there is no {bins}; run without --draw first")
    found = kept(bins, mode, [case.name for case in setting.cases])
    reliability_diagram(found, path)
    print(f"wrote {path}")
