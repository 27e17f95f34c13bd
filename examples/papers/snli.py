"""SNLI with a pre-trained BERT: local clipping, global clipping, and mix-up training, which goes from one to the other.

    python examples/papers/snli.py --data DIR [--quick] [--seeds 3] [--plots DIR]

Bu et al., Convergence and calibration of deep learning with differential privacy. The last block and a new classifier
are trained by DP-AdamW; the blocks before are frozen, and their output is computed once. Mix-up training clips locally
with a small R for the first part of the steps, then globally with a large one; noise multiplier, sample rate and
steps, and so the privacy, are the same in all private cases.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root

import fastdp
from examples.papers import classify, common
from examples.papers import pretrained as frozen
from fastdp.calibration import calibration, reliability_diagram
from fastdp.losses import classification_loss
from fastdp.schedule import Schedule

EXPERIMENT = "SNLI, MiniLM-L6, last block"
WHERE = (
    "SNLI: snli_dev.tsv (9,842) and snli_test.tsv (9,824) with lines label TAB premise TAB hypothesis, and "
    "snli_train.tsv (550,152), which is trained on where it is there, else snli_dev.tsv. With a network: "
    "datasets.load_dataset('snli'), without the rows of label -1; or https://nlp.stanford.edu/projects/snli."
)
SETTINGS = ("model", "held_out", "epsilon", "delta", "batch", "epochs", "lr", "head_lr", "small", "large", "switch")
LONGEST = 48  # tokens; one pair in fifty is longer, and loses its end


class Case(NamedTuple):
    """How samples are clipped at first and after the switch ("": no clipping, no noise, no switch)."""

    name: str
    first: str = ""
    then: str = ""
    style: str = "flat"


CASES = (
    Case("non-private"),
    Case("local", "local"),
    Case("global", "global"),
    Case("mix-up", "local", "global"),
    Case("local, layerwise", "local", style="layerwise"),
    Case("mix-up, layerwise", "local", "global", "layerwise"),
)


def parser() -> common.Parser:
    """The options."""
    made = common.parser(__doc__ or "", "snli")
    made.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="default: all")
    made.add_argument("--model", help="a BERT: a hub name or folder; default: an installed package's, else the hub's")
    made.add_argument("--cache", type=Path, help="keep the frozen blocks' output in this file (0.8 GB)")
    made.add_argument("--states", type=Path, metavar="FOLDER", help="with --minutes: keep the run that is not "
                      "over in this folder, and go on with those that are there")  # fmt: skip
    made.add_argument("--minutes", type=float, default=math.inf, help="with --states: stop after so long; run the same "
                      "command again to go on")  # fmt: skip
    made.add_argument("--held-out", type=int, help="test on so many of the training records instead (tuning)")
    made.add_argument("--epsilon", type=float, default=8.0, help="at delta 1e-5 by PRV; the noise follows")
    made.add_argument("--delta", type=float, default=1e-5)
    made.add_argument("--batch", type=int, default=256)
    made.add_argument("--epochs", type=int, help="default: 10; quick: 3")
    made.add_argument("--lr", type=float, default=5e-4, help="of the block")
    made.add_argument("--head-lr", type=float, default=5e-3, help="of the new classifier")
    made.add_argument("--small", type=float, default=0.1, help="R of local clipping")
    made.add_argument("--large", type=float, default=20.0, help="R of global clipping")
    made.add_argument("--switch", type=float, default=0.5, help="the share of mix-up's steps that clip locally")
    return made


# ---------------------------------------------------------------------- data


def _state(data: frozen.States) -> dict[str, Tensor]:
    return {"states": data.states, "lengths": data.lengths, "labels": data.labels}


def texts(options: Any) -> tuple[dict[str, tuple[list[tuple[str, str]], Tensor]], str]:
    """{"train", "test"} -> (pairs, labels), and which file is trained on. Exits with where to get the files."""
    folder = options.data or Path("nowhere")
    source = "train" if (folder / "snli_train.tsv").exists() else "dev"
    found = {}
    for part, name in (("train", source), ("test", "test")):
        found[part] = frozen.read_pairs(common.need([folder / f"snli_{name}.tsv"], WHERE))
    return found, source


def read(options: Any) -> tuple[frozen.FrozenBert, frozen.States, frozen.States, str]:
    """The frozen blocks, what enters the last block of training and test pairs, and the file trained on."""
    model, tokenizer = frozen.bert(options.model)
    asked = {"model": str(options.model), "quick": options.quick}  # whose cache serves
    if options.cache is not None and options.cache.exists():
        kept = torch.load(options.cache, weights_only=True, mmap=True)
        if kept.get("asked") == asked:
            return model, frozen.States(**kept["train"]), frozen.States(**kept["test"]), kept["source"]
        print(f"{options.cache} is of another model or of fewer or more pairs: made anew", flush=True)
    parts, source = texts(options)
    if options.quick:
        parts = {part: (pairs[:2000], labels[:2000]) for part, (pairs, labels) in parts.items()}
    print(f"output of the frozen blocks, of {sum(len(y) for _, y in parts.values()):,} pairs", flush=True)
    made = {part: frozen.states_of(model, tokenizer, *both, LONGEST) for part, both in parts.items()}
    if options.cache is not None:
        kept = {part: _state(data) for part, data in made.items()}
        torch.save({**kept, "source": source, "asked": asked}, options.cache)
    return model, made["train"], made["test"], source


def split(data: frozen.States, few: int) -> tuple[frozen.States, frozen.States]:
    """Two parts, `few` records in the second; by a fixed random draw. Lengths stay in order."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    parts = (order[few:].sort().values, order[:few].sort().values)
    return tuple(  # type: ignore[return-value]
        frozen.States(torch.cat([data[int(i)][0] for i in part]), data.lengths[part], data.labels[part])
        for part in parts
    )


def logits_of(model: nn.Module, data: frozen.States) -> Tensor:
    """Logits [N, classes] in the order of the data."""
    parts = [range(i, min(i + 64, len(data))) for i in range(0, len(data), 64)]
    with torch.no_grad():
        return torch.cat([model.eval()(frozen.collate([data[i] for i in part])) for part in parts])


# ---------------------------------------------------------------------- training


def radius(kind: str, options: Any) -> float:
    """R of a clipping function."""
    return float(options.small if kind == "local" else options.large)


def schedule(case: Case, steps: int, options: Any) -> Schedule:
    """The clipping by step: one entry, and one more at the switch."""
    entries: list[tuple[int, dict[str, Any]]] = [
        (0, {"clipping": case.first, "max_grad_norm": radius(case.first, options)})
    ]
    if case.then:
        switch = max(1, round(options.switch * steps))
        entries.append((switch, {"clipping": case.then, "max_grad_norm": radius(case.then, options)}))
    return Schedule(entries)


def rescale(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Adam's moments as if all gradients so far had been `factor` times as long.

    A private gradient is as long as R, mostly by its noise. Where R jumps a hundredfold, the old second moment would
    be nothing beside the new gradients, and the next steps would be several times too long. Only released numbers are
    changed, which costs no privacy.
    """
    for state in optimizer.state.values():
        state["exp_avg"].mul_(factor)
        state["exp_avg_sq"].mul_(factor**2)


def optimizer_of(model: frozen.LastBlock, case: Case, sigma: float, options: Any) -> torch.optim.Optimizer:
    """AdamW, or DP-AdamW that clips as the case begins."""
    groups = [{"params": model.block.parameters(), "lr": options.lr},
              {"params": model.head.parameters(), "lr": options.head_lr}]  # fmt: skip
    if not case.first:
        return torch.optim.AdamW(groups, weight_decay=0.0)
    return fastdp.DPAdamW(model, params=groups, weight_decay=0.0, noise_multiplier=sigma, style=case.style,
                          clipping=case.first, max_grad_norm=radius(case.first, options))  # fmt: skip


@functools.cache
def noise_for(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The noise multiplier, the same in all private cases."""
    return fastdp.noise_multiplier_for(target_epsilon=epsilon, delta=delta, sample_rate=sample_rate, steps=steps)


def losses(model: nn.Module, batch: frozen.Batch) -> Tensor:
    """Mean cross-entropy of the pairs; 0 of none."""
    return classification_loss(model(batch), batch[2])


class Stopped(Exception):
    """The time that was given is over; the state is kept."""


class Progress(NamedTuple):
    """Of a run: logical steps and seconds so far; gradients that were longer than R, and of how many."""

    steps: int = 0
    seconds: float = 0.0
    longer: int = 0
    gradients: int = 0


class Keeper:
    """Keeps a run's state in a file when its time is over, between two logical steps, and takes it up.

    What is drawn after that is drawn anew: private sampling and noise owe nothing to the steps before, and the
    accountant's history is part of the optimizer's state.
    """

    def __init__(self, path: Path | None, until: float) -> None:
        self.path, self.until = path, until

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """The progress of the state that there is, into model and optimizer."""
        if self.path is None or not self.path.exists():
            return Progress()
        kept = torch.load(self.path, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        return Progress(*kept["progress"])

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Write the state, all or nothing."""
        assert self.path is not None
        new = self.path.with_suffix(".new")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": tuple(progress)}, new)
        new.replace(self.path)

    def over(self) -> bool:
        return self.path is not None and time.monotonic() > self.until


def run(model: frozen.LastBlock, data: frozen.States, case: Case, seed: int, options: Any,
        keeper: Keeper | None = None) -> tuple[dict[str, Any], float | None]:  # fmt: skip
    """Train in place; the setting of the run, as columns of a row, and the share of gradients longer than R.

    Local clipping shortens those gradients, global clipping drops them. Raises Stopped.
    """
    private, keeper = bool(case.first), keeper or Keeper(None, math.inf)
    batch = min(options.batch, len(data) // 4)
    steps, sigma = options.epochs * fastdp.accounting.steps_per_epoch(batch / len(data)), 0.0
    if private:
        sigma = noise_for(options.epsilon, options.delta, batch / len(data), steps)
    optimizer = optimizer_of(model, case, sigma, options)
    first = keeper.load(model, optimizer)
    batches = fastdp.poisson_loader(
        data, expected_batch_size=batch, max_physical_batch_size=64, collate_fn=frozen.collate,
        seed=None if private else 1000 * seed + first.steps,
    )  # fmt: skip
    plan = schedule(case, steps, options) if private else None
    counts, start = [first.longer, first.gradients], time.monotonic()

    def count(*_: Any) -> None:
        for place, number in enumerate(common._beyond(optimizer)):
            counts[place] += number

    def so_far(done: int) -> Progress:
        return Progress(first.steps + done, first.seconds + time.monotonic() - start, *counts)

    def before(step: int) -> None:
        if step and keeper.over():
            keeper.save(model, optimizer, so_far(step))
            raise Stopped
        if plan is None:
            return
        old = optimizer.max_grad_norm  # type: ignore[attr-defined]
        plan.apply(optimizer, first.steps + step)  # type: ignore[arg-type]
        if (new := optimizer.max_grad_norm) != old:  # type: ignore[attr-defined]
            rescale(optimizer, new / old)

    if private:
        optimizer.register_step_pre_hook(count)
    common.train(model, optimizer, batches, steps=steps - first.steps, forward=losses, before=before, text=case.name)
    done, epsilon = so_far(steps - first.steps), math.inf
    if isinstance(optimizer, fastdp.DPAdamW):
        epsilon = optimizer.epsilon(options.delta)
        optimizer.detach()
    rs = [radius(kind, options) for kind in (case.first, case.then) if kind]
    return {
        "train_records": len(data), "epochs": options.epochs, "steps": done.steps, "batch": batch, "sigma": sigma,
        "epsilon": epsilon, "delta": options.delta if private else None, "accountant": "prv" if private else None,
        "lr": options.lr, "R": " then ".join(f"{r:g}" for r in rs),
        "clipping": " then ".join(k for k in (case.first, case.then) if k),
        "style": case.style if private else None, "seconds": done.seconds,
    }, done.longer / max(done.gradients, 1) if private else None  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Train all cases, print and write their rows; draw the reliability diagram of each case's last run."""
    options = parser().parse_args(arguments)
    options.command = frozen.told(options.command)
    options.epochs = options.epochs or (3 if options.quick else 10)
    if options.states is not None:
        options.states.mkdir(parents=True, exist_ok=True)
    bert, train, test, source = read(options)
    if options.held_out:
        train, test = split(train, options.held_out)
    whole = source == "train" and not options.changed & set(SETTINGS)
    mode = "quick" if options.quick else "full" if whole else "short"
    # runs of other settings have files of other names in --states
    kind = f"{zlib.crc32(repr([source, mode, len(train), *(getattr(options, n) for n in SETTINGS)]).encode()):08x}"
    said = f"trained on {source}" + f", tested on {options.held_out} of it" * bool(options.held_out)
    found: list[common.Row] = []
    bins = options.out.with_name(f"{options.out.stem}_bins.csv")
    pristine = {name: value.clone() for name, value in bert.last.state_dict().items()}
    until = time.monotonic() + 60 * options.minutes
    for seed in common.seeds(options):
        for case in (case for case in CASES if not options.cases or case.name in options.cases):
            state = None if options.states is None else options.states / f"{case.name}, seed {seed}, {kind}.pt"
            done = None if state is None else state.with_suffix(".done")
            if done is not None and done.exists():
                continue
            bert.last.load_state_dict(pristine)
            torch.manual_seed(seed)
            model = frozen.LastBlock(bert.last, bert.width)
            try:
                setting, beyond = run(model, train, case, seed, options, Keeper(state, until))
            except Stopped:
                print(f"stopped after {options.minutes:g} minutes: run the same command again to go on")
                return found
            logits = logits_of(model, test)
            metrics = common.test_metrics(logits, test.labels)
            if beyond is not None:
                metrics["longer_than_R_share"] = beyond
            show(case.name, seed, metrics, setting)
            rows = common.rows(options, EXPERIMENT, f"{case.name}; {said}", mode, seed, metrics, **setting)
            common.write(options.out, rows)
            found += rows
            classify.keep(bins, EXPERIMENT, f"{case.name}; {said}", mode, seed, calibration(logits, test.labels))
            if done is not None:
                done.touch()
    if bins.exists() and (path := common.picture(options, "snli_reliability")) is not None:
        drawn = classify.kept(bins, None, [f"{case.name}; {said}" for case in CASES])
        reliability_diagram({name.partition(";")[0]: one for name, one in drawn.items()}, path)
        print(f"wrote {path}")
    return found


def show(name: str, seed: int, metrics: Mapping[str, float], setting: Mapping[str, Any]) -> None:
    """One line."""
    print(f"{name}, seed {seed}: accuracy {100 * metrics['accuracy']:.2f} %, NLL {metrics['nll']:.3f}, "
          f"ECE {100 * metrics['ece']:.2f} %, MCE {100 * metrics['mce']:.2f} %, epsilon {setting['epsilon']:.2f}, "
          f"{setting['seconds']:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
