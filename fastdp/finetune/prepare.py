"""Everything that can be found out before the first step: data, model, plan, what it will take."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..errors import BatchReadWarning, StepError
from ..losses.language_model_head import FusedHead
from ..utils.formatting import count, listed, many
from ..verification.state import evaluating
from . import preflight
from .batch_size import Fit, fit
from .encode import Collate, accepted, digest, encode, inputs_of, longest, padding
from .figures import Evaluation
from .images import Images, load_images
from .losses import losses_of, reference_of
from .models import (
    RELOAD,
    choose_trained,
    known_labels,
    load_config,
    load_model,
    load_tokenizer,
    new_parameters,
    read,
    silence,
    transformers,
)
from .options import BETA, PER_PERSON
from .outputs import of_data
from .plan import FinetuneError, Job, make_plan, privacy_lines
from .processes import own_device, started
from .records import Data, load_data
from .tables import refuse_absent
from .tasks import TASKS, one_answer

EVALUATED_AT_ONCE = 32


@dataclass
class Prepared:
    """All that the run needs, and what was said of it.

    files: {name: SHA-256} of DATA. routes: the engine's plan, as a table. units: records, or persons. replaced: layers
    that mixed samples, so that the result is loaded with make_compatible.
    """

    job: Job
    data: Data
    files: dict[str, str]
    tokenizer: Any
    units: int
    replaced: bool
    sections: dict[str, list[str]] = field(default_factory=dict)
    routes: str = ""


def prepare(options: Namespace) -> Prepared:
    """Read, check and measure everything, change nothing on the disk."""
    silence()
    device, pictures = _device(options.device), options.task == "images"
    # the first weights of a new head are no secret, and must be the same again when a killed run is taken up
    torch.manual_seed(options.seed or 0)
    for path in filter(None, (options.data, options.eval)):
        refuse_absent(path, folder=pictures)
    settle(options)
    known = known_labels(load_config(options.model)) if TASKS[options.task].names else None
    data, files = (load_images if pictures else load_data)(options, known), of_data(options.data)
    auto = transformers().AutoImageProcessor if pictures else None
    tokenizer = read("image processor (preprocessor_config.json)", options.model, auto) if pictures else (
        load_tokenizer(options.model)
    )  # fmt: skip
    notes = [] if pictures or not (words := padding(tokenizer)) else [words]
    model, new, more = load_model(options.model, options.task, data.names, options.dtype)
    train, held_out, collate, most = _encoded(options, data, model, tokenizer, device)
    model, adapted = choose_trained(model.to(device), new, options)
    model.to(device)
    notes = [*more, *notes, *adapted]
    new = new_parameters(model, new)
    if options.new_lr is not None and not new:
        notes.append("Note: --new-lr has no effect, as every trained weight is pre-trained")
    units = len(train) if data.groups is None else len(set(data.groups))
    fused = _fused(options, model, collate([train[0]]), device) if options.fused_loss else None
    losses, lengths = losses_of(model, options.task, options.beta, fused), [1] * len(train)
    job = Job(options, make_plan(options, units), model, losses, train, collate, lengths, data.groups, new=new)
    job.fingerprint = {"data (training records)": digest(data.train)}
    if not pictures:
        job.lengths, job.fingerprint["tokens"] = list(train["length"]), digest(train["input_ids"])
    if held_out is not None:
        low, high = options.label_range or (-1.0, 1.0)
        job.evaluate = Evaluation(
            held_out, collate, options.task, EVALUATED_AT_ONCE, fused, data.names, (high - low) / 2
        )
    ready = Prepared(job, data, files, tokenizer, units, any(RELOAD in note for note in notes))
    ready.sections = {
        "model": _model_lines(options, model, notes), "data": _data_lines(job, data, held_out, most, units),
        "privacy": privacy_lines(job.plan, options, units),
    }  # fmt: skip
    _measure(ready)
    return ready


def _encoded(options: Namespace, data: Data, model: nn.Module, tokenizer: Any, device: torch.device) -> Any:
    """(records to train on, held-out records or None, what collates them, the largest number of tokens)."""
    settings: Any = model.config
    if options.task == "images":
        held_out = Images(data.held_out, tokenizer) if data.held_out else None
        return Images(data.train, tokenizer), held_out, transformers().default_data_collator, 0
    if one_answer(options.task) and getattr(settings, "pad_token_id", None) is None:
        settings.pad_token_id = tokenizer.pad_token_id
    if options.label_range:  # who loads the model must know what 1 stands for
        settings.label_range = list(options.label_range)
    most = longest(model, tokenizer, options.task, options.max_length)
    multiple = max(8, -(-most // 8)) if options.graphed else None  # few shapes are recorded
    most -= most % multiple if multiple and most > multiple else 0  # no batch may be wider than the model takes
    collate, found = Collate(tokenizer, model, options.task, multiple), []
    for records, sort in ((data.train, data.groups is None), (data.held_out, True)):  # a person's stay together
        rows = encode(records, tokenizer, model, options.task, most, sort) if records else None
        if rows is not None and options.task == "preference":
            model.to(device)
            rows = rows.add_column("reference", reference_of(model, rows, collate, EVALUATED_AT_ONCE, device))
        found.append(rows)
    return *found, collate, most


def settle(options: Namespace) -> None:
    """Options that would have no effect are refused before anything is loaded. Raises FinetuneError."""
    task, given = options.task, {name for name, value in vars(options).items() if value not in (None, False)}
    only = {"label_range": "regression", "target_column": "seq2seq", "prompt_column": "preference",
            "chosen_column": "preference", "rejected_column": "preference", "fused_loss": "lm"}  # fmt: skip
    other = {("lm", "label_column"): "leave it out", ("seq2seq", "label_column"): "give --target-column",
             ("preference", "label_column"): "give --chosen-column", ("seq2seq", "graphed"): "leave it out",
             ("preference", "text_column"): "give --prompt-column",
             ("preference", "graphed"): "leave it out"}  # fmt: skip
    problems = [
        ("max_records_per_group" in given and "group_by" not in given,
         "--max-records-per-group goes with --group-by COLUMN, which says whose a record is"),
        ("eval" in given and options.eval_fraction,
         "--eval and --eval-fraction: the records held out of DATA would be neither trained on nor evaluated on. Leave "
         "one of the two out"),
        ("graphed" in given and given & {"group_by", "fused_loss"},
         "--graphed goes with neither --group-by nor --fused-loss: leave one out"),
        ("graphed" in given and started()[1] > 1,
         "--graphed works in one process: leave it out, or start the command without torchrun"),
        (task != "preference" and options.beta != BETA, f"--beta goes with --task preference, not with --task {task}"),
    ]  # fmt: skip
    problems += [(name in given and task != of, f"{_flag(name)} goes with --task {of}, not with --task {task}")
                 for name, of in only.items()]  # fmt: skip
    problems += [(name in given and task == of, f"{_flag(name)} does not go with --task {of}: {remedy}")
                 for (of, name), remedy in other.items()]  # fmt: skip
    for wrong, why in problems:
        if wrong:
            raise FinetuneError(why)
    if options.group_by is not None and options.max_records_per_group is None:
        options.max_records_per_group = PER_PERSON


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _fused(options: Namespace, model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> FusedHead:
    """The head and the loss as one function, checked. Raises FinetuneError."""
    try:
        found = FusedHead(model)
        inputs = inputs_of({name: value.to(device) for name, value in batch.items()}, accepted(model))
        with evaluating(model):
            found.check(model, inputs, 1e-4 if options.dtype == "float32" else 3e-2)
    except StepError as problem:
        raise FinetuneError(f"--fused-loss: {problem}") from None
    return found


def _measure(ready: Prepared) -> None:
    """verify, the engine's plan, physical batch, time, memory, disk: into the sections, and the job."""
    job, options, plan = ready.job, ready.job.options, ready.job.plan
    ready.sections["check"] = [preflight.check(job)]
    warnings.simplefilter("ignore", BatchReadWarning)  # the check has passed, on padded records and on others
    found = _with_persons(fit(job), job)
    job.physical, job.keep_physical = found.size, options.max_physical_batch_size is None
    short, ready.routes = preflight.routes(job, min(found.size, len(job.data)))
    size = started()[1]
    if size > 1:
        ready.sections["processes"] = [f"{size} share each step; the sizes below are of the first"]
    records = plan.expected_batch_size * len(job.data) / ready.units / size  # in a step
    needed = preflight.disk_needed(job.model, bool(options.lora))
    ready.sections |= {
        "plan": [short], "memory": [preflight.memory_line(found)],
        "time": [preflight.time_line(found, records, plan.steps)], "disk": [preflight.check_disk(options.out, needed)],
    }  # fmt: skip


def _with_persons(found: Fit, job: Job) -> Fit:
    """A physical batch holds all of a person's records. Raises FinetuneError where it cannot."""
    if job.groups is None:
        return found
    most = min(max(Counter(job.groups).values()), job.options.max_records_per_group)
    if found.size < most and found.limit == "speed":
        return replace(found, size=most, bytes=found.bytes * most // found.size)
    if found.size < most:
        raise FinetuneError(
            f"{found.size} records fit at once ({preflight.LIMITS[found.limit]}), but a person's records in a step, up "
            f"to {most}, must be in memory together: give --max-records-per-group {found.size} or fewer"
        )
    return found


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


def _data_lines(job: Job, data: Data, held_out: Any, most: int, units: int) -> list[str]:
    options = job.options
    columns = ", ".join(f"{what} {name!r}" for what, name in data.columns.items())
    lines = [f"{count(len(job.data))} records of {options.data} to train on, columns {columns}"]
    if held_out is None:
        lines.append("no record is held out, so nothing is evaluated")
    elif options.eval is not None:
        lines.append(f"{count(len(held_out))} records of {options.eval} to evaluate on")
    else:
        what = "the person's key" if options.group_by else "each one's " + ("file" if most == 0 else "text")
        lines.append(f"{many(len(held_out), 'other')} held out to evaluate on, chosen by a hash of {what}")
    if data.names is not None:
        whence = "as given" if data.public else "found in the data, --labels states them"
        lines.append(f"{len(data.names)} labels ({whence}): {listed(data.names, 8)}")
    if options.group_by:
        lines.append(f"{count(units)} persons by {options.group_by!r}: a person's records are clipped as one sample, "
                     f"at most {options.max_records_per_group} of them in a step")  # fmt: skip
    cut = sum(len(ids) >= most for ids in job.data["input_ids"]) if most else 0
    if cut:
        lines.append(f"{many(cut, 'record')} of {most} tokens: what is longer is cut (--max-length); one record stays "
                     "one sample")  # fmt: skip
    return lines + data.said
