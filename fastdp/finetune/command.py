"""`python -m fastdp finetune`: data, model, plan, announcement, run, outputs.

Exit codes: 0 done, 1 refused or failed with a reason, 130 interrupted (argparse ends with 2 on wrong flags).
"""

from __future__ import annotations

import json
import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import FastDPError
from . import announce
from .card import make_card
from .checkpoint import new_file
from .encode import Collate, Encoded, encode, longest, loss_of, padding
from .evaluation import Evaluation
from .job import FinetuneError, Job, Outcome, Plan
from .models import choose_trained, known_labels, load_config, load_model, load_tokenizer
from .outputs import write_outputs
from .progress import Progress
from .records import Data, load_data
from .words import count, listed

OPTIONS = "options.json"  # in --out: what the run was begun with
# may differ when a run is resumed: they change neither the guarantee nor what is learnt
_FREE = ("resume", "dry_run", "out", "device", "max_physical_batch_size", "checkpoint_every", "model", "data", "eval")
_EVALUATED_AT_ONCE = 32


@dataclass
class Prepared:
    """All that the run needs, and what was said of it."""

    options: Namespace
    data: Data
    model: nn.Module
    tokenizer: Any
    train: Encoded
    evaluation: Evaluation | None
    plan: Plan
    job: Job
    units: int
    sections: list[tuple[str, list[str]]]
    routes: str = ""  # the engine's plan, as a table


def main(options: Namespace) -> int:
    """Run the command; returns the exit code. Problems that the user can solve are said in words, without a traceback."""
    try:
        return _main(options)
    except FastDPError as problem:
        print(f"\nfastdp finetune: {problem}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nfastdp finetune: interrupted", file=sys.stderr)
        if _is_begun(options.out) and not options.dry_run:
            print(how_to_resume(options), file=sys.stderr)
        return 130
    except OSError as problem:
        if not problem.filename and problem.errno is None:
            raise
        print(f"\nfastdp finetune: {problem.filename or 'a file'}: {problem.strerror}", file=sys.stderr)
    except (torch.OutOfMemoryError, MemoryError) as problem:
        print(
            f"\nfastdp finetune: memory does not suffice ({str(problem).splitlines()[0] if str(problem) else 'RAM'}): try "
            "a smaller --max-length, --lora 8 or a smaller model",
            file=sys.stderr,
        )
    if _is_begun(options.out) and not options.dry_run and options.resume:
        print(f"What was saved in {options.out} is untouched.", file=sys.stderr)
    return 1


def _main(options: Namespace) -> int:
    _check_out(options)
    ready = prepare(options)
    print(announce.said(ready.sections), flush=True)
    if options.dry_run:
        print("\n--dry-run: nothing was trained or written.")
        return 0
    return train(ready)


# ---------------------------------------------------------------------- before


def prepare(options: Namespace) -> Prepared:
    """Read, check and measure everything, change nothing on the disk."""
    device = _device(options.device)
    # the first weights of a new head are no secret, and must be the same again when a killed run is taken up
    torch.manual_seed(options.seed or 0)
    config = load_config(options.model)
    data = load_data(options, known_labels(config) if options.task == "classify" else None)
    tokenizer = load_tokenizer(options.model)
    words = padding(tokenizer)
    model, new, notes = load_model(options.model, options.task, data.names, options.dtype)
    notes = notes + ([words] if words else [])
    if options.task == "classify" and getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    most = longest(model, tokenizer, options.task, options.max_length)
    encoded = encode(data.train, tokenizer, model, options.task, most)
    held_out = None if data.held_out is None else encode(data.held_out, tokenizer, model, options.task, most)
    model, more = choose_trained(model, new, options)
    model.to(device)
    groups = data.train.groups
    units = len(encoded) if groups is None else len(set(groups))
    plan = announce.make_plan(options, units)
    collate = Collate(int(tokenizer.pad_token_id))
    evaluation = None if held_out is None else Evaluation(held_out, collate, options.task, _EVALUATED_AT_ONCE)
    per_epoch = max(1, round(1 / plan.sample_rate))
    job = Job(
        model=model, loss=loss_of(model, options.task), data=encoded, collate=collate, plan=plan, folder=options.out,
        evaluate=evaluation, evaluate_every=None if evaluation is None else per_epoch,
        fingerprint={"data (training records)": data.train.digest, "tokens": _tokens_digest(encoded)},
        group_by=groups, length=encoded.length,
    )  # fmt: skip
    sections = [
        ("model", _model_lines(options, model, [*notes, *more])),
        ("data", _data_lines(options, data, encoded, held_out, most, units)),
        ("privacy", announce.privacy_lines(plan, options, units)),
    ]
    ready = Prepared(options, data, model, tokenizer, encoded, evaluation, plan, job, units, sections)
    _measure(ready)
    return ready


def _measure(ready: Prepared) -> None:
    """verify, the engine's plan, physical batch, time, memory, disk: into the sections, and the plan of the job."""
    job, options = ready.job, ready.options
    ready.sections.append(("check", [announce.check(job)]))
    rows = options.max_physical_batch_size or 32
    short, ready.routes = announce.routes(job, min(rows, len(ready.train)))
    ready.sections.append(("plan", [short]))
    needed = announce.disk_needed(ready.model, bool(options.lora))
    ready.sections.append(("disk", [announce.check_disk(options.out, needed)]))


def _tokens_digest(encoded: Encoded) -> str:
    import hashlib

    digest = hashlib.sha256(encoded.starts.numpy().tobytes())
    digest.update(encoded.tokens.numpy().tobytes())
    return digest.hexdigest()


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise FinetuneError(f"--device {name}: {str(problem).splitlines()[0]}") from None
    return device


def _model_lines(options: Namespace, model: nn.Module, notes: list[str]) -> list[str]:
    trained, total = announce.trained_of(model)
    inner: Any = model
    kind = type(inner.get_base_model() if hasattr(inner, "get_base_model") else inner).__name__
    share = f"{100 * trained / total:.3g} %"
    return [f"{kind} of {options.model}, in {options.dtype}",
            f"trained: {count(trained)} of {count(total)} parameters ({share})", *notes]  # fmt: skip


def _data_lines(options: Namespace, data: Data, train: Encoded, held_out: Encoded | None, most: int,
                units: int) -> list[str]:  # fmt: skip
    lines = [f"{count(len(train))} records of {options.data} to train on, columns "
             + ", ".join(f"{what} {name!r}" for what, name in data.columns.items())]  # fmt: skip
    if held_out is not None and options.eval is None:
        lines.append(f"{count(len(held_out))} others are held out to evaluate on, chosen by a hash of each one's text")
        if options.group_by:
            lines[-1] = lines[-1].replace("each one's text", "the person's key")
    elif held_out is not None:
        lines.append(f"{count(len(held_out))} records of {options.eval} to evaluate on")
    if data.names is not None:
        whence = "as given" if data.public_labels else "found in the data, --labels states them"
        lines.append(f"{len(data.names)} labels ({whence}): {listed(data.names, 8)}")
    if options.group_by:
        lines.append(f"{count(units)} persons by {options.group_by!r}: a person's records are clipped as one sample, at "
                     f"most {options.max_records_per_group} of them in a step")  # fmt: skip
    if train.cut:
        lines.append(f"{count(train.cut)} records are longer than {most} tokens and are cut to that (--max-length); one "
                     "record stays one sample")  # fmt: skip
    short = sum(train.length(i) < 2 for i in range(len(train))) if options.task == "lm" else 0
    if short:
        lines.append(f"{count(short)} records have one token only, and nothing to predict")
    return lines + data.said


# ---------------------------------------------------------------------- the folder


def _is_begun(out: Path) -> bool:
    return (out / "journal.jsonl").exists() or (out / OPTIONS).exists()


def _stated(options: Namespace) -> dict[str, Any]:
    """Options as they are kept in the folder and compared when the run is resumed."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
            if name not in ("command", "resume", "dry_run", "out")}  # fmt: skip


def _check_out(options: Namespace) -> None:
    """--out is new, empty, or the run that --resume goes on with. Raises FinetuneError."""
    out: Path = options.out
    if out.exists() and not out.is_dir():
        raise FinetuneError(f"--out {out} is a file: give a folder")
    if not options.resume:
        if _is_begun(out):
            raise FinetuneError(
                f"{out} holds a run already: go on with it by --resume, or give another --out. (A second run on the same "
                "data spends a second budget.)"
            )
        if out.exists() and any(out.iterdir()):
            raise FinetuneError(f"{out} is not empty: give another --out")
        return
    if not _is_begun(out):
        raise FinetuneError(f"there is no run in {out} to resume: check --out, or leave --resume out")
    try:
        before = json.loads((out / OPTIONS).read_text())
    except (OSError, ValueError):
        return  # the journal compares the plan, and the keys' file the data
    now = _stated(options)
    changed = [name for name in now if name not in _FREE and before.get(name) != json.loads(json.dumps(now[name]))]
    if changed:
        lines = "\n".join(f"  --{name.replace('_', '-')}: was {_shown(before.get(name))}, now {_shown(now[name])}"
                          for name in changed)  # fmt: skip
        raise FinetuneError(
            f"the run in {out} was begun with other options:\n{lines}\nResume it with the same ones, or begin another in "
            "another --out"
        )


def _shown(value: Any) -> str:
    return "not given" if value is None else ",".join(value) if isinstance(value, list) else str(value)


def how_to_resume(options: Namespace) -> str:
    """The command that goes on with the run."""
    words = [f"'{word}'" if any(c in word for c in " *'\"$") else word for word in sys.argv[1:] if word != "--resume"]
    return f"Go on with: python -m fastdp {' '.join(words)} --resume"


# ---------------------------------------------------------------------- the run


def train(ready: Prepared) -> int:
    """Run the job, write the outputs; the exit code."""
    from .training import run

    options = ready.options
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / OPTIONS).exists():
        with new_file(options.out / OPTIONS) as file:
            file.write((json.dumps(_stated(options), indent=2) + "\n").encode())
    progress = Progress(options.out, options.epsilon, options.resume)
    ready.job.log = progress
    print("\ntraining", flush=True)
    if ready.evaluation is not None and not options.resume:
        progress.evaluated({"step": 0, "epsilon": 0.0, **ready.evaluation(ready.model)})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = run(ready.job, options.resume)
    finally:
        progress.close()
    if outcome.status == "interrupted":
        print(f"\nInterrupted after step {outcome.steps} of {ready.plan.steps}, all of it saved; epsilon {outcome.epsilon:.3f} "
              f"spent.\n{how_to_resume(options)}")  # fmt: skip
        return 130
    _finish(ready, progress, outcome)
    return 0


def _finish(ready: Prepared, progress: Progress, outcome: Outcome) -> None:
    """Write the outputs and say where they are."""
    options, data = ready.options, ready.data
    trained, total = announce.trained_of(ready.model)
    card = make_card(
        model=options.model, task=options.task, plan=ready.plan, outcome=outcome, target=options.epsilon,
        trained=f"{count(trained)} of {count(total)} parameters", group=options.group_by,
        evaluated="" if data.held_out is None else "file" if options.eval else "split",
        labels="" if data.names is None else "given" if data.public_labels else "data", adapters=bool(options.lora),
    )  # fmt: skip
    found = None if ready.evaluation is None else ready.evaluation.last
    lines = write_outputs(options.out, ready.model, ready.tokenizer, progress, card, options.task, found)
    with new_file(options.out / "plan.txt") as file:
        file.write((announce.said(ready.sections) + "\n\n" + ready.routes + "\n").encode())
    head = f"epsilon {card.epsilon:.3f} at delta {card.delta:g} after {count(outcome.steps)} steps"
    if not card.guaranteed:
        head += " would be the guarantee without --seed; with it there is none"
    if outcome.status == "budget":
        head += (
            f"; {count(ready.plan.steps - outcome.steps)} steps fewer than planned, as those lost had spent their share"
        )
    print(f"\ndone: {head}")
    if outcome.nonfinite:
        print(f"{count(outcome.nonfinite)} gradients of records were not finite and were left out")
    print(f"written to {options.out}:")
    for line in [*lines, "plan.txt          what was said above, and the route of every use of a weight"]:
        print(f"  {line}")
