"""Examines a program: plain runs; where these differ, draws per sample, float64, and other causes of a difference."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch_axis.python_reads import PythonReads
from ..errors import FastDPError
from .collating import FAILS, first_line
from .comparison import Looked, between_equal_runs, carried, look
from .execution import Drew, Loss, Runs
from .float64 import in_double, judged_in_double, may_be_doubled
from .random_draws import SampleDraws
from .records import Records
from .report import VerifyReport
from .state import Contents, evaluating


class Examined(NamedTuple):
    """A report; and why it says nothing, if it does."""

    report: VerifyReport
    unjudged: str = ""


class Unjudged(Exception):
    """A program whose draws were replaced failed."""


def other_batches(chosen: list[int], pool: Records, sizes: list[int], seed: int) -> list[list[int]]:
    """Samples of batches of these sizes: the chosen ones in another order, with others and twice as there is room."""
    random = torch.Generator().manual_seed(seed + 1)
    others = [sample for sample in range(pool.samples) if sample not in set(chosen)]
    found = []
    for size in sizes:
        stock = chosen if size <= len(chosen) else (chosen + others) * (size // pool.samples + 1)
        stock = (
            [stock[i] for i in torch.randperm(len(stock), generator=random).tolist()] if size <= len(chosen) else stock
        )
        found.append([stock[i] for i in torch.randperm(size, generator=random).tolist()])
    return found


class Examination:
    """A program, and the samples that it is examined on."""

    def __init__(self, model: nn.Module, loss_fn: Loss, params: list[Tensor] | None, reduction: str, tolerance: float,
                 judged: bool, options: dict[str, Any], seed: int, averages: Contents) -> None:  # fmt: skip
        self.model, self.tolerance, self.seed, self.options = model, tolerance, seed, options
        self._doubles = may_be_doubled(model)
        self._judged = judged and self._doubles  # whether float64 may excuse float32
        self._program = (model, loss_fn, params, reduction, options, seed, averages)
        self.runs = Runs(*self._program)  # the last that were made
        self._first = self.runs
        self._reads: list[PythonReads] = []

    def in_rows(self, pool: Records) -> Records:
        """The records, where the engine's options make one sample of several of them."""
        size, rows = len(pool.numbers), int(self.options.get("rows_per_sample", 1))
        if self.options.get("batch_size") is not None:  # of a batch as it was given
            rows = max(size // int(self.options["batch_size"]), 1)
        elif rows > 1 and (size < rows or self.runs.counted(pool.of(range(rows))) == rows):
            rows = 1  # the program makes the rows itself, of one record each
        if rows == 1:
            return pool
        if pool.grouped:
            raise ValueError("verify takes group_by=, or several rows of each sample, not both")
        if size % rows:
            raise ValueError(f"{size} records are no multiple of the {rows} rows of a sample")
        return pool.folded(rows)

    def choose(self, pool: Records, samples: list[int], sizes: list[int]) -> None:
        """Compare these samples, in one batch and in others of these sizes."""
        self.pool = pool
        self.base = pool if samples == list(range(pool.samples)) else pool.of(samples)
        self.others = other_batches(samples, pool, sizes, self.seed)
        self.anew = None if pool.makes is None else (self.base, pool)  # where each batch is made by itself
        self.judged_anew, self.failed = False, ""

    def harmless(self) -> None:
        """Nothing is wrong: of what Python read of the batch, nothing need be warned."""
        for reads in self._reads:
            reads.harmless()

    # ------------------------------------------------------------------ one look

    def examine(self, words: str) -> Examined:
        """All that is looked at with the model's modules as they are now."""
        self._reads_now: list[PythonReads] = []
        unjudged = ""
        try:
            report = self.attempt()
            if self._fails(report):
                report, unjudged = self._again(report)
        except Unjudged as problem:
            return Examined(VerifyReport(self.base.samples, 0.0, 0.0, 0.0, self.tolerance), str(problem))
        if unjudged:
            return Examined(report, unjudged)
        if report.ok:
            self._after_others(report)
        report.looked_at += [words] if words else []
        if (draws := self.runs.draws) is not None and draws.seen:
            where = "; ".join([*draws.seen][:4]) + ("; ..." if len(draws.seen) > 4 else "")
            report.looked_at.append(f"random draws at one seed, made sample by sample: {where}")
        if self.runs.outside:
            names = " and ".join(self.runs.outside)
            report.looked_at.append(f"what {names} draws after one seed, the same in every batch")
        if report.ok:
            self._reads += self._reads_now
        return Examined(report)

    def _fails(self, report: VerifyReport) -> bool:
        """Whether gradients were compared, and differ."""
        return bool(report.problem and report.parameters)

    def _again(self, report: VerifyReport) -> tuple[VerifyReport, str]:
        """A report of gradients that differ, or of a second look; and why it says nothing, if it does."""
        if self.runs.draws is None:  # it may draw by generators of its own, which torch's own does not show
            first = self.runs
            with contextlib.suppress(Unjudged):
                second = self.attempt(drawn=True)
                if self.runs.draws is not None and self.runs.draws.seen:
                    report, first = second, self.runs
            self.runs = first
        if not self._fails(report):
            return report, ""
        if (apart := self._apart()) > self.tolerance:
            return report, _unrepeated(apart, self._out_of_reach())
        if unjudged := self._out_of_reach():
            return report, unjudged
        if self._draws_in_another_order():
            return report, (
                "it puts the samples of a batch into another order and then draws random numbers by their places, so a "
                "sample cannot be given the same draws alone. Verify it in eval mode, or sort within collate_fn"
            )
        return report, ""

    def attempt(self, drawn: bool = False, on: tuple[Records, Records] | None = None) -> VerifyReport:
        """In the model's own precision, and in float64 where that could not tell.

        drawn: with draws made sample by sample from the first; on: samples and pool, if others than those that are
        examined, in no other batches.
        """
        others = self.others if on is None else []
        base, pool = on or (self.base, self.pool)
        report, truth = self._looked(base, pool, drawn, others)
        if self._fails(report) and self._judged:
            wide, wide_pool = base.doubled(), pool.doubled()
            repeat = lambda: self._looked(wide, wide_pool, drawn, others)
            some = lambda samples: self._looked(base.of(samples), pool, drawn, [])
            report.problem, report.rounding = judged_in_double(report, truth, self.model, repeat, some)
        return report

    def _looked(self, base: Records, pool: Records, drawn: bool, others: list[list[int]]) -> Looked:
        self._first.put_back()
        runs = self.runs = Runs(*self._program)
        try:
            if not drawn:
                looked = look(runs, base, [pool.of(samples) for samples in others], self.tolerance)
                self.judged_anew = self.judged_anew or base.makes is not None
                return looked
        except Drew:
            runs.put_back()
            base, pool = self._in_one_length(base, pool, "")
        except FAILS as error:
            if base.makes is None or isinstance(error, FastDPError):
                raise
            base, pool = self._in_one_length(base, pool, f"{type(error).__name__}: {first_line(error)}")
            return self._looked(base, pool, drawn, others)
        finally:
            self._reads_now += runs.reads
        return self._looked_with_draws(runs, base.in_order(), [pool.of(samples) for samples in others])

    def _looked_with_draws(self, runs: Runs, base: Records, probes: list[Records]) -> Looked:
        """Where each sample draws its own numbers, alone as in a batch: several rows one after the other, or apart."""
        looked: list[Looked] = []
        for minor in (False, True):
            runs.draws, runs.hidden = SampleDraws(self.model, minor), False
            try:
                looked.append(look(runs, base, probes, self.tolerance))
            except FastDPError:
                raise
            except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
                raise Unjudged(
                    "it draws random numbers, and fails where they are drawn sample by sample "
                    f"({type(error).__name__}: {error})"
                ) from error
            finally:
                runs.draws.put_back()
                self._reads_now += runs.reads
            if looked[-1].report.ok:
                return looked[-1]
            if not runs.draws.several:
                break
        return looked[0]

    def _in_one_length(self, base: Records, pool: Records, failed: str) -> tuple[Records, Records]:
        """From now on all records as they are in the batch of all of them, where batches were made anew.

        failed: why, where the program takes no other.
        """
        if pool.makes is None:
            return base, pool
        self.failed, self.pool = failed, self.pool.made_by(None)
        self.base, pool = self.pool.of(self.base.names), pool.made_by(None)
        return pool.of(base.names), pool

    # ------------------------------------------------------------------ what else may be the cause

    def _draws_in_another_order(self) -> bool:
        """Whether the program draws, and in eval mode draws nothing, is exact, and puts the samples into another order.

        The draws of a sample are then not in its place.
        """
        last = self.runs
        if last.draws is None:
            return False
        try:
            with evaluating(self.model):
                report = self.attempt(on=(self.base, self.pool))
            return report.ok and self.runs.draws is None and self.runs.reordered
        except FAILS:
            return False
        finally:
            self.runs = last

    def _apart(self) -> float:
        """How far equal runs are apart, in float64 if that can be; 0 where that cannot be told."""
        last, base = self.runs, self.base if self.runs.draws is None else self.base.in_order()
        last.put_back()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(Drew, RuntimeError, TypeError, ValueError))
            if self._doubles:
                stack.enter_context(in_double(self.model))
            runs = Runs(*self._program)
            runs.draws = last.draws
            return between_equal_runs(runs, base.doubled() if self._doubles else base)
        return 0.0

    def _out_of_reach(self) -> str:
        """Draws of the last runs that could not be made sample by sample, in words."""
        runs = self.runs
        where = [] if runs.draws is None else [*runs.draws.unjudged]
        where += [f"{name}, outside of torch" for name in runs.outside]
        where += ["torch's generator, by compiled code or an extension"] if runs.hidden else []
        if not where:
            return ""
        return (
            "it draws random numbers that cannot be drawn sample by sample, so a batch cannot be compared with one "
            f"sample at a time: {'; '.join(where[:5])}. Draw them by torch in the forward or "
            "the loss, a row for each sample; or verify the program with these draws switched off"
        )

    def _after_others(self, report: VerifyReport) -> None:
        """What the model keeps from one batch to the next, in its buffers and attributes."""
        moved = self.runs.moved
        if not moved:
            return
        off = carried(self.runs, self.base.in_order())
        names = ", ".join(f"'{name}'" for name in moved[:5])
        if off <= max(self.tolerance, 10 * (report.rounding or 0.0)):
            report.looked_at.append(
                f"state that a forward changes ({names}): it carries nothing to the next batch here"
            )
            return
        report.coupling = max(report.coupling, off)
        report.problem = (
            f"a sample's gradient depends on the samples of earlier batches, by {off:.1e}: the forward writes data "
            f"into {names}, and reads it in the next. Clipping bounds nothing of that: freeze it while training, or "
            "compute it from public data."
        )


def _unrepeated(apart: float, out_of_reach: str) -> str:
    if not math.isfinite(apart):
        return (
            "the loss or the gradient of these records is not finite (inf or NaN), so there is nothing to compare "
            "with. Find what overflows in the model (it may do so in float64 alone, at masks of the smallest number), "
            "or verify it in the dtype that it is trained in"
        )
    return (
        f"two equal runs of it give gradients that are {apart:.1e} apart, so there is nothing to compare with: "
        f"it draws random numbers that neither torch.manual_seed nor random.seed and "
        f"numpy.random.seed begin anew, or keeps a state outside of its modules from one call to the next. Make it "
        f"repeat itself, or verify it with this switched off{'; ' if out_of_reach else ''}{out_of_reach}"
    )
