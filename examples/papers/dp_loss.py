"""The loss paper's experiments: cross-entropy against DPLoss at epsilon < 3, and each of its terms.

    python examples/papers/dp_loss.py --data DIR [--quick] [--tasks mnist fashion cifar10 ...] [--losses ...]
        [--seeds N] [--epochs N] [--checkpoints DIR] [--device cuda] [--full] [--looks] [--plots DIR]

After Shamsabadi and Papernot, Losing less: a loss for differentially private deep learning (2023): networks of Tables
1 to 4, settings of Tables 5 and 6, momentum 0.9, local clipping with R = 0.1. The paper does not state delta (here:
1e-5), how images are scaled (here: less their mean over their deviation, public constants), nor whether epochs are
counted from 0 or 1 (here: from 0). Each run writes its accuracy by epoch and epsilon; --looks writes the norms,
cosines, singular values and errors by class of the paper's other figures, too.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root

import fastdp
from benchmarks.timing import append
from examples.papers import common, dp_loss_report
from examples.papers import dp_loss_networks as networks
from examples.papers.training import Run, loader, logits_of, test_metrics, train
from fastdp.diagnostics import GradientDiagnostics, Report
from fastdp.losses import DPLoss

DELTA = 1e-5


class Setting(NamedTuple):
    """Of one data set: its network, batch, epochs, learning rate, noise multiplier; of DPLoss the threshold e_t, beta
    and the focal loss's gamma."""

    network: Callable[[], nn.Sequential]
    batch: int
    epochs: int
    lr: float
    sigma: float
    threshold: float
    beta: float
    focal: float
    R: float = 0.1
    momentum: float = 0.9


SETTINGS = {  # Tables 5 and 6
    "mnist": Setting(networks.end_to_end, 512, 40, 0.5, 1.23, 0.0, 1.0, 5.0),
    "fashion": Setting(networks.end_to_end, 2048, 40, 4.0, 2.15, 0.0, 1.0, 5.0),
    "cifar10": Setting(networks.end_to_end_cifar, 1024, 30, 1.0, 1.54, 7.0, 11.0, 5.0),
    "scatter-mnist": Setting(networks.on_features, 1024, 25, 1.0, 1.35, 2.0, 11.0, 10.0),
    "scatter-fashion": Setting(networks.on_features, 2048, 40, 4.0, 2.15, 2.0, 51.0, 2.0),
    "scatter-cifar10": Setting(networks.on_features_cifar, 8192, 60, 4.0, 5.67, 2.0, 1.0, 2.0),
}
LOSSES = ("cross-entropy", "dploss")
ABLATION = ("sse", "sse + cross-entropy", "sse + focal")
OTHERS = ("sae", *(f"huber {tenths / 10:g}" for tenths in range(1, 11)), "non-private")
CHANGES = ("threshold", "beta", "focal", "lr", "sigma", "momentum")  # of a Setting, by options
ORDINARY = (0.05, 256)  # learning rate and batch without privacy: ours, the paper states none
LOOKS = 1000  # images of the training set for norms of pre-activations and singular values


def experiment(task: str) -> str:
    """As rows and tables name it."""
    scatter, _, name = task.rpartition("-") if task.startswith("scatter-") else ("", "", task)
    return f"DPLoss, {dp_loss_report.NAMES[name]}" + (", ScatterNet" if scatter else "")


def loss_of(name: str, model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    """The loss of a case: DPLoss, without some of its terms, or with another error in the place of SSE."""
    if name in ("cross-entropy", "non-private"):
        return F.cross_entropy
    given: dict[str, Any] = {"threshold": setting.threshold, "beta": setting.beta, "focal": setting.focal}
    word, _, number = name.partition(" ")
    alone = {"threshold": math.inf, "beta": math.inf}
    changed: dict[str, Any] = {
        "dploss": {}, "sse": alone, "sse + cross-entropy": {"focal": 0.0, "beta": math.inf},
        "sse + focal": {"beta": math.inf}, "sae": {**alone, "error": "sae"},
    }.get(name) or ({**alone, "error": "huber", "huber_delta": float(number)} if word == "huber" else {})  # fmt: skip
    return DPLoss(model, **{**given, **changed})


EPOCHS = (
    "task", "case", "seed", "epoch", "epochs", "accuracy", "loss", "epsilon_rdp", "epsilon_prv", "cosine", "norm_p10",
    "norm_median", "norm_p90", "clipped", "weights", "pre_activations", "logits", "commit",
)  # fmt: skip
DETAILS = ("task", "case", "seed", "what", "epoch", "i", "j", "value", "commit")


# ---------------------------------------------------------------------- what the figures show of a model


def layer_norms(model: nn.Sequential, x: Tensor) -> dict[str, Any]:
    """The norm of each layer's weight; means over samples of the norms of each layer's pre-activation and of the
    logits."""
    found, seen = [], x
    with torch.no_grad():
        for layer in copy.deepcopy(model).eval():  # a copy has no hooks
            if isinstance(layer, nn.Tanh):
                found.append(float(seen.flatten(1).norm(dim=1).mean()))
            seen = layer(seen)
    weights = [float(p.detach().norm()) for name, p in model.named_parameters() if name.endswith("weight")]
    return {"weights": weights, "pre_activations": found, "logits": float(seen.norm(dim=1).mean())}


def sharpness(model: nn.Module, loss: Callable[[nn.Module], Any], x: Tensor, y: Tensor, rounds: int = 20) -> float:
    """The largest singular value of the Hessian of the mean loss on (x, y), by power iteration.

    loss: makes the loss of a model (a DPLoss holds on to the model it was made for).
    """
    plain = copy.deepcopy(model).eval()
    of, parameters = loss(plain), list(plain.parameters())
    gradients = torch.autograd.grad(of(plain(x), y), parameters, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator).to(p.device) for p in parameters]
    found = 0.0
    for _ in range(rounds):
        length = math.sqrt(sum(float(d.square().sum()) for d in direction))
        direction = [d / length for d in direction]
        product = torch.autograd.grad(gradients, parameters, grad_outputs=direction, retain_graph=True)
        direction = [p.detach() for p in product]
        found = math.sqrt(sum(float(d.square().sum()) for d in direction))
    return found


class Watch:
    """What the paper's figures show of a training, noted after each epoch; looks: the details of some epochs, too."""

    def __init__(self, name: str, setting: Setting, data: common.Images, model: Any, optimizer: Any, rate: float,
                 per_epoch: int, looks: bool) -> None:  # fmt: skip
        self.name, self.setting, self.data, self.model, self.optimizer = name, setting, data, model, optimizer
        self.rate, self.per_epoch, self.looks = rate, per_epoch, looks
        self.loss = loss_of(name, model, setting)
        self.more: dict[str, list[dict[str, Any]]] = {"epochs": [], "details": []}
        self.reports: list[Report] = []
        self.observer: GradientDiagnostics | None = None

    def before(self, done: int) -> None:
        """Of a step: the loss is told the epoch, counted from 0; the first epoch's steps are looked at each."""
        epoch, step = divmod(done, self.per_epoch)
        first = self.looks and epoch == 0
        if isinstance(self.loss, DPLoss):
            self.loss.epoch = float(epoch)
        if step and first and self.observer is not None:
            self.reports.append(self.observer.report())
        if step == 0 and self.name != "non-private":
            self.observer, self.reports = GradientDiagnostics(self.optimizer, every=1 if first else self.per_epoch), []

    def note(self, until: Run) -> None:
        """After an epoch."""
        epoch = until.steps // self.per_epoch
        accuracy = test_metrics(logits_of(self.model, self.data.x_test).cpu(), self.data.y_test.cpu())["accuracy"]
        row = {"epoch": epoch, "accuracy": accuracy, "loss": until.losses[-1],
               **layer_norms(self.model, self.data.x[:LOOKS])}  # fmt: skip
        if self.observer is not None:
            self.reports.append(report := self.observer.report())
            self.observer.remove()
            spent = common.epsilons(self.setting.sigma, self.rate, until.steps, DELTA)
            quantiles = torch.quantile(report.norms.double().cpu(), torch.tensor([0.1, 0.5, 0.9]).double()).tolist()
            row |= {"epsilon_rdp": spent["epsilon_rdp"], "epsilon_prv": spent["epsilon_prv"], "cosine": report.cosine,
                    "clipped": until.clipped, **dict(zip(("norm_p10", "norm_median", "norm_p90"), quantiles,
                                                         strict=True))}  # fmt: skip
        self.more["epochs"].append(row)
        if self.looks:
            self._look(epoch)

    def _look(self, epoch: int) -> None:
        """Cosines of the first epoch's steps; errors by class and the singular value of some epochs."""

        def detail(what: str, values: Sequence[tuple[Any, Any, Any]]) -> None:
            self.more["details"] += [{"what": what, "epoch": epoch, "i": i, "j": j, "value": v} for i, j, v in values]

        def made(model: nn.Module) -> Any:
            loss = loss_of(self.name, model, self.setting)
            if isinstance(loss, DPLoss):
                loss.epoch = float(epoch - 1)
            return loss

        if epoch == 1 and self.reports:
            detail("cosine", [(step, "", report.cosine) for step, report in enumerate(self.reports, start=1)])
        if epoch not in (1, 2, 5, self.setting.epochs) and epoch % 10:
            return
        labels = self.data.y * 10 + logits_of(self.model, self.data.x).argmax(1)
        counts = torch.bincount(labels, minlength=100).tolist()
        detail("confusion", [(place // 10, place % 10, count) for place, count in enumerate(counts)])
        x, y = self.data.x[:LOOKS], self.data.y[:LOOKS]
        detail("singular value", [("", "", sharpness(self.model, made, x, y))])


# ---------------------------------------------------------------------- runs


def changes(options: Any) -> dict[str, float]:
    """What the command line puts in the place of a setting's values."""
    return {name: getattr(options, name) for name in CHANGES if getattr(options, name) is not None}


def run(name: str, seed: int, data: common.Images, setting: Setting, options: Any, kept: common.Checkpoint
        ) -> tuple[dict[str, float], dict[str, Any], Watch]:  # fmt: skip
    """One training, an epoch a pass: its metrics, the setting's columns, and what was seen of it."""
    torch.manual_seed(seed)
    private = name != "non-private"
    data = common.Images(*(t.to(options.device) for t in data[:4]), data.name)
    model = setting.network().to(options.device, memory_format=torch.channels_last)  # faster
    lr, batch = (setting.lr, setting.batch) if private else (ORDINARY[0], min(ORDINARY[1], len(data.x)))
    batches = loader(data.x, data.y, batch, None if private else 1000 * kept.state.get("steps", 0) + seed,
                     max_physical_batch_size=256)  # fmt: skip
    optimizer: Any = fastdp.DPSGD(model, lr=lr, momentum=setting.momentum, max_grad_norm=setting.R,
                                  noise_multiplier=setting.sigma) if private else torch.optim.SGD(
        model.parameters(), lr=lr, momentum=setting.momentum)  # fmt: skip
    per_epoch = batches.steps_per_epoch
    watch = Watch(name, setting, data, model, optimizer, batches.sample_rate, per_epoch, options.looks)
    done = train(model, optimizer, batches, watch.loss, steps=setting.epochs * per_epoch, kept=kept, note=watch.note,
                 more=watch.more, before=watch.before, text=f"{name}, seed {seed}")  # fmt: skip
    found = test_metrics(logits_of(model, data.x_test).cpu(), data.y_test.cpu())
    found["accuracy_best"] = max(row["accuracy"] for row in watch.more["epochs"])
    columns: dict[str, Any] = {"train_records": len(data.x), "epochs": setting.epochs, "steps": done.steps, "lr": lr,
                               "batch": setting.batch if private else ORDINARY[1],
                               "seconds": round(done.seconds)}  # fmt: skip
    if private:
        spent = common.epsilons(setting.sigma, batches.sample_rate, done.steps, DELTA)
        found |= {**spent, "clipped": done.clipped or 0.0}
        columns |= {"sigma": setting.sigma, "epsilon": spent["epsilon_prv"], "delta": DELTA, "accountant": "prv",
                    "R": setting.R, "clipping": "local", "style": "flat"}  # fmt: skip
        for below in (1.5, 2.0):
            reached = [row["accuracy"] for row in watch.more["epochs"] if row["epsilon_rdp"] < below]
            found |= {f"accuracy_epsilon_below_{below:g}": max(reached)} if reached else {}
        optimizer.detach()
    if isinstance(watch.loss, DPLoss):
        watch.loss.remove()
    return found, columns, watch


def every(options: Any, task: str, data: common.Images, setting: Setting, mode: str) -> list[common.Row]:
    """Each loss and seed of a task; rows are written as soon as a run is done."""
    changed = "".join(f", {key} {value:g}" for key, value in changes(options).items())
    paths = dp_loss_report.files(options.out)

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return " ".join(f"{each:.5g}" for each in value)
        return f"{value:.6g}" if isinstance(value, float) else value

    def one(name: str, seed: int, kept: common.Checkpoint, tell: common.Tell) -> None:
        found, columns, watch = run(name, seed, data, setting, options, kept)
        tell(mode, found, columns, case=name + changed)
        about = {"task": task, "case": name + changed, "seed": seed, "epochs": setting.epochs, "commit": common.COMMIT}
        for path, names, rows in zip(paths, (EPOCHS, DETAILS), watch.more.values(), strict=True):
            made = [{**dict.fromkeys(names, ""), **about, **{k: plain(v) for k, v in row.items()}} for row in rows]
            if made:
                append(path, made, names)

    mark = {**setting._asdict(), "network": setting.network.__name__, "records": len(data.x), "looks": options.looks}
    return common.drive(options, experiment(task), {name: {**mark, "loss": name} for name in options.losses}, one)


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Train, write the rows and return them."""
    made = common.parser(
        __doc__, "dp_loss", "every loss of the paper, with 5 seeds unless --seeds says more", draw=True
    )
    made.add_argument("--tasks", nargs="+", choices=list(SETTINGS), default=["mnist", "fashion", "cifar10"])
    made.add_argument("--losses", nargs="+", choices=[*LOSSES, *ABLATION, *OTHERS], default=list(LOSSES))
    made.add_argument("--ablation", action="store_true", help="also SSE alone, with cross-entropy, with focal loss")
    made.add_argument("--epochs", type=int, help="fewer than the setting's; nothing else changes")
    made.add_argument("--records", type=int, help="train on so many images only")
    made.add_argument("--looks", action="store_true", help="also cosines, norms, errors by class, singular values")
    made.add_argument("--cache", type=Path, help="keep ScatterNet features in this folder")
    for name in CHANGES:
        made.add_argument(f"--{name}", type=float, help="in the place of the setting's")
    options = made.parse_args(arguments)
    if options.draw:
        dp_loss_report.draw(options)
        return []
    options.losses = [*options.losses, *(ABLATION if options.ablation or options.full else ())]
    if options.full:
        options.losses, options.seeds = [*options.losses, *OTHERS], max(options.seeds, 5)
    options.losses = list(dict.fromkeys(options.losses))
    if options.quick:
        options.tasks = [t for t in options.tasks if t in ("mnist", "fashion")] or options.tasks
    written: list[common.Row] = []
    readers = {"mnist": common.mnist, "fashion": common.fashion_mnist, "cifar10": common.cifar10}
    for task in options.tasks:
        full, records, test = SETTINGS[task], options.records, None
        setting = full
        if options.quick:
            records, test = records or 8000, 2000
            setting = full._replace(batch=512, epochs=6)
        setting = setting._replace(**changes(options), **({"epochs": options.epochs} if options.epochs else {}))
        fewer = records or (setting.epochs, setting.lr, setting.sigma) != (full.epochs, full.lr, full.sigma)
        mode = "quick" if options.quick else "short" if fewer else "full"
        data = common.subset(readers[task.rpartition("-")[2]](options.data), records, test)
        if task.startswith("scatter-"):
            data = networks.scattered(data, options.cache)
        written += every(options, task, data, setting, mode)
    return written


if __name__ == "__main__":
    main()
