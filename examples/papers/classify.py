"""Networks that tell images apart, trained by SGD with this clipping and that: what mnist_cnn.py, cifar10_cnn.py do.

Bu, Wang, Dai and Long, "On the convergence and calibration of deep learning with differential privacy": the same
noise and the same epsilon, a small clipping norm R or a large one; local clipping min(1, R / n) or global 1[n <= R].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fastdp
from examples.papers import common, confidence, resume
from fastdp.audit.membership import membership_inference
from fastdp.calibration import Calibration, calibration


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
    """What all cases of an experiment share. epsilon: the paper's, by GDP; quick_epochs: what fits two minutes; seeds:
    of --full; membership: attack the trained network."""

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
    seeds: int = 1
    membership: bool = False


def options_of(description: str, stem: str, setting: Setting, arguments: Sequence[str] | None) -> Any:
    """Parse the command line of a script; exits with a message on cases that there are not."""
    made = common.parser(description, stem)
    resume.add(made, f"all cases, with {setting.seeds} seed(s) each unless --seeds says more")
    made.add_argument("--cases", nargs="+", metavar="CASE",
                      help=f"of: {'; '.join(case.name for case in setting.cases)}. Default: those of the paper's main "
                      f"figures; with --full all")  # fmt: skip
    made.add_argument("--epochs", type=float, help=f"default: {setting.epochs:g}, which cost its epsilon; with --quick "
                      f"{setting.quick_epochs:g}. The noise is the paper's: fewer cost less epsilon")  # fmt: skip
    made.add_argument("--same-epsilon", action="store_true", help="with fewer --epochs: as little noise as makes them "
                      f"cost the paper's epsilon, {setting.epsilon:g} by GDP")  # fmt: skip
    made.add_argument("--records", type=int, help="train on so many records only")
    made.add_argument("--test-records", type=int, help="test on so many only")
    made.add_argument("--every", type=int, default=0, metavar="N", help="write rows after each N epochs, too")
    made.add_argument("--draw", action="store_true", help="train nothing: draw the pictures of the rows in --out")
    options = made.parse_args(arguments)
    names = [case.name for case in setting.cases]
    if unknown := [name for name in options.cases or () if name not in names]:
        made.error(f"no case {', '.join(map(repr, unknown))}; there are: {'; '.join(names)}")
    for name in ("epochs", "records", "test_records"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            made.error(f"--{name.replace('_', '-')} must be positive")
    if options.every < 0:
        made.error("--every must be 0 (never) or more")
    if options.draw and options.plots is None:
        made.error("--draw needs --plots DIR, to draw into")
    resume.check(made, options)
    options.cases = options.cases or [case.name for case in setting.cases if options.full or not case.more]
    options.seeds = max(options.seeds, setting.seeds) if options.full else options.seeds
    return options


class Found(NamedTuple):
    """What a run came to: the setting's columns of its rows, metrics, calibration on the test set and the logits that
    it is of; done: it is over."""

    columns: dict[str, Any]
    metrics: dict[str, float]
    calibration: Calibration
    logits: torch.Tensor
    done: bool


def style_of(case: Case, model: nn.Module) -> Any:
    """The style as fastdp takes it. By tensor, R is each tensor's own, and the noise is that of the sensitivity of all
    of them together: the root of the sum of the squares."""
    if case.style != "by tensor":
        return case.style
    return [{"params": [name], "name": name, "max_grad_norm": case.R if p.dim() > 1 else case.R_bias or case.R}
            for name, p in model.named_parameters()]  # fmt: skip


class Training:
    """One run, on from a checkpoint of it if there is one.

    The number of steps is that of the paper's accounting: epochs * records / batch, rounded down. With --same-epsilon
    the noise is that which costs the paper's epsilon in these steps, not the paper's.
    """

    def __init__(self, case: Case, setting: Setting, data: common.Images, seed: int, epochs: float, options: Any
                 ) -> None:  # fmt: skip
        self.case, self.setting, self.seed = case, setting, seed
        self.every, self.text = options.every, f"{case.name}, seed {seed}"
        self.batch = min(setting.batch, len(data.x) // 2)
        self.steps = max(1, int(epochs * len(data.x) / self.batch))
        self.sigma = setting.sigma if case.sigma is None else case.sigma
        if options.same_epsilon:
            self.sigma = fastdp.noise_multiplier_for(
                target_epsilon=setting.epsilon, delta=setting.delta, steps=self.steps,
                sample_rate=self.batch / len(data.x), accountant="gdp",
            )  # fmt: skip
        # longer runs go on from shorter ones, so the number of steps is not in it
        mark = {**case._asdict(), "epochs": None, "batch": self.batch, "sigma": self.sigma, "records": len(data.x),
                "experiment": setting.experiment}  # fmt: skip
        self.kept = resume.Checkpoint(options, f"{setting.experiment}_{self.text}", mark)
        self.state = self.kept.load() or {"steps": 0, "seconds": 0.0, "counts": (0, 0), "losses": []}
        self.device, self.data = options.device, data

    @property
    def over(self) -> bool:
        """Whether this run is done, and its rows of these test images are written."""
        tested = self.state.get("tested", len(self.data.x_test))
        return self.kept.done and self.state["steps"] == self.steps and tested == len(self.data.x_test)

    @property
    def beyond(self) -> bool:
        """Whether what is kept has gone further than was asked for."""
        return int(self.state["steps"]) > self.steps

    def run(self, tell: Callable[[Found], object]) -> None:
        """Train to the end. tell: called with what was found then, and after each `every` passes (0: none)."""
        torch.manual_seed(self.seed)
        case, begun = self.case, int(self.state["steps"])
        self.x, self.y, self.x_test, self.y_test = (t.to(self.device) for t in self.data[:4])
        if case.scale != 1:
            self.x, self.x_test = self.x * case.scale, self.x_test * case.scale
        # channels last: on a CPU the MNIST CNN's step takes 26 ms, not 43
        self.model = self.setting.network().to(self.device, memory_format=torch.channels_last)
        self.batches = common.loader(self.x, self.y, self.batch, None if case.private else 1000 * begun + self.seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=case.lr, momentum=case.momentum)
        if case.private:
            assert case.R is not None
            fastdp.privatize(self.optimizer, self.model, noise_multiplier=self.sigma, max_grad_norm=case.R,
                             clipping=case.clipping, style=style_of(case, self.model), accountant="gdp")  # fmt: skip
        if begun:
            resume.take_up(self.state, self.model, self.optimizer)
        if begun < self.steps:
            common.train(self.model, self.optimizer, self.batches, steps=self.steps - begun, text=self.text,
                         so_far=lambda until: self._so_far(self._whole(until), tell))  # fmt: skip
        else:  # it had ended, but its rows were not written
            self._so_far(self._whole(common.Run(0, 0.0, 0.0, None, [])), tell)
        if isinstance(self.optimizer, fastdp.PrivateOptimizer):
            self.optimizer.detach()

    def _whole(self, part: common.Run) -> common.Run:
        """With what was before the checkpoint."""
        over, of = (a + b for a, b in zip(self.state["counts"], part.counts, strict=True))
        steps = self.state["steps"] + part.steps
        return common.Run(steps, steps * self.batch / len(self.data.x), self.state["seconds"] + part.seconds,
                          over / max(of, 1), [*self.state["losses"], *part.losses], (over, of))  # fmt: skip

    def _so_far(self, until: common.Run, tell: Callable[[Found], object]) -> None:
        done = until.steps == self.steps
        state = resume.state_of(self.model, self.optimizer, steps=until.steps, seconds=until.seconds,
                                counts=until.counts, losses=until.losses, tested=len(self.data.x_test))  # fmt: skip
        if done or (self.every and len(until.losses) % self.every == 0):
            self.kept.keep(state)  # before its rows: where this ends between the two, they are written of the same run
            tell(self._found(until, done))
        if done:
            self.kept.finish(state)
        else:
            self.kept.save(state)

    def _found(self, until: common.Run, done: bool) -> Found:
        case, setting, rate = self.case, self.setting, self.batches.sample_rate
        columns: dict[str, Any] = {
            "train_records": len(self.x), "epochs": round(until.epochs, 2), "steps": until.steps, "batch": self.batch,
            "lr": case.lr, "seconds": round(until.seconds, 1),
        }  # fmt: skip
        logits = common.logits_of(self.model, self.x_test).cpu()
        found = calibration(logits, self.data.y_test)
        metrics = {"accuracy": found.accuracy, "nll": found.nll, "ece": found.ece, "mce": found.mce,
                   "train_loss": until.losses[-1]}  # fmt: skip
        if isinstance(self.optimizer, fastdp.PrivateOptimizer):
            metrics |= common.epsilons(self.sigma, rate, until.steps, setting.delta)
            spent = self.optimizer.epsilon(setting.delta)
            if self.sigma and abs(spent - metrics["epsilon_gdp"]) > 1e-9:
                raise AssertionError(f"the optimizer counts epsilon {spent}, not {metrics['epsilon_gdp']}")
            metrics["dropped" if case.clipping == "global" else "clipped"] = until.clipped or 0.0
            both = f"{case.R:g}, biases {case.R_bias:g}" if case.R_bias else case.R
            columns |= {"sigma": self.sigma, "epsilon": spent, "delta": setting.delta, "accountant": "gdp", "R": both,
                        "clipping": case.clipping, "style": case.style}  # fmt: skip
        if done and setting.membership:
            metrics |= self.attack(logits)
        return Found(columns, metrics, found, logits, done)

    def attack(self, logits: torch.Tensor) -> dict[str, float]:
        """AUC of the paper's attacker, who sees logits and labels of members and of others, over all classes and by
        class; and of one who sees the loss, too."""
        members = common.logits_of(self.model, self.x).cpu(), self.data.y
        others = logits, self.data.y_test
        found = membership_inference(*members, *others, bootstrap=1)
        seeing = membership_inference(*members, *others, bootstrap=1, with_loss=True)
        by_class = {f"membership_auc, class {label}": auc.value for label, auc in found.by_class.items()}
        return {"membership_auc": found.overall.value, "membership_auc, with the loss": seeing.overall.value} | by_class


def main(setting: Setting, options: Any) -> list[common.Row]:
    """Run every case with every seed, write rows and pictures, print what was found; returns the rows."""
    cases = [case for case in setting.cases if case.name in options.cases]
    drawn = [case.name for case in cases if not case.more] or options.cases  # dozens would not fit a picture
    if options.draw:
        confidence.draw(options, drawn, options.out.stem)
        return []
    data = common.subset(setting.images(options.data), options.records, options.test_records)
    epochs = options.epochs or (setting.quick_epochs if options.quick else setting.epochs)
    full = epochs == setting.epochs and options.records is None and options.test_records is None
    print(f"{data.name}: {len(data.x):,} to train on, {len(data.x_test):,} to test; batch {setting.batch}, "
          f"{epochs:g} epochs", flush=True)  # fmt: skip
    all_rows: list[common.Row] = []
    for seed in common.seeds(options):
        for case in cases:

            def tell(found: Found, case: Case = case, seed: int = seed) -> None:
                mode = "quick" if options.quick else "full" if full and found.done else "short"
                rows = common.rows(options, setting.experiment, case.name, mode, seed, found.metrics, **found.columns)
                common.write(options.out, rows)
                run = confidence.Run(setting.experiment, case.name, mode, seed)
                confidence.keep(options.out, run, found.calibration, found.logits, data.y_test)
                all_rows.extend(rows)
                told = ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items())
                print(f"{case.name}, seed {seed}, {found.columns['epochs']:g} epochs: {told}; "
                      f"{found.columns['seconds']:.0f} s", flush=True)  # fmt: skip

            training = Training(case, setting, data, seed, case.epochs or epochs, options)
            if training.over:
                print(f"{case.name}, seed {seed}: done before", flush=True)
                continue
            if training.beyond:
                print(f"{case.name}, seed {seed}: --checkpoints has it after {training.state['steps']:,} steps, and "
                      f"these are {training.steps:,}: another folder begins anew", flush=True)  # fmt: skip
                continue
            try:
                training.run(tell)
            except resume.Stopped:
                print(f"stopped after {options.minutes:g} minutes: run the same command again to go on")
                return all_rows
    if options.plots is not None:
        confidence.draw(options, drawn, options.out.stem, "quick" if options.quick else None)
    return all_rows
