"""The flags of `python -m fastdp finetune`, each with its default. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .tasks import TASKS

DESCRIPTION = """\
Fine-tune a pre-trained model with differential privacy: whoever sees the trained model learns next to nothing about
any one record (or person, with --group-by) of DATA. The command prints what it will do, trains until the budget is
spent, and writes the model, its metrics, plots and a privacy card to --out."""

EPILOG = """\
exit codes: 0 the run is done; 1 it was refused or failed, and the message says why; 2 the flags were used wrongly;
130 it was interrupted (resume it with --resume).

example: python -m fastdp finetune ./minilm reviews.csv --task classify --epsilon 8 --dry-run"""

FORMATS = ("csv", "tsv", "jsonl", "parquet", "txt", "conll")
BETA = 0.1  # of DPO
PER_PERSON = 8  # records in a step


def number(kind: type, low: float, high: float = math.inf, open_low: bool = False) -> Callable[[str], Any]:
    """A parser of numbers from low to high, for argparse; open_low: low itself is refused."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole number' if kind is int else 'number'}") from None
        if not (low < value if open_low else low <= value) or not value <= high or not math.isfinite(value):
            bound = f"above {low:g}" if open_low else f"at least {low:g}"
            bound += "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {bound}")
        return value

    return parse


def limits(text: str) -> tuple[float, float]:
    """LOW,HIGH -> (low, high)."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers, LOW,HIGH") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise argparse.ArgumentTypeError(f"{text}: LOW must be below HIGH, and both finite")
    return low, high


def names(text: str) -> list[str]:
    """a,b,c -> ["a", "b", "c"]."""
    return [name.strip() for name in text.split(",") if name.strip()]


POSITIVE = number(float, 0, open_low=True)

# fmt: off
RUN: dict[str, dict[str, Any]] = {
    "model": dict(metavar="MODEL", help="a folder that save_pretrained() or the hub wrote, a GGUF file, or a hub name"),
    "data": dict(metavar="DATA", type=Path,
                 help="the records to train on: CSV, TSV, JSONL, Parquet, CoNLL or text; or a folder of images"),
    "--task": dict(choices=tuple(TASKS), required=True,
                   help="; ".join(f"{name}: {task.about}" for name, task in TASKS.items())),
    "--out": dict(type=Path, default=Path("fastdp-finetune"), metavar="DIR",
                  help="the folder for all output (default: %(default)s)"),
    "--resume": dict(action="store_true",
                     help="continue the run in --out, with the same options (default: a new run)"),
    "--dry-run": dict(action="store_true", help="print what a run would do, without training or writing"),
    "--responsible": dict(metavar="WHO",
                          help="who answers for the model and the guarantee, for the card: a name and how to reach it "
                               "(default: not stated)"),
}
PRIVACY: dict[str, dict[str, Any]] = {
    "--epsilon": dict(type=POSITIVE, required=True, help="the privacy budget: training spends at most this"),
    "--delta": dict(type=number(float, 0, 0.5, open_low=True), metavar="D",
                    help="delta of the guarantee (default: 1 / (10 n) for n records, or persons, rounded down to "
                         "one digit)"),
    "--accountant": dict(choices=("prv", "rdp", "gdp"), default="prv",
                         help="prv: tightest; rdp: an upper bound; gdp: an approximation (default: %(default)s)"),
    "--clipping": dict(choices=("automatic", "local", "global", "adaptive"), default="local",
                       help="local: min(1, R/n); global: 1[n <= R]; automatic: R/(n + 0.01), with which correctly "
                            "classified records count as much as others; adaptive: local, with an R that follows the "
                            "median of the norms, privately (default: %(default)s)"),
    "--max-grad-norm": dict(type=POSITIVE, default=1.0, metavar="R",
                            help="the clipping norm of a record's gradient; of adaptive the first (default: "
                                 "%(default)s)"),
    "--group-by": dict(metavar="COLUMN",
                       help="protect persons, not records: the column that says which person a record belongs to"),
    "--max-records-per-group": dict(type=number(int, 1), metavar="N",
                                    help="with --group-by: train on at most N records of a person in a step (default: "
                                         f"{PER_PERSON})"),
    "--seed": dict(type=number(int, 0, 2**63 - 1),
                   help="make noise and sampling repeatable, for experiments; this voids the guarantee (default: "
                        "none)"),
}
TRAINING: dict[str, dict[str, Any]] = {
    "--epochs": dict(type=POSITIVE, default=3.0, help="the expected number of passes over the data (default: 3)"),
    "--batch-size": dict(type=number(int, 1), metavar="B",
                         help="the expected number of records (persons) per step (default: the power of two next to "
                              "n/10, 16 to 2048)"),
    "--lr": dict(type=POSITIVE,
                 help="the learning rate of AdamW (default: 5e-4 for lm and seq2seq, 1e-4 for preference, else 2e-4; "
                      "3e-3 with --lora or --train-only)"),
    "--new-lr": dict(type=POSITIVE,
                     help="the learning rate of weights that are not pre-trained, such as a new head (default: 5e-3, "
                          "or --lr if larger)"),
    "--beta": dict(type=POSITIVE, default=BETA,
                   help="with --task preference: how strongly DPO holds on to the model as it was (default: 0.1)"),
    "--weight-decay": dict(type=number(float, 0), default=0.0, metavar="W",
                           help="the weight decay of AdamW (default: 0)"),
    "--lora": dict(type=number(int, 1), metavar="RANK",
                   help="train low-rank adapters (peft) and the head only (default: all weights)"),
    "--lora-alpha": dict(type=POSITIVE, metavar="A", help="the scale of the adapters (default: 2 RANK)"),
    "--lora-target": dict(type=names, metavar="NAMES",
                          help="the modules to adapt, by the end of their names, or all-linear (default: peft's "
                               "choice)"),
    "--train-only": dict(type=names, metavar="NAMES",
                         help="train only these: 'head', or patterns of parameter names such as "
                              "'*.bias,classifier.*'"),
    "--freeze": dict(type=names, metavar="NAMES",
                     help="do not train these: patterns of parameter names, such as '*embeddings*'"),
}
DATA: dict[str, dict[str, Any]] = {
    "--text-column": dict(metavar="NAME",
                          help="the column of the text (default: 'text', 'sentence', ..., if only one fits)"),
    "--pair-column": dict(metavar="NAME", help="the column of the second text, for pairs (default: none)"),
    "--label-column": dict(metavar="NAME",
                           help="the column of the label (default: 'label', 'class', ..., if only one fits); for "
                                "multi-label also several columns of 0 and 1: A,B,C"),
    "--labels": dict(type=names, metavar="A,B,...",
                     help="the labels, in order (default: those found in the data, sorted)"),
    "--label-range": dict(type=limits, metavar="LOW,HIGH",
                          help="with --task regression: the range that labels can have; the model learns them from -1 "
                               "to 1 (default: learn them as they are). Write --label-range=-5,5 if LOW is negative"),
    "--target-column": dict(metavar="NAME",
                            help="with --task seq2seq: the column of the text to write (default: 'target', "
                                 "'summary', ...)"),
    "--prompt-column": dict(metavar="NAME",
                            help="with --task preference: the column of the prompt (default: 'prompt')"),
    "--chosen-column": dict(metavar="NAME",
                            help="with --task preference: the column of the chosen answer (default: 'chosen')"),
    "--rejected-column": dict(metavar="NAME",
                              help="with --task preference: the column of the rejected answer (default: 'rejected')"),
    "--max-length": dict(type=number(int, 2), metavar="T",
                         help="the largest number of tokens; longer texts are cut (default: 256 for lm and preference, "
                              "else 128)"),
    "--eval": dict(type=Path, metavar="FILE",
                   help="records to evaluate on, with the same columns (default: none)"),
    "--eval-fraction": dict(type=number(float, 0, 0.9), metavar="F",
                            help="the share of DATA that is held out for evaluation (default: 0.1 without --eval, "
                                 "else 0)"),
    "--skip-bad-rows": dict(type=number(int, 0), default=0, metavar="N",
                            help="leave out up to N rows that cannot be used (default: 0: refuse)"),
    "--format": dict(choices=FORMATS, help="the format of DATA (default: by its suffix)"),
    "--columns": dict(type=names, metavar="A,B,...",
                      help="the names of the columns, if a CSV or TSV file has no header"),
    "--delimiter": dict(metavar="C",
                        help="the delimiter (default: tab in TSV; the most frequent of , ; tab | in CSV)"),
    "--quote": dict(metavar="C", help='the quote character, or none (default: " in CSV, none in TSV)'),
    "--encoding": dict(metavar="NAME", help="the encoding of DATA (default: UTF-8)"),
}
MACHINE: dict[str, dict[str, Any]] = {
    "--device": dict(help="cpu, cuda, cuda:1 (default: cuda if there is one)"),
    "--dtype": dict(choices=("float32", "bfloat16"), default="float32",
                    help="the type of the weights (default: %(default)s)"),
    "--max-physical-batch-size": dict(type=number(int, 1), metavar="P",
                                      help="the number of records in memory at once (default: found by trying)"),
    "--checkpoint-every": dict(type=number(int, 1), metavar="STEPS",
                               help="the number of steps between checkpoints (default: every five minutes)"),
    "--fused-loss": dict(action="store_true",
                         help="with --task lm: compute the loss without storing the logits of all tokens, which large "
                              "vocabularies make the largest tensors (default: off)"),
    "--graphed": dict(action="store_true",
                      help="replay recorded steps without Python, for small models on the CPU: texts are padded to "
                           "one of eight lengths, and each is recorded once, in seconds (default: off)"),
}
# fmt: on


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    groups = {"privacy": PRIVACY, "training": TRAINING, "data": DATA, "machine": MACHINE}
    for flag, how in RUN.items():
        parser.add_argument(flag, **how)
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag, how in flags.items():
            group.add_argument(flag, **how)


def default_batch(count: int) -> int:
    """The power of two next to n/10, from 16 to 2048 and at most n: noise is shared by the records of a step."""
    return min(max(2 ** round(math.log2(max(count, 1) / 10)), 16), 2048, count)
