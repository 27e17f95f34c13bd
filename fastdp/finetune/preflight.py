"""What a run will do, found out and said before it does it: check, plan, noise, time, memory, disk."""

from __future__ import annotations

import contextlib
import math
import shutil
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from ..accounting import delta_problem, epsilon_of, noise_multiplier_for, steps_per_epoch
from ..errors import AccountingError, ClippingError, FastDPError
from ..optim.adaptive_clipping import Quantile
from ..optim.privatize import privatize
from ..utils.formatting import at_most, count, duration, size
from ..verification.verify import verify
from .batch_size import Fit
from .card import weaknesses
from .options import default_batch, default_delta
from .plan import FinetuneError, Job, Plan
from .tasks import TASKS

NEW_LR = 5e-3  # of a new head: it has everything to learn, the weights below it little
CHECKED = 4  # records that verify compares with one-sample truth
_CHECKPOINTS = 3  # two are kept, while a third is written


def make_plan(options: Namespace, units: int) -> Plan:
    """Sample rate, steps and noise of a budget. units: records, or persons. Raises FinetuneError if there is none."""
    batch = options.batch_size or default_batch(units)
    rate = batch / units
    steps = math.ceil(options.epochs * steps_per_epoch(rate))
    delta = options.delta if options.delta is not None else default_delta(units)
    if problem := delta_problem(delta, units, "person" if options.group_by else "record"):
        raise FinetuneError(f"{problem}. Leave --delta out for {default_delta(units):g}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            noise = noise_multiplier_for(target_epsilon=options.epsilon, delta=delta, sample_rate=rate, steps=steps,
                                         accountant=options.accountant)  # fmt: skip
    except AccountingError as problem:
        raise FinetuneError(f"epsilon {options.epsilon:g} cannot be reached: {problem}") from None
    if options.clipping == "adaptive":
        try:
            Quantile().of_gradients(noise, batch)
        except ClippingError:
            raise FinetuneError(
                f"--clipping adaptive counts with noise of {batch / 20:g}, a twentieth of the batch: too little beside "
                f"a noise multiplier of {noise:.3g}: give --batch-size {math.ceil(20 * noise)} or more, a larger "
                "--epsilon, or another --clipping"
            ) from None
    lr = options.lr or (3e-3 if options.lora or options.train_only else TASKS[options.task].lr)
    return Plan(
        noise_multiplier=noise, sample_rate=rate, expected_batch_size=batch, steps=steps, lr=lr,
        new_lr=options.new_lr or max(lr, NEW_LR),
        delta=delta, target_epsilon=options.epsilon, max_grad_norm=options.max_grad_norm, clipping=options.clipping,
        weight_decay=options.weight_decay, accountant=options.accountant, seed=options.seed,
        max_records_per_group=options.max_records_per_group if options.group_by else None,
        max_physical_batch_size=options.max_physical_batch_size, checkpoint_steps=options.checkpoint_every,
    )  # fmt: skip


def check(job: Job) -> str:
    """fastdp.verify on a few records, short to long; a line to say. Raises FinetuneError."""
    total = len(job.data)
    by_length = sorted(range(total), key=job.length)
    spread = {by_length[k * (total - 1) // (CHECKED - 1)] for k in range(CHECKED)}  # short and long: padded and not
    params = [p for p in job.model.parameters() if p.requires_grad]
    try:
        with warnings.catch_warnings(), _without_zeros(params):
            warnings.simplefilter("ignore")
            found = verify(job.model, job.loss, job.batch(sorted(spread)), params=params, samples=CHECKED)
    except FastDPError as problem:
        raise FinetuneError(
            f"this model cannot be trained privately as it is:\n{problem}\nNo option of this command changes that: "
            "take another model, in which no record reads another, or another's padding"
        ) from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as problem:
        if isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem):
            raise
        words = (str(problem).strip() or "no message").splitlines()[0][:240]
        raise FinetuneError(f"the model fails on the first records: {type(problem).__name__}: {words}") from problem
    line = (
        f"fastdp.verify on {found.samples} records: exact, each one's gradient is its own (relative errors: norms "
        f"{found.norm_error:.0e}, sum {found.sum_error:.0e}, influence of other records {found.coupling:.0e})"
    )
    if found.rounding is not None:
        line += (
            f"\nthe same in float64: within 1e-4; float32 itself is {found.rounding:.0e} off here, without privacy too"
        )
    return line


@contextlib.contextmanager
def _without_zeros(params: list[torch.nn.Parameter]) -> Iterator[None]:
    """Small numbers in place of parameters that are zero: what lies behind zeros has no gradient to compare (LoRA's
    first factors at the start, a body behind a new head)."""
    zeros = [p for p in params if not p.any()]
    numbers = torch.Generator().manual_seed(0)  # the run's own generators stay as they are
    try:
        with torch.no_grad():
            for p in zeros:
                p.copy_(torch.randn(p.shape, generator=numbers) * 0.02)
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()


def routes(job: Job, rows: int) -> tuple[str, str]:
    """(a line, the whole table) of how the engine computes norms and sums: one backward without a step."""
    model = job.model
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = privatize(torch.optim.SGD(params, lr=0.0), model, noise_multiplier=0.0, expected_batch_size=1)
    training = model.training
    model.train()
    try:
        job.loss(model, job.batch(range(rows))).backward()
        text = optimizer.explain()
    finally:
        optimizer.zero_grad()
        optimizer.detach()
        model.train(training)
    lines = text.splitlines()
    at = lines[0].index("route"), lines[0].index("units")
    kinds = Counter(line[slice(*at)].strip() for line in lines[1:] if len(line) > at[1])
    uses, _, held = lines[-1].partition(", ")
    ways = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return f"{uses} of weights, their norms by {ways}; {held} of {rows} records", text


def trained_of(model: nn.Module) -> tuple[int, int]:
    """(trained parameters, all of them)."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


def disk_needed(model: nn.Module, adapters: bool) -> int:
    """Bytes that the run writes: checkpoints (weights or adapters, two moments of Adam) and the model."""
    moments = sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not adapters)
    return _CHECKPOINTS * (moments + whole) + whole + 4_000_000


LIMITS = {
    "memory": "as many as fit",
    "speed": "more at once would not be faster",
    "batch": "the whole of any likely batch",
    "time": "the most that was tried",
    "given": "as given",
}


def memory_line(found: Fit) -> str:
    """The physical batch size, why it is that, and what it takes."""
    return f"{count(found.size)} records at once ({LIMITS[found.limit]}): about {size(found.bytes)} beside the model"


def time_line(found: Fit, records: float, steps: int) -> str:
    """An estimate, evaluations left out. records: expected in a step."""
    step = records * found.seconds_per_sample + found.seconds_per_step
    each = f"{step:.1f} s" if step >= 1 else f"{1000 * step:.0f} ms"
    return f"about {duration(steps * step)}: {each} a step, {count(steps)} steps (evaluations not counted)"


def check_disk(out: Path, needed: int) -> str:
    """A line on the space there is; raises FinetuneError where it does not suffice."""
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FinetuneError(
            f"the run needs {size(needed)} in {out} (model and checkpoints), and {size(free)} are free: free "
            f"{size(needed - free)}, or give --out on another disk"
        )
    return f"{size(needed)} needed for the model and checkpoints, {size(free)} free"


def privacy_lines(plan: Plan, options: Namespace, units: int) -> list[str]:
    """The guarantee, the noise and the sampling."""
    unit = "person" if options.group_by else "record"
    spent = epsilon_of([(plan.noise_multiplier, plan.sample_rate, plan.steps)], plan.delta, plan.accountant)
    whence = "1/(10 n), rounded down" if options.delta is None else "as given"
    lines = [
        f"epsilon {at_most(spent, 4)} at delta {at_most(plan.delta, 6)} ({whence}), for one {unit} added or removed, "
        f"by the {plan.accountant.upper()} accountant",
        f"noise multiplier {plan.noise_multiplier:.3f}; clipping {plan.clipping}, norm {plan.max_grad_norm:g}",
        f"Poisson sampling: {plan.expected_batch_size:g} of {count(units)} {unit}s expected in a step (rate "
        f"{plan.sample_rate:.4g}); epochs: {options.epochs:g}, steps: {count(plan.steps)}",
    ]  # fmt: skip
    if plan.seed is not None:
        lines.append(
            f"--seed {plan.seed}: NO GUARANTEE. Whoever knows the seed can take the noise off; for experiments"
        )
    if plan.accountant == "gdp":
        lines.append("gdp is an approximation, and no upper bound on epsilon: prv is")
    lines += [f"Warning: {line}" for line in weaknesses(spent, plan.delta, units, unit)]
    if units < 100:
        lines.append(f"{units} {unit}s are very few: at this noise expect to learn little or nothing")
    return lines


def said(sections: list[tuple[str, list[str]]]) -> str:
    """Titles on the left, lines on the right."""
    width = max(len(title) for title, _ in sections) + 2
    out = []
    for title, lines in sections:
        for number, line in enumerate(part for text in lines for part in text.splitlines()):
            out.append(f"{title if number == 0 else '':<{width}}{line}")
    return "\n".join(out)
