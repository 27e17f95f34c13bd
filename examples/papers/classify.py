"""Networks that tell images apart, trained by SGD with this clipping and that: what mnist_cnn.py, cifar10_cnn.py do.

Bu, Wang, Dai and Long, "On the convergence and calibration of deep learning with differential privacy": the same
noise and the same epsilon, a small clipping norm R or a large one; local clipping min(1, R / n) or global 1[n <= R].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastdp
from examples.papers import common, confidence
from examples.papers.training import Run, loader, logits_of, test_metrics, train
from fastdp.audit.membership import membership_inference


class Case(NamedTuple):
    """A way to clip, with its learning rate (of the mean of the clipped gradients); clipping "none": not private.

    style "by tensor": every tensor is clipped by itself, to R, and biases to R_bias if it is given.
    epochs, sigma: of this case alone, in the place of the experiment's. scale: of the images. more: only of --full, or
    where it is named.
    """

    name: str
    clipping: str
    R: float | None
    lr: float
    style: str = "flat"
    epochs: float | None = None
    R_bias: float | None = None
    sigma: float | None = None
    momentum: float = 0.0
    scale: float = 1.0
    more: bool = False

    @property
    def private(self) -> bool:
        return self.clipping != "none"


class Setting(NamedTuple):
    """What all cases of an experiment share. quick_epochs: what fits two minutes; seeds:
    of --full; membership: attack the trained network."""

    experiment: str
    network: Callable[[], nn.Module]
    images: Callable[[Path | None], common.Images]
    cases: tuple[Case, ...]
    batch: int
    epochs: float
    sigma: float
    delta: float
    quick_epochs: float
    seeds: int = 1
    membership: bool = False


def options_of(description: str, stem: str, setting: Setting, arguments: Sequence[str] | None) -> Any:
    """Parse the command line of a script; exits with a message on cases that there are not."""
    full = f"all cases, with {setting.seeds} seed(s) each unless --seeds says more"
    made = common.parser(description, stem, full, draw=True)
    made.add_argument("--cases", nargs="+", metavar="CASE",
                      help=f"of: {'; '.join(case.name for case in setting.cases)}. Default: those of the paper's main "
                      f"figures; with --full all")  # fmt: skip
    made.add_argument("--epochs", type=float, help=f"default: {setting.epochs:g}, which cost its epsilon; with --quick "
                      f"{setting.quick_epochs:g}. The noise is the paper's: fewer cost less epsilon")  # fmt: skip
    made.add_argument("--records", type=int, help="train on so many records only")
    made.add_argument("--test-records", type=int, help="test on so many only")
    options = made.parse_args(arguments)
    names = [case.name for case in setting.cases]
    if unknown := [name for name in options.cases or () if name not in names]:
        made.error(f"no case {', '.join(map(repr, unknown))}; there are: {'; '.join(names)}")
    options.cases = options.cases or [case.name for case in setting.cases if options.full or not case.more]
    options.seeds = max(options.seeds, setting.seeds) if options.full else options.seeds
    return options


def style_of(case: Case, model: nn.Module) -> Any:
    """The style as fastdp takes it. By tensor, R is each tensor's own, and the noise is that of the sensitivity of all
    of them together: the root of the sum of the squares."""
    if case.style != "by tensor":
        return case.style
    return [{"params": [name], "name": name, "max_grad_norm": case.R if p.dim() > 1 else case.R_bias or case.R}
            for name, p in model.named_parameters()]  # fmt: skip


class Plan(NamedTuple):
    """What a case comes to on this data: its steps are those of the paper's accounting, epochs * records / batch,
    rounded down."""

    case: Case
    batch: int
    steps: int
    sigma: float

    @staticmethod
    def of(case: Case, setting: Setting, records: int, epochs: float) -> Plan:
        batch = min(setting.batch, records // 2)
        steps = max(1, int((case.epochs or epochs) * records / batch))
        return Plan(case, batch, steps, setting.sigma if case.sigma is None else case.sigma)


def attack(model: nn.Module, x: Tensor, y: Tensor, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """AUC of the paper's attacker, who sees logits and labels of members and of others, over all classes and by
    class; and of one who sees the loss, too."""
    members = logits_of(model, x).cpu(), y
    found = membership_inference(*members, logits, labels, bootstrap=1)
    seeing = membership_inference(*members, logits, labels, bootstrap=1, with_loss=True)
    by_class = {f"membership_auc, class {label}": auc.value for label, auc in found.by_class.items()}
    return {"membership_auc": found.overall.value, "membership_auc, with the loss": seeing.overall.value} | by_class


def measured(plan: Plan, setting: Setting, optimizer: Any, until: Run, rate: float
             ) -> tuple[dict[str, float], dict[str, Any]]:  # fmt: skip
    """Metrics of the training until now, and the setting's columns of its rows."""
    case = plan.case
    columns: dict[str, Any] = {"epochs": round(until.epochs, 2), "steps": until.steps, "batch": plan.batch,
                               "lr": case.lr, "seconds": round(until.seconds, 1)}  # fmt: skip
    metrics = {"train_loss": until.losses[-1]}
    if case.private:
        metrics |= common.epsilons(plan.sigma, rate, until.steps, setting.delta)
        metrics["dropped" if case.clipping == "global" else "clipped"] = until.clipped or 0.0
        both = f"{case.R:g}, biases {case.R_bias:g}" if case.R_bias else case.R
        columns |= {"sigma": plan.sigma, "epsilon": optimizer.epsilon(setting.delta), "delta": setting.delta,
                    "accountant": "gdp", "R": both, "clipping": case.clipping, "style": case.style}  # fmt: skip
    return metrics, columns


def main(setting: Setting, description: str, stem: str, arguments: Sequence[str] | None) -> list[common.Row]:
    """Run every case with every seed, write rows and pictures, print what was found; returns the rows."""
    options = options_of(description, stem, setting, arguments)
    cases = {case.name: case for case in setting.cases if case.name in options.cases}
    shown = [name for name, case in cases.items() if not case.more] or options.cases  # dozens would not fit a picture
    drawn = {name: name for name in shown}
    if options.draw:
        confidence.draw(options, drawn, options.out.stem)
        return []
    data = common.subset(setting.images(options.data), options.records, options.test_records)
    epochs = options.epochs or (setting.quick_epochs if options.quick else setting.epochs)
    full = epochs == setting.epochs and options.records is None and options.test_records is None
    print(f"{data.name}: {len(data.x):,} to train on, {len(data.x_test):,} to test; batch {setting.batch}, "
          f"{epochs:g} epochs", flush=True)  # fmt: skip
    plans = {name: Plan.of(case, setting, len(data.x), epochs) for name, case in cases.items()}

    def run(name: str, seed: int, kept: common.Checkpoint, tell: common.Tell) -> None:
        torch.manual_seed(seed)
        plan, case = plans[name], cases[name]
        x, y, x_test = (t.to(options.device) for t in data[:3])
        x, x_test = x * case.scale, x_test * case.scale
        # channels last: on a CPU the MNIST CNN's step takes 26 ms, not 43
        model = setting.network().to(options.device, memory_format=torch.channels_last)
        begun = kept.state.get("steps", 0)
        batches = loader(x, y, plan.batch, None if case.private else 1000 * begun + seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.momentum)
        if case.private:
            fastdp.privatize(optimizer, model, noise_multiplier=plan.sigma, max_grad_norm=case.R or 0.0,
                             clipping=case.clipping, style=style_of(case, model), accountant="gdp")  # fmt: skip

        done = train(model, optimizer, batches, steps=plan.steps, text=f"{name}, seed {seed}", kept=kept)
        logits = logits_of(model, x_test).cpu()
        metrics, columns = measured(plan, setting, optimizer, done, batches.sample_rate)
        metrics = test_metrics(logits, data.y_test) | metrics
        if setting.membership:
            metrics |= attack(model, x, data.y, logits, data.y_test)
        mode = "quick" if options.quick else "full" if full else "short"
        tell(mode, metrics, columns | {"train_records": len(x)}, logits, data.y_test)
        if isinstance(optimizer, fastdp.PrivateOptimizer):
            optimizer.detach()

    marks = {name: {**plan.case._asdict(), **plan._asdict(), "case": name, "records": len(data.x),
                    "tested": len(data.x_test)} for name, plan in plans.items()}  # fmt: skip
    rows = common.drive(options, setting.experiment, marks, run)
    if options.plots is not None:
        confidence.draw(options, drawn, options.out.stem)
    return rows
