"""What a run will do, found out and said before it does it: check, plan, noise, time, memory, disk."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from ..errors import FastDPError
from ..utils.formatting import count, duration, size
from ..verification.verify import verify
from .batch_size import Fit, engine_on
from .models import first_line
from .plan import FinetuneError, Job

CHECKED = 4  # records that verify compares with one-sample truth
_CHECKPOINTS = 3  # two are kept, while a third is written


def check(job: Job) -> str:
    """fastdp.verify on a few records, short to long; a line to say. Raises FinetuneError."""
    total = len(job.data)
    by_length = sorted(range(total), key=job.lengths.__getitem__)
    spread = {by_length[k * (total - 1) // (CHECKED - 1)] for k in range(CHECKED)}  # short and long: padded and not
    params = [p for p in job.model.parameters() if p.requires_grad]
    try:
        with warnings.catch_warnings(), _without_zeros(params):
            warnings.simplefilter("ignore")
            records = [job.data[place] for place in sorted(spread)]
            found = verify(job.model, job.loss, records, params=params, samples=CHECKED, collate_fn=job.collated)
    except FastDPError as problem:
        raise FinetuneError(
            f"this model cannot be trained privately as it is:\n{problem}\nNo option of this command changes that: "
            "take another model, in which no record reads another, or another's padding"
        ) from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as problem:
        if isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem):
            raise
        words = f"{type(problem).__name__}: {first_line(problem)}"
        raise FinetuneError(f"the model fails on the first records: {words}") from problem
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
    with engine_on(job) as optimizer:
        job.loss(job.model, job.batch(range(rows))).backward()
        text = optimizer.explain()
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
    "speed": "more at once would hardly be faster",
    "batch": "the whole of any likely batch",
    "given": "as given",
}


def memory_line(found: Fit) -> str:
    """The physical batch size, why it is that, and what it takes."""
    return f"{count(found.size)} records at once ({LIMITS[found.limit]}): about {size(found.bytes)} beside the model"


def time_line(found: Fit, records: float, steps: int) -> str:
    """An estimate, noise, updates and evaluations left out. records: expected in a step."""
    step = records * found.seconds_per_sample
    each = f"{step:.1f} s" if step >= 1 else f"{1000 * step:.0f} ms"
    return f"about {duration(steps * step)}: {each} a step, {count(steps)} steps (updates and evaluations not counted)"


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


def said(sections: Mapping[str, list[str]]) -> str:
    """Titles on the left, lines on the right."""
    width, out = max(map(len, sections)) + 2, []
    for title, texts in sections.items():
        lines = [line for text in texts for line in text.splitlines()]
        out += [f"{title if number == 0 else '':<{width}}{line}" for number, line in enumerate(lines)]
    return "\n".join(out)
