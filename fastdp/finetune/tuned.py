"""Runs of `finetune` as `python -m fastdp tune` makes them: each in a process of its own, without a word."""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..accounting import History
from .options import add_options
from .plan import FinetuneError
from .prepare import prepare
from .tasks import LOWER, headline

_OURS = ("out", "resume", "dry_run", "seed", "delta")


def candidates(options: Namespace, settings: list[dict[str, Any]]) -> list[tuple[dict[str, Any], History, Any]]:
    """(setting, what a run spends, the run) of each setting, prepared as finetune would. Raises FinetuneError."""
    found, persons = [], set()
    for setting in settings:
        words = [*options.words, "--delta", repr(options.delta), *_flags(setting)]
        own = _parsed([*words, "--out", str(options.out / "run")])
        _check(own, options)
        persons.add(own.group_by)
        ready = prepare(own)
        plan, evaluate = ready.job.plan, ready.job.evaluate
        if evaluate is None:
            raise FinetuneError("nothing is evaluated, so no run is better than another: give --eval FILE")
        held = len(ready.data.held_out) if options.held_out == "private" else None
        history: History = [(plan.noise_multiplier, plan.sample_rate, plan.steps)]
        found.append((setting, history, _run(words, own.task, held)))
    if len(persons) > 1:
        raise FinetuneError("--group-by must be the same in all settings: the guarantee is for records, or for persons")
    return found


def _flags(setting: dict[str, Any]) -> list[str]:
    """{"lr": 0.1, "fused_loss": true} -> ["--lr", "0.1", "--fused-loss"]."""
    words = []
    for name, value in setting.items():
        flag = "--" + name.removeprefix("--").replace("_", "-")
        if flag[2:].replace("-", "_") in _OURS:
            raise FinetuneError(f"{flag} is not for the settings of a search")
        if value is not None and value is not False:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [flag] if value is True else [flag, text]
    return words


class _Parser(argparse.ArgumentParser):
    """Of settings and of what stands after --: an error is the search's own."""

    def error(self, message: str) -> NoReturn:
        raise FinetuneError(f"{message} (python -m fastdp finetune --help explains its options)")


def _parsed(words: list[str]) -> Namespace:
    parser = _Parser(add_help=False)
    add_options(parser)
    return parser.parse_args(words)


def _check(own: Namespace, options: Namespace) -> None:
    """Raises FinetuneError where the search's guarantee would not be what is said."""
    given = [word for word in options.words if word.split("=")[0] in ("--out", "--delta")]
    private, public = options.held_out == "private", options.held_out == "public"
    problems = (
        (own.seed is not None or own.resume or own.dry_run,
         "--seed, --resume and --dry-run of finetune are not for a search"),
        (given, f"{' '.join(given)} is given to tune itself, before the --"),
        (own.skip_bad_rows, "--skip-bad-rows is not for a search: repair the file, which every run reads"),
        (public and (own.eval is None or own.eval_fraction),
         "--held-out public: the records that are held out of DATA are as private as the others. Give --eval FILE "
         "with public records, or --held-out private"),
        (private and own.task != "classify",
         "--held-out private needs --task classify, where a record scores 0 or 1: the loss of a text is unbounded"),
        (private and own.group_by,
         "--held-out private counts records, not persons: leave --group-by out, or evaluate in public"),
    )  # fmt: skip
    for wrong, why in problems:
        if wrong:
            raise FinetuneError(why)


def _run(words: list[str], task: str, held: int | None) -> Callable[[Path], tuple[Any, History]]:
    """held: how many private records are held out, of which each has a score."""

    def run(folder: Path) -> tuple[Any, History]:
        out = folder / "run"
        command = [sys.executable, "-m", "fastdp", "finetune", *words, "--out", str(out)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            raise FinetuneError(f"finetune ended with exit code {done.returncode}")
        card = json.loads((out / "privacy_card.json").read_text(encoding="utf-8"))
        score = _score(out / "metrics.csv", task)
        shutil.move(str(out / "model"), str(folder / "model"))
        shutil.rmtree(out)  # curves, checkpoints and the card of the run alone
        history = [tuple(each) for each in card["history"]]
        if held is None:
            return score, history
        right = round(score * held)
        return [1.0] * right + [0.0] * (held - right), history

    return run


def _score(metrics: Path, task: str) -> float:
    """The last evaluation: the figure that the task is judged by, the larger the better (lm: minus the loss)."""
    name = "nll" if task == "lm" else headline(task)
    sign = -1.0 if name in LOWER else 1.0
    with open(metrics, newline="", encoding="utf-8") as file:
        found = [row[name] for row in csv.DictReader(file) if row.get(name)]
    if not found:
        raise FinetuneError("the run was not evaluated")
    return sign * float(found[-1])
