"""`python -m fastdp tune`: a search over settings that releases its best run alone, and what it costs.

What must hold for the cost to be right (`fastdp.mechanisms.tuning`) is what this file does: the number of runs is drawn
once, by the operating system's generator, and kept nowhere; each run draws its setting anew, and a function's file is
imported anew for it; nothing of a run is printed or kept but the best one's; a search cannot be taken up, and a run
that spends more than was planned ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import os
import random
import secrets
import shutil
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..accounting import History
from ..accounting.ledger import Ledger
from ..errors import AccountingError, FastDPError
from ..mechanisms.tuning import NegativeBinomialRuns, PoissonRuns, Runs, rdp_of
from ..ops.noise import Noise
from ..optim.optimizers import PrivateOptimizer
from ..utils.code_location import module_of_file
from ..utils.formatting import nearest
from .tune_card import BEST, RECORD, TuneError, card_of, page, said, write

RUNS = ".runs"
_KEYS = ("noise_multiplier", "sample_rate", "steps")


# A setting, what a run with it spends, and how it is made: run(folder) writes into the folder what is to be released,
# and returns its score (of private held-out records: each one's) and what it has spent.
Candidate = tuple[dict[str, Any], History, Callable[[Path], tuple[Any, Any]]]


def main(options: Namespace, of_finetune: Callable[[Namespace, list[dict[str, Any]]], list[Any]]) -> int:
    """Run the command; returns the exit code. of_finetune: makes the candidates of `finetune`."""
    try:
        return _main(options, of_finetune)
    except FastDPError as problem:
        said, code = str(problem), 1
    except OSError as problem:
        said, code = f"{problem.filename or 'a file'}: {problem.strerror}", 1
    except KeyboardInterrupt:
        said, code = (
            (
                "interrupted. Nothing was released, and the search cannot be taken up: which runs there were must stay "
                "unknown. Another search on the same data spends a budget of its own."
            ),
            130,
        )
    print(f"\nfastdp tune: {said}", file=sys.stderr)
    return code


def _main(options: Namespace, of_finetune: Callable[[Namespace, list[dict[str, Any]]], list[Any]]) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TuneError("a search runs in one process: each of several would draw runs of its own. Leave torchrun out")
    runs = _runs_of(options)
    _check_out(options.out)
    settings = _settings_of(options.settings)
    if options.what == "finetune":
        candidates = of_finetune(options, settings)
    elif options.words:
        raise TuneError(f"{options.words[0]}: arguments after -- are those of finetune")
    else:
        candidates = _of_function(options.what, settings)
    card = card_of(options, runs, [setting for setting, *_ in candidates], [history for _, history, _ in candidates])
    print(said(card), flush=True)
    if options.dry_run:
        print("\n--dry-run: nothing was trained or written.")
        return 0
    return _search(options, runs, candidates, card)


def _runs_of(options: Namespace) -> Runs:
    if options.held_out == "private" and not (options.score_noise and 0 < options.score_noise < math.inf):
        raise TuneError(
            "--held-out private: the score tells of the records that it is computed from. Give --score-noise S, the "
            "standard deviation of the noise on the sum of their scores (each from 0 to 1), or a public file"
        )
    if options.held_out == "public" and options.score_noise is not None:
        raise TuneError("--score-noise goes with --held-out private: public records need no noise")
    if options.distribution == "poisson":
        return PoissonRuns(options.expected_runs)
    return NegativeBinomialRuns(options.expected_runs, options.eta)


def _check_out(out: Path) -> None:
    if (out / RUNS).exists():
        raise TuneError(
            f"a search in {out} is running, or was killed. If it was, delete {out / RUNS} without a look at it: "
            "it holds runs that were not released"
        )
    if (out / RECORD).exists():
        raise TuneError(
            f"{out} holds a search already, which cannot be repeated or taken up: drawing the number of runs, or the "
            "runs, again and keeping the better search would cost more than is stated. Give another --out; that search "
            "spends a budget of its own on the same data, and budgets add up"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TuneError(f"{out} is not empty, or no folder: give another --out")


# ---------------------------------------------------------------------- candidates


def _settings_of(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise TuneError(f"--settings {path} cannot be read: {problem}") from None
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise TuneError(f'--settings {path} must hold a list of objects, one a setting: [{{"lr": 0.1}}, {{"lr": 0.3}}]')
    for place, each in enumerate(found):
        if each in found[:place]:
            raise TuneError(f"--settings {path}: setting {place} is there twice: {json.dumps(each)}")
        if each.get("seed") is not None:
            raise TuneError(f"--settings {path}: setting {place} has a seed, which makes noise known and voids it all")
    return found


def _of_function(where: str, settings: list[dict[str, Any]]) -> list[Candidate]:
    place, _, name = where.rpartition(":")
    path = Path(place).absolute()  # a run may change the working directory
    if not place or path.suffix != ".py" or not path.is_file():
        raise TuneError(f"{where!r} is neither finetune nor FILE.py:NAME of a file that is there")
    sys.path.insert(0, str(path.parent))
    try:
        module = module_of_file(path)
    except Exception as problem:
        raise TuneError(f"{place} cannot be imported: {type(problem).__name__}: {problem}") from problem
    if not callable(getattr(module, name, None)):
        raise TuneError(f"{place} has no function {name!r}{nearest(name, list(vars(module)))}")
    return [(each, _history_of(each), _calling(path, name, each)) for each in settings]


def _calling(path: Path, name: str, setting: dict[str, Any]) -> Callable[[Path], tuple[Any, History]]:
    def run(folder: Path) -> tuple[Any, History]:
        train = getattr(module_of_file(path), name)  # anew: a run must not find what another has left
        found = train(json.loads(json.dumps(setting)), folder)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TuneError("the function must return (score, optimizer), and returned something else")
        return found

    return run


def _history_of(setting: dict[str, Any]) -> History:
    """What a run with this setting spends, as the setting says."""
    found = setting.get("history") if "history" in setting else [[setting.get(key) for key in _KEYS]]
    if not isinstance(found, list) or not found or not all(isinstance(run, list) and len(run) == 3 for run in found):
        raise TuneError(f"history must be a list of [noise multiplier, sample rate, steps], not {json.dumps(found)}")
    if lacks := [key for key, value in zip(_KEYS, found[0], strict=True) if value is None]:
        raise TuneError(
            f"the setting {json.dumps(setting)} lacks {', '.join(lacks)}: what a run spends must be known beforehand. "
            f"Give {', '.join(_KEYS)}, or history, a list of [noise multiplier, sample rate, steps]"
        )
    return [tuple(run) for run in found]


# ---------------------------------------------------------------------- the search


def _search(options: Namespace, runs: Runs, candidates: Sequence[Candidate], card: dict[str, Any]) -> int:
    out: Path = options.out.absolute()  # a run may change the working directory
    (out / RUNS).mkdir(parents=True, mode=0o700)
    write(out, {**card, "status": "begun"})
    status = "failed"
    print("\nsearching. How many runs there are, and how they do, stays secret until the best is released.", flush=True)
    try:
        best = _best(out, runs, candidates, options.score_noise)
        if best is not None:
            # when it was made would tell how many came after it: of a file that is moved, the system knows that
            shutil.copytree(best[2], out / BEST, symlinks=True)
            for path in (*(out / BEST).rglob("*"), out / BEST):
                os.utime(path, follow_symlinks=False)
        status = "done"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        shutil.rmtree(out / RUNS, ignore_errors=True)
        if status != "done":
            shutil.rmtree(out / BEST, ignore_errors=True)
            write(out, {**card, "status": status})
    setting, score, _ = best or (None, None, None)
    card = {**card, "status": "done", "setting": setting, "score": score}
    write(out, card)
    (out / "search_card.md").write_text(page(card), encoding="utf-8")
    if best is None:
        print("\ndone: no run was drawn, which happens with --distribution poisson. The budget is spent.")
        return 0
    print(f"\ndone: the best setting is {json.dumps(setting)}, with the score {score:.6g}")
    print(f"written to {options.out}: {BEST}/, search_card.md and {RECORD}.")
    print("Give away nothing else, not even how long it took.")
    return 0


def _best(out: Path, runs: Runs, candidates: Sequence[Candidate], score_noise: float | None) -> Any:
    """(setting, score, folder) of the best of a secret number of runs; None of none. Raises TuneError where one fails;
    its message, which may quote records, is kept back."""
    noise, best, units = Noise(), None, set[str]()
    for _ in range(runs.draw()):
        setting, history, run = secrets.choice(candidates)
        folder = out / RUNS / secrets.token_hex(8)
        folder.mkdir(mode=0o700)
        torch.seed()  # no run draws its numbers from where another has left the generators
        random.seed()
        np.random.seed()
        before = Ledger.made_by_all
        try:
            with _silent():
                found, spent = run(folder)
                score = _score(found, score_noise, noise)
                _check_spent(history, spent, Ledger.made_by_all - before)
            units |= {spent.unit} if isinstance(spent, PrivateOptimizer) and spent.history else set()
            if len(units) > 1:
                raise TuneError(
                    "one run has trained on records and another on persons (group_by): no one epsilon holds for both. "
                    "Group in all settings, or in none"
                )
        except (TuneError, KeyboardInterrupt):
            raise
        except BaseException as problem:  # noqa: BLE001
            last = traceback.extract_tb(problem.__traceback__)[-1]
            raise TuneError(
                f"a run failed with {type(problem).__name__} in {last.filename}, line {last.lineno}. Its message is "
                "kept back, as it may quote records. Nothing was released; that it failed is not covered by epsilon"
            ) from None
        loser: Path | None = folder
        if best is None or score > best[1]:
            loser, best = best and best[2], (setting, score, folder)
        if loser is not None:
            shutil.rmtree(loser)
    return best


def _score(found: Any, score_noise: float | None, noise: Noise) -> float:
    """A number, larger for better. Of private records: the sum of their scores, with noise."""
    if score_noise is None:
        try:
            value = float(found)
        except (TypeError, ValueError):
            raise TuneError(f"the score must be a number, and is a {type(found).__name__}") from None
        return -math.inf if math.isnan(value) else value
    each = torch.as_tensor(found, dtype=torch.float64).detach().cpu()
    if each.dim() != 1 or not bool(((each >= 0) & (each <= 1)).all()):
        raise TuneError(
            "with --held-out private the score is a list, with a number between 0 and 1 for each held-out record: the "
            "noise is for that"
        )
    total = each.sum().view(1)
    noise.add_scaled_(total, score_noise, 1.0, 0)
    noise.step += 1
    return float(total)


def _check_spent(planned: History, spent: Any, made: int) -> None:
    """spent: a history, or the private optimizer that has it; made: the noised steps that the run has made here."""
    if isinstance(spent, PrivateOptimizer):
        privacy = spent._accounted()
        problems = (
            (not privacy.noise.secure,
             "a run has drawn its noise by seed=: whoever knows it can take the noise off. Leave it out"),
            (privacy.loader_batch.seeded,
             "a run has drawn its batches by seed=: whoever knows it knows who is in them. Leave it out"),
            (privacy.rate_check.low or any(privacy.missed.counts),
             "what a run has spent is in doubt: its sample_rate= is far below what its batches show, or batches of "
             "its loader had no step. Make a run by itself on public records: optimizer.epsilon() warns of it"),
            (privacy.mechanism is not None,
             f"{type(spent).__name__} accounts in its own way, which a search does not cover: use DPSGD"),
            (privacy.ledger.elsewhere,
             "other private optimizers have trained the same model in a run: return one history of all"),
        )  # fmt: skip
        for wrong, why in problems:
            if wrong:
                raise TuneError(why)
        spent = privacy.ledger.spent
    try:
        found = [tuple(run) for run in spent]
        more = bool(found) and any(
            now > before * (1 + 1e-9) + 1e-12
            for now, before in zip(rdp_of([found]), rdp_of([planned]), strict=True)  # type: ignore[list-item]
        )
        counted = sum(run[2] for run in found)
    except (TypeError, AccountingError):  # whose message quotes what was returned
        raise TuneError(
            "what a run has spent is not known: the function must return (score, optimizer), of steps whose sample "
            "rate is known and whose samples were not cut to a largest size, or (score, history) of such steps"
        ) from None
    if made > counted:
        raise TuneError(
            "a run has made more noised steps than the optimizer or history that it returned has: another one has made "
            "the others, on another model perhaps. Return one history of all"
        )
    if more:
        raise TuneError(
            "a run has spent more than its setting says (noise multiplier, sample rate, steps), so the search would "
            "cost more than was stated. Nothing was released"
        )


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing that a run prints is shown, not by its subprocesses either, nor once it is over."""
    _flush()
    nowhere, kept = os.open(os.devnull, os.O_WRONLY), (os.dup(1), os.dup(2))
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        _flush()  # into nothing: what waits in a buffer would be shown later, once for each run
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)
        os.close(nowhere)


def _flush() -> None:
    """Write what waits to be written to the terminal, by Python's files and the C library's."""
    for file in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            file.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)
