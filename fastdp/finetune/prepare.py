"""Everything that can be found out before the first step: data, model, plan, what it will take."""

from __future__ import annotations

import dataclasses
import warnings
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import BatchReadWarning, StepError
from ..losses.language_model_head import FusedHead
from ..utils.formatting import count, listed, many
from . import preflight
from .batch_size import Fit, fit
from .encode import Collate, Encoded, encode, inputs_of, longest, multiple_of, padding
from .evaluation import Evaluation
from .images import Images, load_images, load_processor
from .models import (
    RELOAD,
    choose_trained,
    known_labels,
    load_config,
    load_model,
    load_tokenizer,
    new_parameters,
    transformers,
)
from .options import BETA, PER_PERSON
from .plan import FinetuneError, Job, Plan
from .processes import own_device, started
from .records import Data, load_data
from .tables import refuse_absent
from .task_losses import graphed_of, losses_of, reference_of
from .tasks import TASKS, one_answer

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
    revision: str | None = None  # of the model on the hub
    tolerance: float = 1e-4  # of the check
    replaced: bool = False  # layers that mixed samples, so that the result is loaded with make_compatible


def prepare(options: Namespace) -> Prepared:
    """Read, check and measure everything, change nothing on the disk."""
    device = _device(options.device)
    # the first weights of a new head are no secret, and must be the same again when a killed run is taken up
    torch.manual_seed(options.seed or 0)
    pictures = options.task == "images"
    for path in filter(None, (options.data, options.eval)):
        refuse_absent(path, folder=pictures)
    settle(options)
    known = known_labels(load_config(options.model)) if TASKS[options.task].names else None
    data = load_images(options, known) if pictures else load_data(options, known)
    tokenizer = load_processor(options.model) if pictures else load_tokenizer(options.model)
    words = "" if pictures else padding(tokenizer)
    model, new, notes = load_model(options.model, options.task, data.names, options.dtype)
    notes = notes + ([words] if words else [])
    encoded, held_out, collate, most = _encoded(options, data, model, tokenizer)
    model.to(device)
    if options.task == "preference":
        for each in filter(None, (encoded, held_out)):
            each.add_reference(reference_of(model, each, collate, _EVALUATED_AT_ONCE, device))
    model, more = choose_trained(model, new, options)
    if options.new_lr is not None and not new_parameters(model, new):
        more.append("Note: --new-lr has no effect, as every trained weight is pre-trained")
    model.to(device)
    groups = data.train.groups
    if groups is None:  # a person's records stay together
        encoded = encoded.by_length()
    units = len(encoded) if groups is None else len(set(groups))
    plan = preflight.make_plan(options, units)
    fused = _fused(options, model, collate([encoded[0]]), device) if options.fused_loss else None
    low, high = options.label_range or (-1.0, 1.0)
    evaluation = None if held_out is None else Evaluation(
        held_out, collate, options.task, _EVALUATED_AT_ONCE, fused, data.names, (high - low) / 2
    )  # fmt: skip
    job = Job(
        model=model, losses=losses_of(model, options.task, options.beta, fused), data=encoded, collate=collate,
        plan=plan, out=options.out, length=encoded.length, groups=groups, group_by=options.group_by,
        evaluate=evaluation, new=new_parameters(model, new),
        fingerprint={"data (training records)": data.train.digest, "tokens": encoded.digest()},
    )  # fmt: skip
    if options.graphed:
        job.graphed = graphed_of(options.task, encoded, collate)
        _check_graphed(job)
    sections = [
        ("model", _model_lines(options, model, [*notes, *more])),
        ("data", _data_lines(options, data, encoded, held_out, most, units)),
        ("privacy", preflight.privacy_lines(plan, options, units)),
    ]
    ready = Prepared(options, data, model, tokenizer, encoded, evaluation, plan, job, units, sections)
    ready.replaced = any(RELOAD in note for note in notes)
    ready.revision = getattr(model.config, "_commit_hash", None)
    ready.tolerance = 5e-2 if options.dtype == "bfloat16" else 1e-4  # fastdp.verify's own
    _measure(ready)
    return ready


def _encoded(options: Namespace, data: Data, model: nn.Module, tokenizer: Any) -> tuple[Any, Any, Any, int]:
    """(records to train on, held-out records or None, what collates them, the largest number of tokens)."""
    settings: Any = model.config
    if options.task == "images":
        held_out = None if data.held_out is None else Images(data.held_out, tokenizer)
        return Images(data.train, tokenizer), held_out, transformers().default_data_collator, 0
    if one_answer(options.task) and getattr(settings, "pad_token_id", None) is None:
        settings.pad_token_id = tokenizer.pad_token_id
    if options.label_range:  # who loads the model must know what 1 stands for
        settings.label_range = list(options.label_range)
    most = longest(model, tokenizer, options.task, options.max_length)
    multiple = multiple_of(most) if options.graphed else None
    most -= most % multiple if multiple and most > multiple else 0  # no batch may be wider than the model takes
    train, other = (
        None if records is None else encode(records, tokenizer, model, options.task, most)
        for records in (data.train, data.held_out)
    )
    return train, other, Collate(tokenizer, model, options.task, multiple), most


def settle(options: Namespace) -> None:
    """Options that would have no effect are refused before anything is loaded. Raises FinetuneError."""
    if options.max_records_per_group is not None and options.group_by is None:
        raise FinetuneError("--max-records-per-group goes with --group-by COLUMN, which says whose a record is")
    if options.group_by is not None and options.max_records_per_group is None:
        options.max_records_per_group = PER_PERSON
    if options.eval is not None and options.eval_fraction:
        raise FinetuneError(
            "--eval and --eval-fraction: the records held out of DATA would be neither trained on nor evaluated on. "
            "Leave one of the two out"
        )
    if options.task == "lm" and options.label_column is not None:
        raise FinetuneError("--label-column does not go with --task lm, which learns the text itself: leave it out")
    for name, task in (("label_range", "regression"), ("target_column", "seq2seq"), ("prompt_column", "preference"),
                       ("chosen_column", "preference"), ("rejected_column", "preference")):  # fmt: skip
        if getattr(options, name) is not None and options.task != task:
            flag = "--" + name.replace("_", "-")
            raise FinetuneError(f"{flag} goes with --task {task}, not with --task {options.task}")
    instead = {("seq2seq", "label_column"): "--target-column", ("preference", "label_column"): "--chosen-column",
               ("preference", "text_column"): "--prompt-column"}  # fmt: skip
    for (task, name), flag in instead.items():
        if options.task == task and getattr(options, name) is not None:
            raise FinetuneError(f"--{name.replace('_', '-')} does not go with --task {task}: give {flag}")
    if options.task != "preference" and options.beta != BETA:
        raise FinetuneError(f"--beta goes with --task preference, not with --task {options.task}")


def _fused(options: Namespace, model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> FusedHead:
    """The head and the loss as one function, checked. Raises FinetuneError."""
    if options.task != "lm" or options.graphed:
        raise FinetuneError("--fused-loss goes with --task lm, and not with --graphed")
    training = model.training
    try:
        found = FusedHead(model)
        batch = {name: value.to(device) for name, value in batch.items()}
        found.check(model.eval(), inputs_of(model, batch), 1e-4 if options.dtype == "float32" else 3e-2)
    except StepError as problem:
        raise FinetuneError(f"--fused-loss: {problem}") from None
    finally:
        model.train(training)
    return found


def _check_graphed(job: Job) -> None:
    """Raises FinetuneError if the steps of a job cannot be replayed."""
    if started()[1] > 1:
        raise FinetuneError("--graphed works in one process: leave it out, or start the command without torchrun")
    if job.groups is not None:
        raise FinetuneError("--graphed replays batches of records, and --group-by protects persons: leave one out")
    if job.device.type != "cpu":
        raise FinetuneError(f"--graphed replays on the CPU only, and the model is on {job.device}: leave it out")


def _measure(ready: Prepared) -> None:
    """verify, the engine's plan, physical batch, time, memory, disk: into the sections, and the plan of the job."""
    job, options = ready.job, ready.options
    ready.sections.append(("check", [preflight.check(job)]))
    warnings.simplefilter("ignore", BatchReadWarning)  # the check has passed, on padded records and on others
    found = _with_persons(fit(job), ready)
    job.keep_physical = found.limit != "given"
    ready.plan = job.plan = dataclasses.replace(ready.plan, max_physical_batch_size=found.size)
    short, ready.routes = preflight.routes(job, min(found.size, len(ready.train)))
    records = ready.plan.expected_batch_size * len(ready.train) / ready.units  # in a step
    needed = preflight.disk_needed(ready.model, bool(options.lora))
    size = started()[1]
    if size > 1:
        ready.sections.append(("processes", [f"{size} share each step; the sizes below are of the first"]))
    ready.sections += [
        ("plan", [short]),
        ("memory", [preflight.memory_line(found)]),
        ("time", [preflight.time_line(found, records / size, ready.plan.steps)]),
        ("disk", [preflight.check_disk(options.out, needed)]),
    ]


def _with_persons(found: Fit, ready: Prepared) -> Fit:
    """A physical batch holds all of a person's records. Raises FinetuneError where it cannot."""
    if ready.data.train.groups is None:
        return found
    most = min(max(Counter(ready.data.train.groups).values()), ready.options.max_records_per_group)
    if found.size >= most:
        return found
    if found.limit in ("speed", "time"):
        return dataclasses.replace(found, size=most, bytes=found.bytes * most // found.size)
    raise FinetuneError(
        f"{found.size} records fit at once ({preflight.LIMITS[found.limit]}), but a person's records in a step, up to "
        f"{most}, must be in memory together: give --max-records-per-group {found.size} or fewer"
    )


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or (own_device() if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise FinetuneError(f"--device {name}: {str(problem).splitlines()[0]}") from None
    return device


def _model_lines(options: Namespace, model: nn.Module, notes: list[str]) -> list[str]:
    trained, total = preflight.trained_of(model)
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
        lines.append(f"{many(len(held_out), 'other')} held out to evaluate on, chosen by a hash of each one's text")
        if options.group_by:
            lines[-1] = lines[-1].replace("each one's text", "the person's key")
        if options.task == "images":
            lines[-1] = lines[-1].replace("each one's text", "each one's file")
    elif held_out is not None:
        lines.append(f"{count(len(held_out))} records of {options.eval} to evaluate on")
    else:
        lines.append("no record is held out, so nothing is evaluated")
    if data.names is not None:
        whence = "as given" if data.public_labels else "found in the data, --labels states them"
        lines.append(f"{len(data.names)} labels ({whence}): {listed(data.names, 8)}")
    if options.group_by:
        lines.append(f"{count(units)} persons by {options.group_by!r}: a person's records are clipped as one sample, "
                     f"at most {options.max_records_per_group} of them in a step")  # fmt: skip
    if train.cut:
        lines.append(f"{many(train.cut, 'record')} longer than {most} tokens and cut to that (--max-length); "
                     "one record stays one sample")  # fmt: skip
    short = sum(train.length(i) < 2 for i in range(len(train))) if options.task == "lm" else 0
    if short:
        lines.append(f"{count(short)} records have one token only, and nothing to predict")
    return lines + data.said
