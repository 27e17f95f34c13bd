"""Whether padding counts: what is said of batches that are padded to their longest record."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..batch_axis.inputs import nested_tensors
from ..errors import FastDPError
from .collating import FAILS, first_line, may_be_padded, trimmed
from .records import Records
from .report import VerifyReport
from .state import evaluating

if TYPE_CHECKING:
    from .examine import Examination

REMEDY = (
    "clipping does not bound it. Take means over each record's own length, give attention its padding mask and "
    "recurrent layers packed sequences (pack_padded_sequence), or pad all records to one length that does not depend "
    "on the batch."
)


def judge_padding(work: Examination, report: VerifyReport, once: str) -> None:
    """Add what batches of the records' own lengths say. once: why collate_fn is run only once, if so."""
    if report.problem:
        if work.anew is not None and work.base.makes is not None and report.parameters:
            _explain(work, report)
        return
    if once:
        report.not_looked_at.append(f"batches that collate_fn makes of other records: it {once}, so it was run once")
    if work.judged_anew:
        report.looked_at.append("each batch collated by itself")
        return
    found = work.anew or _cut(work)
    if found is None:
        if may_be_padded(work.pool):
            report.not_looked_at.append(
                "padding, if there is some in this collated batch: give the data set, or the records and collate_fn"
            )
        return
    drew = work.last_draws() is not None
    try:
        with evaluating(work.model) if drew else contextlib.nullcontext():
            look = _looked_at(work, *found)
    except FastDPError as error:
        report.not_looked_at.append(f"padding: {type(error).__name__}: {first_line(error)}")
        return
    where = "in eval mode, " if drew else ""
    if work.failed:
        report.not_looked_at.append(f"padding: the program takes no batch of another length ({work.failed})")
    elif work.last_draws() is not None:
        report.not_looked_at.append("padding, and other lengths: the program draws random numbers, in eval mode too")
    elif not look.problem:
        report.looked_at.append(f"{where}batches as long as their longest record: padding does not count")
    else:
        report.coupling = max(report.coupling, look.worst())
        report.problem = f"{where}{_counts(look.worst())}"
        if work.anew is None:
            report.problem += (
                " Padding is what the shorter records of this batch end in. If batches have this length whatever the "
                "records in them, give verify the data set, or the records and collate_fn, instead of a collated batch."
            )


def _looked_at(work: Examination, base: Records, pool: Records) -> VerifyReport:
    """Samples in batches of their own lengths; only the longer ones, where the program takes no shorter."""
    sizes = [sum(t.numel() for t in nested_tensors(base.of([sample]).batch)) for sample in range(base.samples)]
    longest = sorted(range(base.samples), key=lambda sample: -sizes[sample])
    for count in dict.fromkeys([base.samples, max(base.samples // 2, 2), max(base.samples // 4, 2)]):
        work.failed = ""
        chosen = base if count == base.samples else base.of(longest[:count])
        look = work.attempt(attributes=False, on=(chosen, pool))
        if not work.failed or len({sizes[sample] for sample in longest[: max(count // 2, 2)]}) == 1:
            break
    return look


def _cut(work: Examination) -> tuple[Records, Records] | None:
    """Samples of a collated batch without their padding, the longest and the shortest among them."""
    if (found := trimmed(work.pool)) is None:
        return None
    pool, lengths = found
    ends = [pool.numbers[lengths.index(max(lengths))], pool.numbers[lengths.index(min(lengths))]]
    samples = list(dict.fromkeys([*ends, *work.base.names]))[: max(work.base.samples, 2)]
    return pool.of(samples), pool


def _explain(work: Examination, report: VerifyReport) -> None:
    """Whether the fault is in how batches are made: with all records in one batch's form there is none."""
    base, pool = work.base, work.pool
    whole = pool.made_by(None)
    try:
        if work.attempt(attributes=False, on=(whole.of(base.names), whole)).problem:
            return
    except FAILS:
        return
    forms = [[t.shape[1:] for t in nested_tensors(each.batch)] for each in (base.of([i]) for i in range(base.samples))]
    if any(form != forms[0] for form in forms):
        report.problem = _counts(report.worst())
        return
    report.problem = (
        f"collate_fn makes of a record something else among other records than alone: its gradient is "
        f"{report.worst():.1e} off its own, so it depends on the other samples, and clipping does not bound it. Let "
        "collate_fn only stack or pad the records."
    )


def _counts(off: float) -> str:
    return (
        f"padding counts: a sample's gradient is {off:.1e} off its own in a batch that is padded to a longer record, "
        f"so it depends on the other samples, and {REMEDY}"
    )
