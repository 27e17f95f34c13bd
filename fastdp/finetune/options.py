"""The flags of `python -m fastdp finetune`, each with its default. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Fine-tune a pre-trained model with differential privacy: whoever sees the trained model learns next to nothing about
any one record (or person, with --group-by) of DATA. Says what it will do, trains until the budget is spent, and writes
the model, its metrics, plots and a privacy card to --out."""

EPILOG = """\
exit codes: 0 done; 1 refused or failed, the reason is said; 2 wrong usage of the flags; 130 interrupted, go on with
--resume.

example: python -m fastdp finetune ./minilm reviews.csv --task classify --epsilon 8 --dry-run"""


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


def names(text: str) -> list[str]:
    """a,b,c -> ["a", "b", "c"]."""
    return [name.strip() for name in text.split(",") if name.strip()]


# fmt: off
def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    positive = number(float, 0, open_low=True)
    parser.add_argument("model", metavar="MODEL", help="a folder that save_pretrained() or a hub wrote, or a hub name")
    parser.add_argument("data", metavar="DATA", type=Path, help="records to train on: CSV, TSV, JSONL, Parquet or text")
    parser.add_argument("--task", choices=("classify", "lm"), required=True,
                        help="classify: one label a text; lm: predict the next token")
    parser.add_argument("--out", type=Path, default=Path("fastdp-finetune"), metavar="DIR",
                        help="folder of everything that is written (default: %(default)s)")
    parser.add_argument("--resume", action="store_true",
                        help="go on with the run in --out, under the same options (default: a new run)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, train nothing, write nothing")
    _privacy(parser.add_argument_group("privacy"), positive)
    _training(parser.add_argument_group("training"), positive)
    _records(parser.add_argument_group("data"))
    _machine(parser.add_argument_group("machine"))


def _privacy(group: Any, positive: Callable[[str], Any]) -> None:
    group.add_argument("--epsilon", type=positive, required=True, help="the budget: training spends at most this")
    group.add_argument("--delta", type=number(float, 0, 0.5, open_low=True), metavar="D",
                       help="(default: 1 / (10 n) for n records, or persons, rounded down to one digit)")
    group.add_argument("--accountant", choices=("prv", "rdp", "gdp"), default="prv",
                       help="prv: tightest; rdp: an upper bound; gdp: an approximation (default: %(default)s)")
    group.add_argument("--clipping", choices=("automatic", "local", "global"), default="local",
                       help="local min(1, R/n), global 1[n <= R], or automatic R/(n + 0.01), under which records that "
                            "are right already count as much as others (default: %(default)s)")
    group.add_argument("--max-grad-norm", type=positive, default=1.0, metavar="R",
                       help="clipping norm of a record's gradient (default: %(default)s)")
    group.add_argument("--group-by", metavar="COLUMN",
                       help="protect persons, not records: the column that tells whose a record is")
    group.add_argument("--max-records-per-group", type=number(int, 1), metavar="N", default=8,
                       help="with --group-by: train on at most N records of a person (default: %(default)s)")
    group.add_argument("--seed", type=number(int, 0, 2**63 - 1),
                       help="repeatable noise and sampling, for experiments: voids the guarantee (default: none)")


def _training(group: Any, positive: Callable[[str], Any]) -> None:
    group.add_argument("--epochs", type=positive, default=3.0, help="expected passes over the data (default: 3)")
    group.add_argument("--batch-size", type=number(int, 1), metavar="B",
                       help="records expected in a step (default: the power of two next to n/10, 16 to 2048)")
    group.add_argument("--lr", type=positive,
                       help="learning rate of AdamW (default: 2e-4 to classify, 5e-4 for lm; with --lora or "
                            "--train-only 3e-3)")
    group.add_argument("--new-lr", type=positive,
                       help="learning rate of what is not pre-trained, a new head (default: 5e-3, or --lr if larger)")
    group.add_argument("--weight-decay", type=number(float, 0), default=0.0, metavar="W", help="(default: 0)")
    group.add_argument("--lora", type=number(int, 1), metavar="RANK",
                       help="train low-rank adapters (peft) and the head only (default: all weights)")
    group.add_argument("--lora-alpha", type=positive, metavar="A", help="scale of the adapters (default: 2 RANK)")
    group.add_argument("--lora-target", type=names, metavar="NAMES",
                       help="modules to adapt, by the end of their names, or all-linear (default: peft's choice)")
    group.add_argument("--train-only", type=names, metavar="NAMES",
                       help="'head', or patterns of parameter names such as '*.bias,classifier.*'")
    group.add_argument("--freeze", type=names, metavar="NAMES",
                       help="patterns of parameter names to leave as they are, such as '*embeddings*'")


def _records(group: Any) -> None:
    group.add_argument("--text-column", metavar="NAME", help="(default: 'text', 'sentence', ..., if there is only one)")
    group.add_argument("--pair-column", metavar="NAME", help="second text of a record, for pairs (default: none)")
    group.add_argument("--label-column", metavar="NAME", help="(default: 'label', 'class', ..., if there is only one)")
    group.add_argument("--labels", type=names, metavar="A,B,...",
                       help="the labels, in order (default: those found in the data, sorted)")
    group.add_argument("--max-length", type=number(int, 2), metavar="T",
                       help="tokens; longer texts are cut (default: 128 for classify, 256 for lm)")
    group.add_argument("--eval", type=Path, metavar="FILE", help="records to evaluate on, same columns (default: none)")
    group.add_argument("--eval-fraction", type=number(float, 0, 0.9), metavar="F",
                       help="share of DATA held out to evaluate on (default: 0.1 without --eval, else 0)")
    group.add_argument("--skip-bad-rows", type=number(int, 0), default=0, metavar="N",
                       help="leave out up to N rows that cannot be used (default: 0: refuse)")
    group.add_argument("--format", choices=("csv", "tsv", "jsonl", "parquet", "txt"), help="(default: by the ending)")
    group.add_argument("--columns", type=names, metavar="A,B,...",
                       help="names of the columns of a CSV or TSV file without a header")
    group.add_argument("--delimiter", metavar="C", help="(default: tab in TSV; in CSV the commonest of , ; tab |)")
    group.add_argument("--quote", metavar="C", help='quote character, or none (default: " in CSV, none in TSV)')
    group.add_argument("--encoding", metavar="NAME", help="(default: UTF-8, or by the byte order mark)")


def _machine(group: Any) -> None:
    group.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                       help="of the weights (default: %(default)s)")
    group.add_argument("--max-physical-batch-size", type=number(int, 1), metavar="P",
                       help="records in memory at once (default: found by trying)")
    group.add_argument("--checkpoint-every", type=number(int, 1), metavar="STEPS",
                       help="(default: every five minutes)")


# fmt: on
def default_delta(count: int) -> float:
    """1 / (10 n), rounded down to one digit: 7,000 records -> 1e-05."""
    value = 1 / (10 * max(count, 1))
    power = math.floor(math.log10(value))
    return float(f"{math.floor(value / 10**power + 1e-9)}e{power}")


def default_batch(count: int) -> int:
    """The power of two next to n/10, from 16 to 2048 and at most n: noise is shared by the records of a step."""
    return min(max(2 ** round(math.log2(max(count, 1) / 10)), 16), 2048, count)
