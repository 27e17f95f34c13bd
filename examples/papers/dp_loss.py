"""The loss paper's experiments: cross-entropy against DPLoss at epsilon < 3, and each of its terms.

    python examples/papers/dp_loss.py --data DIR [--quick] [--tasks mnist fashion cifar10 ...] [--losses ...]
        [--seeds N] [--epochs N] [--checkpoints DIR] [--device cuda] [--minutes M] [--full] [--looks] [--plots DIR]

After Shamsabadi and Papernot, Losing less: a loss for differentially private deep learning (2023): networks of Tables
1 to 4, settings of Tables 5 and 6, momentum 0.9, local clipping with R = 0.1. The paper does not state delta (here:
1e-5), how images are scaled (here: less their mean over their deviation, public constants), nor whether epochs are
counted from 0 or 1 (here: from 0). Each run writes its accuracy by epoch and epsilon; --looks writes the norms,
cosines, singular values and errors by class of the paper's other figures, too.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root

import fastdp
from examples.papers import common, dp_loss_plots, resume
from examples.papers import dp_loss_networks as networks
from examples.papers import dp_loss_watch as watch
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
NAMES = {"mnist": "MNIST", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
LOSSES = ("cross-entropy", "dploss")
ABLATION = ("sse", "sse + cross-entropy", "sse + focal")
OTHERS = ("sae", *(f"huber {tenths / 10:g}" for tenths in range(1, 11)), "non-private")
CHANGES = ("threshold", "beta", "focal", "lr", "sigma", "momentum")  # of a Setting, by options
ORDINARY = (0.05, 256)  # learning rate and batch without privacy: ours, the paper states none
LOOKS = 1000  # images of the training set for norms of pre-activations and singular values


def experiment(task: str) -> str:
    """As rows and tables name it."""
    scatter, _, name = task.rpartition("-") if task.startswith("scatter-") else ("", "", task)
    return f"DPLoss, {NAMES[name]}" + (", ScatterNet" if scatter else "")


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


class Training:
    """One run, an epoch at a time; what it has seen so far is `state()`, and `load(state)` goes on from there."""

    def __init__(self, task: str, name: str, data: common.Images, setting: Setting, seed: int, device: str = "cpu"
                 ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.task, self.name, self.setting, self.seed = task, name, setting, seed
        self.data = data = common.Images(*(t.to(device) for t in data[:4]), data.name)
        self.private = name != "non-private"
        self.model = setting.network().to(device, memory_format=torch.channels_last)  # faster
        self.loss = loss_of(name, self.model, setting)
        lr, batch = (setting.lr, setting.batch) if self.private else (ORDINARY[0], min(ORDINARY[1], len(data.x)))
        self.batches = common.loader(data.x, data.y, batch, None if self.private else seed, max_physical_batch_size=256)
        self.optimizer: torch.optim.Optimizer
        if self.private:
            self.optimizer = fastdp.DPSGD(self.model, lr=lr, momentum=setting.momentum, max_grad_norm=setting.R,
                                          noise_multiplier=setting.sigma)  # fmt: skip
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=setting.momentum)
        self.epoch, self.seconds = 0, 0.0
        self.epochs: list[dict[str, Any]] = []
        self.details: list[dict[str, Any]] = []

    def run_epoch(self, looks: bool) -> None:
        """Train one epoch, and note what the figures show of it. looks: the details, too."""
        first, begun = looks and self.epoch == 0, time.perf_counter()
        steps, reports = self.batches.steps_per_epoch, []
        observer = GradientDiagnostics(self.optimizer, every=1 if first else steps) if self.private else None

        def before(done: int) -> None:
            if isinstance(self.loss, DPLoss):
                self.loss.epoch = float(self.epoch)
            if first and observer is not None and done:
                reports.append(observer.report())

        def loss(logits: Tensor, labels: Tensor) -> Tensor:  # hides `epoch`, which common.train would set
            return self.loss(logits, labels)

        text = f"{self.task}, {self.name}, seed {self.seed}, epoch {self.epoch + 1}"
        done = common.train(self.model, self.optimizer, self.batches, loss, steps=steps, before=before, text=text,
                            lines=False)  # fmt: skip
        if observer is not None:
            reports.append(observer.report())
            observer.remove()
        self.epoch += 1
        self.seconds += time.perf_counter() - begun
        self._note(done, reports[-1] if reports else None)
        if looks:
            self._look(reports)

    def _note(self, done: common.Run, report: Report | None) -> None:
        self.model.eval()
        accuracy = self.test_metrics()["accuracy"]
        row: dict[str, Any] = {"epoch": self.epoch, "accuracy": accuracy, "loss": done.losses[-1],
                               "weights": watch.weight_norms(self.model)}  # fmt: skip
        *row["pre_activations"], row["logits"] = watch.pre_activation_norms(self.model, self.data.x[:LOOKS])
        if report is not None:
            steps = self.epoch * self.batches.steps_per_epoch
            spent = common.epsilons(self.setting.sigma, self.batches.sample_rate, steps, DELTA)
            row |= {"epsilon_rdp": spent["epsilon_rdp"], "epsilon_prv": spent["epsilon_prv"], "cosine": report.cosine,
                    "clipped": done.clipped}  # fmt: skip
            quantiles = torch.quantile(report.norms.double().cpu(), torch.tensor([0.1, 0.5, 0.9]).double()).tolist()
            row |= dict(zip(("norm_p10", "norm_median", "norm_p90"), quantiles, strict=True))
        self.epochs.append(row)
        self.model.train()

    def test_metrics(self) -> dict[str, float]:
        """See `common.test_metrics`."""
        return common.test_metrics(common.logits_of(self.model, self.data.x_test).cpu(), self.data.y_test.cpu())

    def _look(self, reports: list[Report]) -> None:
        """Cosines of the first epoch's steps; norms, errors by class and the singular value of some epochs."""
        if self.epoch == 1 and reports:
            self._detail("cosine", [(step, "", report.cosine) for step, report in enumerate(reports, start=1)])
        if self.epoch not in kept(self.setting.epochs):
            return
        if reports:
            seen = reports[-1].histogram(40)
            edges = [round(e, 5) for e in seen.edges.tolist()]
            self._detail("norms", list(zip(edges[:-1], edges[1:], seen.counts.tolist(), strict=True)))
        counts = watch.confusion(common.logits_of(self.model, self.data.x), self.data.y)
        self._detail("confusion", [(i, j, int(counts[i, j])) for i in range(10) for j in range(10)])

        def made(model: nn.Module) -> Any:
            loss = loss_of(self.name, model, self.setting)
            if isinstance(loss, DPLoss):
                loss.epoch = float(self.epoch - 1)
            return loss

        self._detail("singular value", [("", "", watch.sharpness(self.model, made, self.data.x[:LOOKS],
                                                                 self.data.y[:LOOKS]))])  # fmt: skip

    def _detail(self, what: str, values: list[tuple[Any, Any, Any]]) -> None:
        self.details += [{"what": what, "epoch": self.epoch, "i": i, "j": j, "value": v} for i, j, v in values]

    def state(self) -> dict[str, Any]:
        """All that goes on from here; the keys of noise and sampling are not in it, and are drawn anew."""
        names = ("epoch", "seconds", "epochs", "details")
        kept = {name: getattr(self, name) for name in names}
        models = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**models, "setting": self._mark(), **kept}

    def _mark(self) -> list[Any]:
        """Of all that a run must not change on its way; it may be longer or shorter than was meant."""
        return [value for name, value in zip(Setting._fields, self.setting, strict=True)
                if name not in ("network", "epochs")] + [len(self.data.x)]  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Raises ValueError if it is of another setting."""
        if state["setting"] != self._mark():
            raise ValueError(f"the checkpoint is of another setting ({state['setting']}): name another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("epoch", "seconds", "epochs", "details"):
            setattr(self, name, state[name])

    def close(self) -> None:
        """Take hooks off the model."""
        if isinstance(self.loss, DPLoss):
            self.loss.remove()
        if self.private:
            self.optimizer.detach()  # type: ignore[attr-defined]


def kept(epochs: int) -> list[int]:
    """The epochs that --looks looks at: 1, 2, 5, every tenth, and the last."""
    return [e for e in range(1, epochs + 1) if e in (1, 2, 5, epochs) or e % 10 == 0]


def run(options: Any, task: str, name: str, data: common.Images, setting: Setting, seed: int) -> Training:
    """Train to the end, or on from a checkpoint of --checkpoints, which is kept after every epoch."""
    made = Training(task, name, data, setting, seed, options.device)
    path = None
    if options.checkpoints is not None:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        path = options.checkpoints / f"{task}_{case_of(options, name)}_{seed}.pt".replace(" ", "_")
        if path.exists():
            made.load(torch.load(path, map_location=options.device, weights_only=False))
    while made.epoch < setting.epochs:
        made.run_epoch(options.looks)
        if path is not None:
            torch.save(made.state(), path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        now = made.epochs[-1]
        spent = f", epsilon {now['epsilon_rdp']:.2f}" if made.private else ""
        print(f"  {task}, {case_of(options, name)}, seed {seed}: epoch {made.epoch} of {setting.epochs}, accuracy "
              f"{100 * now['accuracy']:.2f} %{spent}, {made.seconds:.0f} s", flush=True)  # fmt: skip
        if options.minutes is not None and time.monotonic() > resume.BEGUN + 60 * options.minutes:
            raise resume.Stopped
    made.close()
    return made


def case_of(options: Any, name: str) -> str:
    """A loss and what the command line changed of the setting."""
    return name + "".join(f", {key} {value:g}" for key, value in changes(options).items())


def changes(options: Any) -> dict[str, float]:
    """What the command line puts in the place of a setting's values."""
    return {name: getattr(options, name) for name in CHANGES if getattr(options, name) is not None}


def write(options: Any, task: str, data: common.Images, setting: Setting, mode: str) -> list[common.Row]:
    """Runs each loss and seed that the files do not hold yet, and writes its rows as soon as it is done."""
    written: list[common.Row] = []
    epochs, details = dp_loss_plots.files(options.out)
    for seed in common.seeds(options):
        for name in dict.fromkeys(options.losses):
            case = case_of(options, name)
            before = watch.read(epochs, task=task, case=case)
            done = {row["seed"] for row in before if int(row["epochs"]) >= setting.epochs}
            if options.checkpoints is not None and str(seed) in done:
                print(f"{task}, {case}, seed {seed}: done before", flush=True)
                continue
            made = run(options, task, name, data, setting, seed)
            found = made.test_metrics()
            found["accuracy_best"] = max(row["accuracy"] for row in made.epochs)
            columns: dict[str, Any] = {"train_records": len(data.x), "epochs": made.epoch,
                                       "steps": made.epoch * made.batches.steps_per_epoch,
                                       "seconds": round(made.seconds)}  # fmt: skip
            if made.private:
                spent = common.epsilons(setting.sigma, made.batches.sample_rate, columns["steps"], DELTA)
                found |= {**spent, "clipped": made.epochs[-1]["clipped"]}
                columns |= {"batch": setting.batch, "sigma": setting.sigma, "epsilon": spent["epsilon_prv"],
                            "delta": DELTA, "accountant": "prv", "lr": setting.lr, "R": setting.R, "clipping": "local",
                            "style": "flat"}  # fmt: skip
                for below in (1.5, 2.0):
                    reached = [row["accuracy"] for row in made.epochs if row["epsilon_rdp"] < below]
                    found |= {f"accuracy_epsilon_below_{below:g}": max(reached)} if reached else {}
            else:
                columns |= {"lr": ORDINARY[0], "batch": ORDINARY[1]}
            rows = common.rows(options, experiment(task), case, mode, seed, found, **columns)
            common.write(options.out, rows)
            head = {"task": task, "case": case, "seed": seed}
            watch.append(epochs, watch.EPOCHS, [{**head, "epochs": made.epoch, **row} for row in made.epochs])
            if made.details:
                watch.append(details, watch.DETAILS, [{**head, **row} for row in made.details])
            written += rows
            print(f"{data.name}, {case}, seed {seed}: accuracy {100 * found['accuracy']:.2f} %", flush=True)
    return written


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Train, write the rows and return them."""
    made = common.parser(__doc__)
    made.add_argument("--tasks", nargs="+", choices=list(SETTINGS), default=["mnist", "fashion", "cifar10"])
    made.add_argument("--losses", nargs="+", choices=[*LOSSES, *ABLATION, *OTHERS], default=list(LOSSES))
    made.add_argument("--ablation", action="store_true", help="also SSE alone, with cross-entropy, with focal loss")
    made.add_argument("--epochs", type=int, help="fewer than the setting's; nothing else changes")
    made.add_argument("--records", type=int, help="train on so many images only")
    made.add_argument("--looks", action="store_true", help="also cosines, norms, errors by class, singular values")
    made.add_argument("--cache", type=Path, help="keep ScatterNet features in this folder")
    resume.add(made, "every loss of the paper, with 5 seeds unless --seeds says more")
    for name in CHANGES:
        made.add_argument(f"--{name}", type=float, help="in the place of the setting's")
    made.add_argument("--draw", action="store_true", help="train nothing: draw the rows beside --out into --plots")
    options = made.parse_args(arguments)
    for name in ("epochs", "records"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            made.error(f"--{name} must be 1 or more")
    resume.check(made, options)
    if options.draw:
        dp_loss_plots.draw(options)
        return []
    options.losses = [*options.losses, *(ABLATION if options.ablation or options.full else ())]
    if options.full:
        options.losses, options.seeds = [*options.losses, *OTHERS], max(options.seeds, 5)
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
        if options.epochs is not None:
            setting = setting._replace(epochs=options.epochs)
        setting = setting._replace(**changes(options))
        fewer = records or (setting.epochs, setting.lr, setting.sigma) != (full.epochs, full.lr, full.sigma)
        mode = "quick" if options.quick else "short" if fewer else "full"
        data = common.subset(readers[task.rpartition("-")[2]](options.data), records, test)
        if task.startswith("scatter-"):
            data = networks.scattered(data, options.cache)
        try:
            written += write(options, task, data, setting, mode)
        except resume.Stopped:
            print(f"stopped after {options.minutes:g} minutes: run the same command again to go on")
            break
    return written


if __name__ == "__main__":
    main()
