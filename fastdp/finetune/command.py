"""`python -m fastdp finetune`: data, model, plan, announcement, run, outputs.

Exit codes: 0 done, 1 refused or failed with a reason, 130 interrupted (argparse ends with 2 on wrong flags).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from ..distributed.fingerprints import mark
from ..distributed.world import World
from ..errors import BatchReadWarning, FastDPError
from ..utils.formatting import at_most, count
from . import preflight
from .card import make_card
from .files import NO_CHARACTER, PRIVATE, new_file
from .folder import begin_folder, begun_at, check_out, ended_at, is_begun
from .hashes import COMMITMENT, commit, of_weights
from .models import RELOAD, quiet
from .outputs import write_outputs
from .plan import Outcome
from .prepare import Prepared, prepare, settle
from .processes import started, together
from .progress import Progress
from .tasks import headline
from .verdict import advice, nothing_learnt


def main(options: Namespace) -> int:
    """Run the command; returns the exit code. Problems that the user can solve are said in words, no traceback."""
    for stream in (sys.stdout, sys.stderr):  # a path's name may have bytes that no character stands for
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors=NO_CHARACTER)  # type: ignore[union-attr]
    try:
        with warnings.catch_warnings():
            return _main(options)
    except FastDPError as problem:
        _say(problem)
    except KeyboardInterrupt:
        _say("interrupted")
        if is_begun(options.out) and not options.dry_run and started()[0] == 0:
            print(how_to_resume(), file=sys.stderr)
        return 130
    except OSError as problem:
        if not problem.filename and problem.errno is None:
            raise
        _say(f"{problem.filename or 'a file'}: {problem.strerror}")
    except (torch.OutOfMemoryError, MemoryError) as problem:
        _say(
            f"memory does not suffice ({(str(problem) or 'RAM').splitlines()[0]}): try a smaller --max-length, --lora "
            "8 or a smaller model"
        )
    if started()[0] == 0 and is_begun(options.out) and not options.dry_run and options.resume:
        print(f"What was saved in {options.out} is untouched.", file=sys.stderr)
    return 1


def _say(problem: object) -> None:
    """What all processes raise, the first one says."""
    if started()[0] == 0:
        print(f"\nfastdp finetune: {problem}", file=sys.stderr)


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
            if world.rank == 0:
                print("\n--dry-run: nothing was trained or written.")
            return 0
        if world.rank == 0:
            return train(ready)
        from .run import run

        return 130 if run(ready.job, options.resume, _progress(ready)).status == "interrupted" else 0


def _same_plan(world: World, ready: Prepared) -> None:
    """All processes have the same plan and data, and take the smallest of their physical batches."""
    world.agree({"the plan": mark(list(ready.plan.fixed().items())), "the data": mark(dict(ready.job.fingerprint))})
    sizes = world.everywhere("physical batches", ready.plan.max_physical_batch_size)
    size = min((size for size in sizes if size is not None), default=None)
    ready.plan = ready.job.plan = dataclasses.replace(ready.plan, max_physical_batch_size=size)


# ---------------------------------------------------------------------- the run


def how_to_resume() -> str:
    """The command that goes on with the run."""
    words = shlex.join(word for word in sys.argv[1:] if word != "--resume")
    return f"Go on with: python -m fastdp {words} --resume"


def _progress(ready: Prepared) -> Progress:
    options = ready.options
    return Progress(options.out, options.epsilon, options.resume, headline(options.task), ready.plan.steps)


def train(ready: Prepared) -> int:
    """Run the job, write the outputs; the exit code."""
    from .run import run

    options = ready.options
    begin_folder(options)
    progress = _progress(ready)
    print("\ntraining", flush=True)
    if ready.evaluation is not None and not options.resume:
        progress.evaluated({"step": 0, "epsilon": 0.0, **ready.evaluation(ready.model)})
    try:
        with _warnings_said(progress), quiet():
            outcome = run(ready.job, options.resume, progress)
    finally:
        progress.pause()
    if outcome.status == "interrupted":
        print(f"\nInterrupted after step {outcome.steps} of {ready.plan.steps}, all of it saved; epsilon "
              f"{at_most(outcome.epsilon, 6)} spent.\n{how_to_resume()}")  # fmt: skip
        return 130
    _finish(ready, progress, outcome)
    return 0


@contextlib.contextmanager
def _warnings_said(progress: Progress) -> Iterator[None]:
    """fastdp's warnings as lines; other libraries' are left out, as is the one of --seed, which was said before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"fastdp\.")
        warnings.filterwarnings("ignore", message=".*seed=.*")
        warnings.simplefilter("ignore", BatchReadWarning)
        warnings.showwarning = lambda message, *where: progress.say(f"  warning: {message}")
        yield


def _public_name(model: str) -> str:
    """A hub's name; of a folder the last two parts, as a card is given away."""
    return "/".join(Path(model).absolute().parts[-2:]) if Path(model).exists() else model


def _finish(ready: Prepared, progress: Progress, outcome: Outcome) -> None:
    """Write the outputs and say where they are."""
    options, data = ready.options, ready.data
    trained, total = preflight.trained_of(ready.model)
    card = make_card(
        model=_public_name(options.model), task=options.task, plan=ready.plan, outcome=outcome, target=options.epsilon,
        trained=f"{count(trained)} of {count(total)} parameters", group=options.group_by,
        evaluated="" if data.held_out is None else "file" if options.eval else "split",
        labels="" if data.names is None else "given" if data.public_labels else "data", adapters=bool(options.lora),
        units=ready.units, responsible=options.responsible,
        begun=begun_at(options.out) or None, finished=ended_at(options.out),
        verified={"result": "exact", "records": min(preflight.CHECKED, len(ready.train)), "tolerance": ready.tolerance},
        base_model={"revision": ready.revision, "files": of_weights(options.model)},
        data_commitment=commit(options.out, data.files), replaced=ready.replaced,
    )  # fmt: skip
    found = simple = None
    if ready.evaluation is not None:
        if not ready.evaluation.called:  # the run was over before this process
            ready.evaluation(ready.model)
        found, simple = ready.evaluation.last, ready.evaluation.simple
    lines = write_outputs(options.out, ready.model, ready.tokenizer, progress, card, options.task, found, simple)
    with new_file(options.out / "plan.txt", PRIVATE) as file:
        file.write((preflight.said(ready.sections) + "\n\n" + ready.routes + "\n").encode(errors=NO_CHARACTER))
    head = f"epsilon {at_most(card.epsilon, 6)} at delta {at_most(card.delta, 6)} after {count(outcome.steps)} steps"
    if card.repeatable:
        head += " would be the guarantee without --seed; with it there is none"
    if outcome.status == "budget":
        head += (
            f"; {count(ready.plan.steps - outcome.steps)} steps fewer than planned, as those lost had spent their share"
        )
    print(f"\ndone: {head}")
    if outcome.nonfinite:
        print(f"{count(outcome.nonfinite)} gradients of records were not finite and were left out")
    print(f"written to {options.out}:")
    lines.append("plan.txt          what was said above, and the route of every use of a weight")
    lines.append(f"{COMMITMENT}  the key of the card's commitment to the data: keep it secret")
    for line in lines:
        print(f"  {line}")
    if ready.replaced:
        print(RELOAD)
    problem = nothing_learnt(options.task, progress.rows, simple)
    if problem:
        print("\n" + advice(problem, ready.plan, options, ready.units, trained / total))
