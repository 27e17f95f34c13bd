"""The whole of an examination: plain runs, draws sample by sample, float64, attributes put back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..batch_axis.python_reads import PythonReads
from ..errors import FastDPError, SampleMixingError
from .collating import FAILS, first_line
from .draws import SampleDraws
from .looks import Looked, Probe, between_equal_runs, carried, look
from .records import Records, relabelled
from .report import VerifyReport
from .rounding import in_double, judged_in_double, may_be_doubled
from .runs import Drew, Loss, Runs
from .state import Attributes, evaluating


class Examined(NamedTuple):
    """A report; and why it says nothing, if it does."""

    report: VerifyReport
    unjudged: str = ""


class Unjudged(Exception):
    """A program whose draws were replaced failed."""


class Examination:
    """A program, and the samples that it is examined on."""

    def __init__(self, model: nn.Module, loss_fn: Loss, params: list[Tensor] | None, reduction: str, tolerance: float,
                 judged: bool, options: dict[str, Any], seed: int) -> None:  # fmt: skip
        self.model, self.tolerance, self.seed = model, tolerance, seed
        self._doubles = may_be_doubled(model)
        self._judged = judged and self._doubles  # whether float64 may excuse float32
        self._program = (model, loss_fn, params, reduction, options, seed)
        self._reads: list[PythonReads] = []
        self._first = Attributes(model)  # every look begins with what the modules keep now
        self._runs = Runs(*self._program)  # the last that were made

    def in_rows(self, pool: Records) -> Records:
        """The records, where the engine's options make one sample of several of them."""
        options, size = self._program[4], len(pool.numbers)
        rows = int(options.get("rows_per_sample", 1))
        if options.get("batch_size") is not None:  # of a batch as it was given
            rows = max(size // int(options["batch_size"]), 1)
        elif rows > 1 and (size < rows or self._runs.counted(pool.of(range(rows))) == rows):
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
        kept = [record for record, number in enumerate(pool.numbers) if number in set(samples)]
        whole = len(samples) == pool.samples and samples == sorted(samples)
        self.base = pool if whole and len(kept) == len(pool.numbers) else pool.of(samples)
        self.probes = Probe.of_sizes(samples, pool, sizes, self.seed)
        self.anew = None if pool.makes is None else (self.base, pool)  # where each batch is made by itself
        self.judged_anew, self.failed = False, ""

    def last_draws(self) -> SampleDraws | None:
        """What the last runs drew, if they drew."""
        return self._runs.draws

    def harmless(self) -> None:
        """Nothing is wrong: of what Python read of the batch, nothing need be warned."""
        for reads in self._reads:
            reads.harmless()

    # ------------------------------------------------------------------ one look

    def examine(self, words: str) -> Examined:
        """All that is looked at with the model's modules as they are now."""
        self._reads_now: list[PythonReads] = []
        try:
            examined = self._examined()
        except Unjudged as problem:
            return Examined(VerifyReport(self.base.samples, 0.0, 0.0, 0.0, self.tolerance), str(problem))
        report = examined.report
        if words:
            report.looked_at.append(words)
        if (draws := self._runs.draws) is not None and draws.seen and not examined.unjudged:
            where = "; ".join([*draws.seen][:4]) + ("; ..." if len(draws.seen) > 4 else "")
            report.looked_at.append(f"random draws at one seed, made sample by sample: {where}")
        if self._runs.outside and not examined.unjudged:
            names = " and ".join(self._runs.outside)
            report.looked_at.append(f"what {names} draws after one seed, the same in every batch")
        if report.ok and not examined.unjudged:
            self._reads += self._reads_now
        return examined

    def _examined(self) -> Examined:
        report = self.attempt(attributes=False)
        if report.problem and report.parameters and self._draws_unseen():
            report = self.attempt(attributes=False, drawn=True)
        apart = 0.0
        if report.problem and report.parameters and (apart := self._apart()) > self.tolerance:
            # not the same twice: by what its modules keep in attributes (a counter), or by random numbers out of reach
            before, changed = report, self._changed_attributes()
            report = self.attempt(attributes=True, drawn=self._runs.draws is not None)
            if report.problem and (apart := self._apart()) > self.tolerance:
                return Examined(before, _unrepeated(apart, changed, self._out_of_reach()))
        unjudged = self._out_of_reach() if report.problem and report.parameters else ""
        if report.problem and report.parameters and not unjudged and self._draws_in_another_order():
            unjudged = (
                "it puts the samples of a batch into another order and then draws random numbers by their places, so a "
                "sample cannot be given the same draws alone. Verify it in eval mode, or sort within collate_fn"
            )
        if unjudged:
            return Examined(report, unjudged)
        if report.ok:
            self._after_others(report)
        if report.ok and self._runs.attributes is None:
            self._other_labels(report)
        return Examined(report)

    def attempt(self, attributes: bool, drawn: bool = False, on: tuple[Records, Records] | None = None) -> VerifyReport:
        """In the model's own precision, and in float64 where that could not tell.

        attributes: put back before every run; drawn: with draws made sample by sample from the first; on: samples and
        pool, if others than those that are examined, in no other batches.
        """
        probes = self.probes if on is None else []
        report, truth = self._looked(*(on or (self.base, self.pool)), attributes, drawn, probes)
        if report.problem and report.parameters and self._judged:
            base, pool = (each.doubled() for each in on or (self.base, self.pool))
            repeat = lambda: self._looked(base, pool, attributes, drawn, probes)
            report.problem, report.rounding = judged_in_double(report, truth, self.model, repeat)
        return report

    def _looked(self, base: Records, pool: Records, attributes: bool, drawn: bool,
                probes: list[Probe] | None = None) -> Looked:  # fmt: skip
        probes = self.probes if probes is None else probes
        self._first.put_back()
        runs = self._runs = Runs(*self._program)
        runs.attributes = Attributes(self.model) if attributes else None
        try:
            try:
                if not drawn:
                    looked = look(runs, base, pool, probes, self.tolerance)
                    self.judged_anew = self.judged_anew or base.makes is not None
                    return looked
            except Drew:
                runs.put_back()
                base, pool = self._in_one_length(base, pool, "")
            except FAILS as error:
                if base.makes is None or isinstance(error, FastDPError):
                    raise
                base, pool = self._in_one_length(base, pool, f"{type(error).__name__}: {first_line(error)}")
                return self._looked(base, pool, attributes, drawn, probes)
            return self._looked_with_draws(runs, base.in_order(), pool, probes)
        finally:
            self._reads_now += runs.reads

    def _looked_with_draws(self, runs: Runs, base: Records, pool: Records, probes: list[Probe]) -> Looked:
        """Where each sample draws its own numbers, alone as in a batch."""
        looked: Looked | None = None
        for minor in (False, True):
            runs.draws, runs.hidden = SampleDraws(self.model, minor), False
            try:
                found = look(runs, base, pool, probes, self.tolerance)
            except FastDPError:
                raise
            except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
                raise Unjudged(
                    "it draws random numbers, and fails where they are drawn sample by sample "
                    f"({type(error).__name__}: {error})"
                ) from error
            finally:
                runs.draws.put_back()
            if looked is None or found.report.ok:
                looked = found
            if found.report.ok or not runs.draws.several:
                break
        assert looked is not None
        return looked

    def _in_one_length(self, base: Records, pool: Records, failed: str) -> tuple[Records, Records]:
        """From now on all records as they are in the batch of all of them, where batches were made anew.

        failed: why, where the program takes no other.
        """
        if pool.makes is None:
            return base, pool
        self.failed = failed
        self.pool = self.pool.made_by(None)
        self.base = self.pool.of(self.base.names)
        pool = pool.made_by(None)
        return pool.of(base.names), pool

    # ------------------------------------------------------------------ what else may be the cause

    @contextlib.contextmanager
    def _again(self) -> Iterator[tuple[Runs, Records]]:
        """The last runs made once more, in float64 if that can be."""
        last = self._runs
        base = self.base if last.draws is None else self.base.in_order()
        self._first.put_back()
        with contextlib.ExitStack() as stack:
            if self._doubles:
                stack.enter_context(in_double(self.model))
                base = base.doubled()
            runs = Runs(*self._program)
            runs.draws = last.draws
            runs.attributes = None if last.attributes is None else Attributes(self.model)
            try:
                yield runs, base
            finally:
                if runs.draws is not None:
                    runs.draws.put_back()

    def _draws_unseen(self) -> bool:
        """Whether the last runs drew by generators of their own, which torch's own does not show."""
        if self._runs.draws is not None:
            return False
        try:
            with self._again() as (runs, base):
                runs.draws = SampleDraws(self.model)
                runs.look_ahead(base)
                return bool(runs.draws.seen)
        except (FastDPError, RuntimeError, TypeError, ValueError):
            return False

    def _draws_in_another_order(self) -> bool:
        """Whether the program draws, and in eval mode draws nothing, is exact, and puts the samples into another order.

        The draws of a sample are then not in its place.
        """
        last = self._runs
        if last.draws is None:
            return False
        try:
            with evaluating(self.model):
                report = self.attempt(attributes=False, on=(self.base, self.pool))
            return report.ok and self._runs.draws is None and self._runs.reordered
        except FAILS:
            return False
        finally:
            self._runs = last

    def _apart(self) -> float:
        """How far equal runs are apart; 0 where that cannot be told."""
        try:
            with self._again() as (runs, base):
                return between_equal_runs(runs, base)
        except (Drew, RuntimeError, TypeError, ValueError):
            return 0.0

    def _changed_attributes(self) -> list[str]:
        """What the modules keep from one call to the next."""
        self._first.put_back()
        before = Attributes(self.model)
        with contextlib.suppress(Drew, RuntimeError, TypeError, ValueError):
            self._runs.alone(self.base.of([0]))
        changed = before.changed()
        before.put_back()
        return changed

    def _out_of_reach(self) -> str:
        """Draws of the last runs that could not be made sample by sample, in words."""
        runs = self._runs
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
        """What the model keeps from one batch to the next, in its buffers."""
        moved = self._runs.moved
        if not moved:
            return
        off = carried(self._runs, self.base.in_order())
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

    def _other_labels(self, report: VerifyReport) -> None:
        """Where all records have one label: once more with two."""
        other = relabelled(self.base)
        if other is None:
            return
        try:
            found, _ = self._looked(other, other, False, self._runs.draws is not None, [])
            if found.problem and (self._apart() > self.tolerance or self._out_of_reach()):
                return
        except SampleMixingError:
            raise
        except (FastDPError, Unjudged, RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return  # no such labels
        if found.worst() <= max(self.tolerance, 10 * (report.rounding or 0.0)):
            report.looked_at.append("other labels than the records' own, which are all the same")
            return
        report.problem = f"with other labels than the one that all these records have: {found.problem}"
        report.coupling = max(report.coupling, found.coupling)


def _unrepeated(apart: float, changed: list[str], out_of_reach: str) -> str:
    if not math.isfinite(apart):
        return (
            "the loss or the gradient of these records is not finite (inf or NaN), so there is nothing to compare "
            "with. Find what overflows in the model (it may do so in float64 alone, at masks of the smallest number), "
            "or verify it in the dtype that it is trained in"
        )
    state = f" (attributes that its forward changes: {', '.join(changed[:5])})" if changed else ""
    return (
        f"two equal runs of it give gradients that are {apart:.1e} apart, so there is nothing to compare with: "
        f"it draws random numbers that neither torch.manual_seed nor random.seed and "
        f"numpy.random.seed begin anew, or keeps a state from one call to the next{state}. Make it repeat itself, or "
        f"verify it with this switched off{'; ' if out_of_reach else ''}{out_of_reach}"
    )
