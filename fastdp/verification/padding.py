"""Whether padding counts: what is said of batches that are padded to their longest record."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..batch_axis.inputs import nested_tensors
from ..errors import FastDPError
from .collating import FAILS, first_line, may_be_padded
from .report import VerifyReport
from .state import evaluating

if TYPE_CHECKING:
    from .examination import Examination

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
    if work.anew is None:
        if may_be_padded(work.pool):
            report.not_looked_at.append(
                "padding, if there is some in this collated batch: give the data set, or the records and collate_fn"
            )
        return
    drew = work.runs.draws is not None
    try:
        with evaluating(work.model) if drew else contextlib.nullcontext():
            look = work.attempt(on=work.anew)
    except FastDPError as error:
        report.not_looked_at.append(f"padding: {type(error).__name__}: {first_line(error)}")
        return
    where = "in eval mode, " if drew else ""
    if work.failed:
        report.not_looked_at.append(f"padding: the program takes no batch of another length ({work.failed})")
    elif work.runs.draws is not None:
        report.not_looked_at.append("padding, and other lengths: the program draws random numbers, in eval mode too")
    elif not look.problem:
        report.looked_at.append(f"{where}batches as long as their longest record: padding does not count")
    else:
        report.coupling = max(report.coupling, look.worst())
        report.problem = f"{where}{_counts(look.worst())}"


def _explain(work: Examination, report: VerifyReport) -> None:
    """Whether the fault is in how batches are made: with all records in one batch's form there is none."""
    base, pool = work.base, work.pool
    whole = pool.made_by(None)
    try:
        if work.attempt(on=(whole.of(base.names), whole)).problem:
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
