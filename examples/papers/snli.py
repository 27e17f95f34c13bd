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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root

import fastdp
from examples.papers import common, confidence
from examples.papers import pretrained as frozen
from examples.papers.training import test_metrics, train
from fastdp.losses import classification_loss
from fastdp.schedule import Schedule

WHERE = (
    "SNLI: snli_dev.tsv (9,842) and snli_test.tsv (9,824) with lines label TAB premise TAB hypothesis, and "
    "snli_train.tsv (550,152), which is trained on where it is there, else snli_dev.tsv. With a network: "
    "datasets.load_dataset('snli'), without the rows of label -1; or https://nlp.stanford.edu/projects/snli."
)
SETTINGS = ("sigma", "delta", "batch", "epochs", "lr", "head_lr", "small", "large", "switch", "longest",
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
    full = f"the paper's model, {PAPERS}, and training set; all cases of its figures"
    made = common.parser(__doc__ or "", "snli", full, draw=True)
    made.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="default: but those by layers")
    made.add_argument("--model", help="a BERT: a hub name or folder; default: the hub's MiniLM; with --full "
                      f"{PAPERS}")  # fmt: skip
    made.add_argument("--head", choices=("pooler", "mean"), default="pooler", help="what the classifier reads")
    made.add_argument("--cache", type=Path, help="keep the frozen blocks' output in this file (0.8 GB)")
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
    return made


# ---------------------------------------------------------------------- data


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
        kept = {part: {name: getattr(data, name) for name in ("states", "lengths", "labels")}
                for part, data in made.items()}  # fmt: skip
        torch.save({**kept, "source": source, "asked": asked}, options.cache)
    return model, made["train"], made["test"], source


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


def optimizer_of(model: frozen.LastBlock, case: Case, options: Any) -> Any:
    """AdamW, or DP-AdamW that clips as the case begins."""
    groups = [{"params": model.block.parameters(), "lr": options.lr},
              {"params": model.head.parameters(), "lr": options.head_lr}]  # fmt: skip
    if not case.first:
        return torch.optim.AdamW(groups, weight_decay=0.0)
    return fastdp.DPAdamW(model, params=groups, weight_decay=0.0, noise_multiplier=options.sigma, style=case.style,
                          clipping=case.first, max_grad_norm=radius(case.first, options))  # fmt: skip


def losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean cross-entropy of the pairs; 0 of none."""
    return classification_loss(model(batch), batch[-1])


def run(model: frozen.LastBlock, data: Any, case: Case, seed: int, options: Any, kept: common.Checkpoint,
        bert: nn.Module | None = None) -> tuple[dict[str, Any], float | None]:  # fmt: skip
    """Train in place; the setting of the run, as columns of a row, and the share of gradients longer than R.

    Local clipping shortens those gradients, global clipping drops them. data: states, or tokens, which the frozen
    `bert` reads in every step.
    """
    private, batch = bool(case.first), min(options.batch, len(data) // 4)
    steps = max(1, round(options.epochs * len(data) / batch))
    optimizer = optimizer_of(model, case, options)
    batches = fastdp.poisson_loader(
        data, expected_batch_size=batch, max_physical_batch_size=64, collate_fn=frozen.collate,
        seed=None if private else 1000 * kept.state.get("steps", 0) + seed,
    )  # fmt: skip
    plan = schedule(case, steps, options) if private else None
    device = next(model.parameters()).device

    def forward(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        *inputs, labels = (t.to(device) for t in batch)
        if isinstance(data, frozen.Tokens):
            assert bert is not None
            with torch.no_grad():
                inputs = [bert(*inputs), inputs[-1]]
        return losses(model, (*inputs, labels))

    def before(done: int) -> None:
        if plan is not None:
            old = optimizer.max_grad_norm
            plan.apply(optimizer, done)
            if optimizer.max_grad_norm != old:
                rescale(optimizer, optimizer.max_grad_norm / old)

    found = train(model, optimizer, batches, steps=steps, forward=forward, before=before, text=case.name, kept=kept,
                  keep=options.every)  # fmt: skip
    epsilon, delta = math.inf, options.delta or 1 / len(data)
    if private:
        epsilon = optimizer.epsilon(delta)
        optimizer.detach()
    kinds = [kind for kind in (case.first, case.then) if kind]
    return {
        "train_records": len(data), "epochs": round(steps * batch / len(data), 3), "steps": steps, "batch": batch,
        "sigma": options.sigma if private else 0.0, "epsilon": epsilon, "delta": delta if private else None,
        "accountant": "prv" if private else None, "lr": options.lr,
        "R": " then ".join(f"{radius(kind, options):g}" for kind in kinds), "clipping": " then ".join(kinds),
        "style": case.style if private else None, "seconds": found.seconds,
    }, found.clipped  # fmt: skip


def options_of(arguments: Sequence[str] | None) -> Any:
    """Parse the command line."""
    made = parser()
    options = made.parse_args(arguments)
    if options.full and not options.draw and (options.data is None or not (options.data / "snli_train.tsv").exists()):
        made.error(f"--full trains on snli_train.tsv, which is not in --data {options.data}. {WHERE}")
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
    bert, data, test, source = read(options)
    model_name = Path(options.model).name if options.model else "MiniLM-L6"
    same = not options.changed & set(SETTINGS)
    mode = "quick" if options.quick else "full" if source == "train" and model_name == PAPERS and same else "short"
    said = f"trained on {source}"
    parts = {"last": bert.last, "pooler": bert.pooler if options.head == "pooler" else None}
    pristine = {name: {k: v.clone() for k, v in part.state_dict().items()} for name, part in parts.items() if part}
    cases = {case.name: case for case in CASES if case.name in options.cases}

    def one(name: str, seed: int, kept: common.Checkpoint, tell: common.Tell) -> None:
        for part, state in pristine.items():
            parts[part].load_state_dict(state)  # type: ignore[union-attr]
        torch.manual_seed(seed)
        model = frozen.LastBlock(parts["last"], bert.width, parts["pooler"]).to(options.device)
        columns, beyond = run(model, data, cases[name], seed, options, kept, bert)
        logits = logits_of(model, test)
        metrics = test_metrics(logits, test.labels)
        if beyond is not None:
            rate = columns["batch"] / len(data)
            spent = common.epsilons(columns["sigma"], rate, columns["steps"], columns["delta"])
            metrics |= {"longer_than_R_share": beyond, "epsilon_gdp": spent["epsilon_gdp"],
                        "epsilon_prv": spent["epsilon_prv"]}  # fmt: skip
        tell(mode, metrics, columns, logits, test.labels, case=f"{name}; {said}")

    mark = {name: getattr(options, name) for name in (*SETTINGS, "model")} | {"records": len(data), "source": source}
    marks = {name: {**mark, **case._asdict()} for name, case in cases.items()}
    found = common.drive(options, f"SNLI, {model_name}, last block", marks, one)
    if options.plots is not None:
        draw(options)
    return found


def draw(options: Any) -> None:
    """The pictures of each case's last run: of those on the whole training set, else of those on the dev set."""
    for source in ("train", "dev"):
        names = {f"{name}; trained on {source}": name for name in options.cases}
        if confidence.kept(confidence.beside(options.out), list(names)):
            confidence.draw(options, names, "snli")
            return


if __name__ == "__main__":
    main()
