"""SNLI with a pre-trained BERT: local clipping, global clipping, and mix-up training, which goes from one to the other.

    python examples/papers/snli.py --data DIR [--quick] [--full] [--plots DIR] [--device cuda] [--checkpoints DIR]

Bu et al.: the last encoder block, the pooler and a new classifier of BERT-base are trained by DP-AdamW on 550,152
pairs: batch 32, rate 5e-4, noise multiplier 0.4, R = 0.1, at most 128 tokens, 54,076 steps, (1.25, 1 / 550,152)-DP by
GDP. Mix-up training clips locally for 95 % of the steps, then globally with a large R, which the text does not state.
A smaller training set takes as many steps as make the same number of epochs, 3.15. --full asks for BERT-base and for
snli_train.tsv; without it, the model is a smaller BERT, and what is there is trained on.

The blocks before the last are frozen; of up to 50,000 pairs their output is computed once. Adam's moments are scaled by
the ratio of the Rs at the switch. That is what the code does to which the paper points: there the factor of a global
clipping is R / Z for gradients up to Z, and the noise stays that of R.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root

import fastdp
from examples.papers import common, confidence, resume
from examples.papers import pretrained as frozen
from fastdp.calibration import calibration
from fastdp.losses import classification_loss
from fastdp.schedule import Schedule

WHERE = (
    "SNLI: snli_dev.tsv (9,842) and snli_test.tsv (9,824) with lines label TAB premise TAB hypothesis, and "
    "snli_train.tsv (550,152), which is trained on where it is there, else snli_dev.tsv. With a network: "
    "datasets.load_dataset('snli'), without the rows of label -1; or https://nlp.stanford.edu/projects/snli."
)
SETTINGS = ("held_out", "sigma", "delta", "batch", "epochs", "lr", "head_lr", "small", "large", "switch", "longest",
            "head")  # fmt: skip
RECORDS, STEPS, MIXED = 550_152, 54_076, 51_576  # the paper's: pairs, steps, and those of mix-up that clip locally
KEPT = 50_000  # pairs, of which the frozen blocks' output is kept
PAPERS = "bert-base-cased"


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
    resume.add(made, f"the paper's model, {PAPERS}, and training set; all cases of its figures")
    made.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="default: but those by layers")
    made.add_argument("--model", help="a BERT: a hub name or folder; default: MiniLM, an installed package's or the "
                      f"hub's; with --full {PAPERS}")  # fmt: skip
    made.add_argument("--head", choices=("pooler", "mean"), default="pooler", help="what the classifier reads")
    made.add_argument("--cache", type=Path, help="keep the frozen blocks' output in this file (0.8 GB)")
    made.add_argument("--held-out", type=int, help="test on so many of the training records instead (tuning)")
    made.add_argument("--sigma", type=float, default=0.4, help="the noise multiplier")
    made.add_argument("--delta", type=float, help="default: 1 / pairs")
    made.add_argument("--batch", type=int, default=32)
    made.add_argument("--epochs", type=float, help=f"default: {STEPS / RECORDS * 32:.3f}; quick: 0.2")
    made.add_argument("--lr", type=float, default=5e-4, help="of the block")
    made.add_argument("--head-lr", type=float, help="of the new classifier; default: --lr")
    made.add_argument("--small", type=float, default=0.1, help="R of local clipping")
    made.add_argument("--large", type=float, default=20.0, help="R of global clipping")
    made.add_argument("--switch", type=float, default=MIXED / STEPS, help="the share of mix-up's steps before")
    made.add_argument("--longest", type=int, default=128, help="tokens of a pair")
    made.add_argument("--every", type=int, default=1000, help="steps from checkpoint to checkpoint")
    made.add_argument("--draw", action="store_true", help="train nothing: draw the pictures of the rows in --out")
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


def read(options: Any) -> tuple[frozen.FrozenBert, Any, frozen.States, str]:
    """The frozen blocks; what enters the last block, or all, of training pairs; of test pairs; the file trained on."""
    model, tokenizer = frozen.bert(options.model)
    model.to(options.device)
    asked = {"model": str(options.model), "quick": options.quick, "longest": options.longest}  # whose cache serves
    if options.cache is not None and options.cache.exists():
        kept = torch.load(options.cache, weights_only=True, mmap=True)
        if kept.get("asked") == asked:
            return model, frozen.States(**kept["train"]), frozen.States(**kept["test"]), kept["source"]
        print(f"{options.cache} is of another model or of fewer or more pairs: made anew", flush=True)
    parts, source = texts(options)
    if options.quick:
        parts = {part: (pairs[:2000], labels[:2000]) for part, (pairs, labels) in parts.items()}
    if len(parts["train"][1]) > KEPT:
        train = frozen.tokens_of(tokenizer, *parts["train"], options.longest)
        return model, train, frozen.states_of(model, tokenizer, *parts["test"], options.longest), source
    print(f"output of the frozen blocks, of {sum(len(y) for _, y in parts.values()):,} pairs", flush=True)
    made = {part: frozen.states_of(model, tokenizer, *both, options.longest) for part, both in parts.items()}
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
    device = next(model.parameters()).device
    with torch.no_grad():
        batches = (frozen.collate([data[i] for i in part]) for part in parts)
        return torch.cat([model.eval()(tuple(t.to(device) for t in batch)).cpu() for batch in batches])


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


def losses(model: nn.Module, batch: frozen.Batch) -> Tensor:
    """Mean cross-entropy of the pairs; 0 of none."""
    return classification_loss(model(batch), batch[2])


def run(model: frozen.LastBlock, data: Any, case: Case, seed: int, options: Any, kept: resume.Checkpoint,
        bert: nn.Module | None = None) -> tuple[dict[str, Any], float | None]:  # fmt: skip
    """Train in place; the setting of the run, as columns of a row, and the share of gradients longer than R.

    Local clipping shortens those gradients, global clipping drops them. data: states, or tokens, which the frozen
    `bert` reads in every step. Raises resume.Stopped.
    """
    private = bool(case.first)
    batch = min(options.batch, len(data) // 4)
    steps = max(1, round(options.epochs * len(data) / batch))
    optimizer = optimizer_of(model, case, options.sigma, options)
    before = kept.load() or {"steps": 0, "seconds": 0.0, "counts": (0, 0)}
    begun, counts, start = int(before["steps"]), list(before["counts"]), time.monotonic()
    if begun:
        resume.take_up(before, model, optimizer)
    live = isinstance(data, frozen.Tokens)
    batches = fastdp.poisson_loader(
        data, expected_batch_size=batch, max_physical_batch_size=64, seed=None if private else 1000 * begun + seed,
        collate_fn=frozen.collate_tokens if live else frozen.collate,
    )  # fmt: skip
    plan = schedule(case, steps, options) if private else None
    device = next(model.parameters()).device

    def count(*_: Any) -> None:
        for place, number in enumerate(common._beyond(optimizer)):
            counts[place] += number

    def forward(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        *inputs, labels = (t.to(device) for t in batch)
        if live:
            assert bert is not None
            with torch.no_grad():
                inputs = [bert(*inputs), inputs[-1]]
        return losses(model, (*inputs, labels))

    def step(done: int) -> None:
        if done and (done % options.every == 0 or kept.over()):
            kept.save(resume.state_of(model, optimizer, steps=begun + done, counts=tuple(counts),
                                      seconds=before["seconds"] + time.monotonic() - start))  # fmt: skip
        if plan is None:
            return
        old = optimizer.max_grad_norm  # type: ignore[attr-defined]
        plan.apply(optimizer, begun + done)  # type: ignore[arg-type]
        if (new := optimizer.max_grad_norm) != old:  # type: ignore[attr-defined]
            rescale(optimizer, new / old)

    if private:
        optimizer.register_step_pre_hook(count)
    common.train(model, optimizer, batches, steps=steps - begun, forward=forward, before=step, text=case.name)
    epsilon, delta = math.inf, options.delta or 1 / len(data)
    if isinstance(optimizer, fastdp.DPAdamW):
        epsilon = optimizer.epsilon(delta)
        optimizer.detach()
    rs = [radius(kind, options) for kind in (case.first, case.then) if kind]
    return {
        "train_records": len(data), "epochs": round(steps * batch / len(data), 3), "steps": steps, "batch": batch,
        "sigma": options.sigma if private else 0.0, "epsilon": epsilon, "delta": delta if private else None,
        "accountant": "prv" if private else None, "lr": options.lr, "R": " then ".join(f"{r:g}" for r in rs),
        "clipping": " then ".join(k for k in (case.first, case.then) if k),
        "style": case.style if private else None, "seconds": before["seconds"] + time.monotonic() - start,
    }, counts[0] / max(counts[1], 1) if private else None  # fmt: skip


def options_of(arguments: Sequence[str] | None) -> Any:
    """Parse the command line."""
    made = parser()
    options = made.parse_args(arguments)
    resume.check(made, options)
    if options.draw and options.plots is None:
        made.error("--draw needs --plots DIR, to draw into")
    if options.full and not options.draw and (options.data is None or not (options.data / "snli_train.tsv").exists()):
        made.error(f"--full trains on snli_train.tsv, which is not in --data {options.data}. {WHERE}")
    options.command = frozen.told(options.command)
    options.epochs = options.epochs or (0.2 if options.quick else STEPS / RECORDS * 32)
    options.head_lr = options.head_lr or options.lr
    options.model = options.model or (PAPERS if options.full else None)
    options.cases = options.cases or [case.name for case in CASES if case.style == "flat"]
    return options


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Train all cases, print and write their rows; draw the pictures of each case's last run."""
    options = options_of(arguments)
    if options.draw:
        draw(options)
        return []
    bert, train, test, source = read(options)
    if options.held_out:
        train, test = split(train, options.held_out)
    model_name = Path(options.model).name if options.model else "MiniLM-L6"
    experiment = f"SNLI, {model_name}, last block"
    same = not options.changed & set(SETTINGS)
    mode = "quick" if options.quick else "full" if source == "train" and model_name == PAPERS and same else "short"
    said = f"trained on {source}" + f", tested on {options.held_out} of it" * bool(options.held_out)
    found: list[common.Row] = []
    parts = {"last": bert.last, "pooler": bert.pooler if options.head == "pooler" else None}
    pristine = {name: {k: v.clone() for k, v in part.state_dict().items()} for name, part in parts.items() if part}
    for seed in common.seeds(options):
        for case in (case for case in CASES if case.name in options.cases):
            setting = {name: getattr(options, name) for name in (*SETTINGS, "model")}
            setting |= {**case._asdict(), "records": len(train), "source": source}
            kept = resume.Checkpoint(options, f"{experiment}_{case.name}, seed {seed}", setting)
            if kept.done:
                print(f"{case.name}, seed {seed}: done before", flush=True)
                continue
            for name, state in pristine.items():
                parts[name].load_state_dict(state)  # type: ignore[union-attr]
            torch.manual_seed(seed)
            model = frozen.LastBlock(parts["last"], bert.width, parts["pooler"]).to(options.device)
            try:
                columns, beyond = run(model, train, case, seed, options, kept, bert)
            except resume.Stopped:
                print(f"stopped after {options.minutes:g} minutes: run the same command again to go on")
                return found
            logits = logits_of(model, test)
            metrics = common.test_metrics(logits, test.labels)
            if beyond is not None:
                spent = common.epsilons(columns["sigma"], columns["batch"] / len(train), columns["steps"],
                                        columns["delta"])  # fmt: skip
                metrics |= {"longer_than_R_share": beyond, "epsilon_gdp": spent["epsilon_gdp"],
                            "epsilon_prv": spent["epsilon_prv"]}  # fmt: skip
            show(case.name, seed, metrics, columns)
            rows = common.rows(options, experiment, f"{case.name}; {said}", mode, seed, metrics, **columns)
            common.write(options.out, rows)
            found += rows
            of = confidence.Run(experiment, f"{case.name}; {said}", mode, seed)
            confidence.keep(options.out, of, calibration(logits, test.labels), logits, test.labels)
            kept.finish({"model": model.state_dict()})
    if options.plots is not None:
        draw(options)
    return found


def draw(options: Any) -> None:
    """The pictures of each case's last run: of those on the whole training set, else of those on the dev set."""
    for source in ("train", "dev"):
        names = {f"{case.name}; trained on {source}": case.name for case in CASES if case.name in options.cases}
        if confidence.kept(confidence.beside(options.out), None, list(names)):
            confidence.draw(options, list(names), "snli", names=names)
            return


def show(name: str, seed: int, metrics: Mapping[str, float], setting: Mapping[str, Any]) -> None:
    """One line."""
    print(f"{name}, seed {seed}: accuracy {100 * metrics['accuracy']:.2f} %, NLL {metrics['nll']:.3f}, "
          f"ECE {100 * metrics['ece']:.2f} %, MCE {100 * metrics['mce']:.2f} %, epsilon {setting['epsilon']:.2f}, "
          f"{setting['seconds']:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
