"""`python -m fastdp finetune`: data, model, plan, announcement, run, outputs.

Exit codes: 0 done, 1 refused or failed with a reason, 130 interrupted (argparse ends with 2 on wrong flags).
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..distributed.fingerprints import mark
from ..distributed.world import World
from ..errors import BatchReadWarning, FastDPError
from ..utils.formatting import at_most, count
from . import preflight
from .card import make_card
from .files import NO_CHARACTER, write
from .folder import begin_folder, check_out, is_begun, times
from .models import RELOAD
from .outputs import of_weights, write_outputs
from .plan import Outcome
from .prepare import Prepared, prepare, settle
from .processes import started, together
from .verdict import advice, nothing_learnt


def main(options: Namespace) -> int:
    """Run the command; returns the exit code. Problems that the user can solve are said in words, no traceback."""
    for stream in (sys.stdout, sys.stderr):  # an argument may have bytes that no character stands for
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors=NO_CHARACTER)  # type: ignore[union-attr]
    begun = f"What was saved in {options.out} is untouched." if options.resume else ""
    try:
        with _warnings_said():
            return _main(options)
    except FastDPError as problem:
        said: object = problem
    except KeyboardInterrupt:
        said, begun = "interrupted", how_to_resume()
    except OSError as problem:
        if not problem.filename and problem.errno is None:
            raise
        said = f"{problem.filename or 'a file'}: {problem.strerror}"
    except (torch.OutOfMemoryError, MemoryError) as problem:
        said = (
            f"memory does not suffice ({(str(problem) or 'RAM').splitlines()[0]}): try a smaller --max-length, --lora "
            "8 or a smaller model"
        )
    if started()[0] == 0:  # what all processes raise, the first one says
        print(f"\nfastdp finetune: {said}", file=sys.stderr)
        if begun and is_begun(options.out) and not options.dry_run:
            print(begun, file=sys.stderr)
    return 130 if said == "interrupted" else 1


def _main(options: Namespace) -> int:
    ready, problem = None, None
    try:
        settle(options)
        if started()[0] == 0:
            check_out(options)
        ready = prepare(options)
    except Exception as error:
        if started()[1] == 1:
            raise
        problem = error
    with together("cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu") as world:
        if problem is not None:
            raise problem
        assert ready is not None
        _same_plan(world, ready)
        if world.rank == 0:
            print(preflight.said(ready.sections), flush=True)
            if options.dry_run:
                print("\n--dry-run: nothing was trained or written.")
        if options.dry_run:
            return 0
        if world.rank == 0:
            return train(ready)
        from .run import run

        return 130 if run(ready.job, options.resume)[0].status == "interrupted" else 0


def _same_plan(world: World, ready: Prepared) -> None:
    """All processes have the same plan and data, and take the smallest of their physical batches."""
    job = ready.job
    world.agree({"the plan": mark(list(vars(job.plan).items())), "the data": mark(dict(job.fingerprint))})
    sizes = world.everywhere("physical batches", job.physical)
    job.physical = min((size for size in sizes if size is not None), default=None)


# ---------------------------------------------------------------------- the run


def how_to_resume() -> str:
    """The command that goes on with the run."""
    words = shlex.join(word for word in sys.argv[1:] if word != "--resume")
    return f"Go on with: python -m fastdp {words} --resume"


def train(ready: Prepared) -> int:
    """Run the job, write the outputs; the exit code."""
    from .run import run

    options, plan = ready.job.options, ready.job.plan
    begin_folder(options)
    print("\ntraining", flush=True)
    outcome, rows = run(ready.job, options.resume)
    spent = at_most(plan.epsilon(outcome.steps + outcome.lost_steps), 6)
    if outcome.status == "interrupted":
        print(f"\nInterrupted after step {outcome.steps} of {plan.steps}, all of it saved; epsilon {spent} spent.\n"
              f"{how_to_resume()}")  # fmt: skip
        return 130
    _finish(ready, outcome, rows)
    return 0


@contextlib.contextmanager
def _warnings_said() -> Iterator[None]:
    """fastdp's warnings as lines; other libraries' are left out, as is the one of --seed, which was said before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"fastdp\.")
        warnings.filterwarnings("ignore", message=".*seed=.*")
        warnings.simplefilter("ignore", BatchReadWarning)
        warnings.showwarning = lambda message, *where: tqdm.write(f"  warning: {message}")
        yield


def _card(ready: Prepared, outcome: Outcome) -> dict[str, Any]:
    job, data = ready.job, ready.data
    options, model = job.options, Path(job.options.model)
    trained, total = preflight.trained_of(job.model)
    begun, finished = times(options.out)
    return make_card(
        # a hub's name; of a folder the last two parts, as a card is given away
        model="/".join(model.absolute().parts[-2:]) if model.exists() else options.model,
        task=options.task, plan=job.plan, outcome=outcome, trained=f"{count(trained)} of {count(total)} parameters",
        group=options.group_by, evaluated="" if job.evaluate is None else "file" if options.eval else "split",
        labels="" if data.names is None else "given" if data.public else "data", adapters=bool(options.lora),
        units=ready.units, responsible=options.responsible, begun=begun or None, finished=finished,
        verified={"result": "exact", "records": min(preflight.CHECKED, len(job.data)),
                  "tolerance": 5e-2 if options.dtype == "bfloat16" else 1e-4},  # fastdp.verify's own
        base_model={"revision": getattr(job.model.config, "_commit_hash", None), "files": of_weights(options.model)},
        replaced=ready.replaced,
    )  # fmt: skip


def _finish(ready: Prepared, outcome: Outcome, rows: list[dict[str, Any]]) -> None:
    """Write the outputs and say where they are."""
    job, card = ready.job, _card(ready, outcome)
    options, plan = job.options, job.plan
    lines = write_outputs(job, ready.tokenizer, card, ready.files, rows)
    write(options.out / "plan.txt", preflight.said(ready.sections) + "\n\n" + ready.routes + "\n")
    head = f"epsilon {at_most(card['epsilon'], 6)} at delta {at_most(plan.delta, 6)} after {count(outcome.steps)} steps"
    if card["repeatable"]:
        head += " would be the guarantee without --seed; with it there is none"
    if outcome.status == "budget":
        head += f"; {count(plan.steps - outcome.steps)} fewer than planned, as steps lost had spent their share"
    print(f"\ndone: {head}")
    if outcome.nonfinite:
        print(f"{count(outcome.nonfinite)} gradients of records were not finite and were left out")
    print(f"written to {options.out}:")
    for line in lines:
        print(f"  {line}")
    if ready.replaced:
        print(RELOAD)
    trained, total = preflight.trained_of(job.model)
    problem = nothing_learnt(options.task, rows, getattr(job.evaluate, "simple", None))
    if problem:
        print("\n" + advice(problem, job, ready.units, trained / total))
