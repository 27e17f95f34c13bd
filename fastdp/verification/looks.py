"""A look at some samples: alone, together, and in other batches; and what is said of what was found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import FastDPError, SampleMixingError
from .noise import DRAWS, Rows, apart, last_bits, least_sizes, norms_of, only_rounding, places_of
from .records import Records
from .report import VerifyReport, largest
from .runs import Found, Miscounted, Runs
from .where import BEFORE, where_coupled


class Looked(NamedTuple):
    """A report, and the one-sample gradients [B, ...] by name."""

    report: VerifyReport
    truth: Rows


class Probe(NamedTuple):
    """Another batch in which the samples are looked at: by their numbers in the pool."""

    samples: list[int]

    @staticmethod
    def of_sizes(chosen: list[int], pool: Records, sizes: Iterable[int], seed: int) -> list[Probe]:
        """Batches of these sizes: of the samples in another order, several times where they are too few."""
        random = torch.Generator().manual_seed(seed + 1)
        found = []
        for size in sizes:
            others = [sample for sample in range(pool.samples) if sample not in set(chosen)]
            stock = (chosen + others)[:size] if size > len(chosen) else list(chosen)
            if size <= len(chosen):
                stock = [stock[i] for i in torch.randperm(len(stock), generator=random).tolist()][:size]
            while len(stock) < size:
                stock += chosen[: size - len(stock)]
            found.append(Probe([stock[i] for i in torch.randperm(size, generator=random).tolist()]))
        return found


def look(runs: Runs, base: Records, pool: Records, probes: list[Probe], tolerance: float) -> Looked:
    """Compare norms and clipped sum with one-sample backwards, in this batch and in others."""
    size = base.samples
    found: Found | None = None
    try:
        if runs.draws is None:  # first, as a refusal says more than what a sample alone may fail by
            found = runs.engine(base, rows=True)
        else:
            runs.look_ahead(base)
        truth = _alone(runs, base)
        found = runs.engine(base, rows=True) if found is None else found
    except Miscounted as count:
        return Looked(_miscounted(count, base, tolerance), {})
    seen = Seen(runs, base, truth, tolerance)
    report = seen.compared(found)
    if not report.worst() <= tolerance:
        found = seen.in_order(found)
        seen.know_rounding()
        if not (again := seen.compared(found)).worst() <= tolerance:
            report.problem = _problem(runs, base, report)
            return Looked(report, truth)
        report = again
    report.looked_at.append(f"batches of {_listed([1, size])} samples")
    _other_batches(seen, pool, probes, report)
    seen.tell(report)
    return Looked(report, truth)


class Seen:
    """Samples, their own gradients by plain torch, and what counts as an error of them."""

    def __init__(self, runs: Runs, base: Records, truth: Rows, tolerance: float) -> None:
        self.runs, self.base, self.truth, self.tolerance = runs, base, truth, tolerance
        self.norms = norms_of(truth)
        self.least = torch.zeros_like(self.norms)  # sizes of gradients that are nothing but rounding
        self.ordered = True  # whether samples stay in their places
        self._known = False

    @property
    def sizes(self) -> Tensor:
        """What errors are relative to, [B]."""
        return torch.maximum(self.norms, self.least).clamp(min=self.floor)

    @property
    def floor(self) -> float:
        return float(self.norms.max()) * 1e-6 + 1e-30

    def know_rounding(self) -> None:
        """Find the samples whose gradients are nothing but rounding."""
        if self._known:
            return
        self._known, bits = True, last_bits(self.runs.named.values())
        moved = torch.zeros_like(self.norms)
        for draw in range(DRAWS):
            self.runs.rounding = np.random.default_rng(draw)
            try:
                moved = torch.maximum(moved, apart(self.truth, _alone(self.runs, self.base)))
            finally:
                self.runs.rounding = None
            if not bool(only_rounding(self.norms, moved, bits).any()):
                return
        repeated = apart(self.truth, _alone(self.runs, self.base))
        self.least = least_sizes(self.norms, repeated, moved, bits, self.tolerance)

    def in_order(self, found: Found) -> Found:
        """What the engine found, sample by sample, where the program put them into another order."""
        places = places_of(self.truth, found.rows)
        if places == list(range(len(places))):
            return found
        rows = {name: g[places] for name, g in found.rows.items()}
        if not float(apart(self.truth, rows).max()) <= 1e-2 * float(apart(self.truth, found.rows).max()):
            return found
        self.ordered, self.runs.reordered = False, True
        return Found(found.norms[places], found.factors[places], found.sums, rows)

    def compared(self, found: Found) -> VerifyReport:
        """The errors of what the engine found."""
        sizes = self.sizes
        errors = [((each - self.norms).abs() / sizes).max() for each in (found.norms, norms_of(found.rows))]
        norm_error = float(torch.stack(errors).max())  # of the routes of training, and of the gradients themselves
        sum_error = _sum_error(found, self.truth, self.norms, self.least)
        whole = self.norms.mean().clamp(min=max(self.floor, float(self.least.max())))
        parameters = {
            name: float((found.rows[name] - rows).reshape(len(rows), -1).norm(dim=1).max() / whole)
            for name, rows in self.truth.items()
        }
        coupling = _coupling(self.runs, self.base, found.rows, sizes)
        report = VerifyReport(len(sizes), norm_error, sum_error, coupling, self.tolerance, parameters)
        report.untested = [name for name, rows in self.truth.items() if not rows.any()]
        return report

    def off(self, records: Records) -> float:
        """How far these samples are off their own gradients in a batch of them and others."""
        place = {name: number for number, name in enumerate(self.base.names)}
        numbers = torch.tensor([place.get(name, -1) for name in records.names], device=self.norms.device)
        known = numbers >= 0
        if not self.ordered:
            return self._off_as_a_set(records, numbers[known])
        want = self.norms[numbers.clamp(min=0)]
        weights = torch.where(known, (self.norms.median() / want.clamp(min=1e-30)).clamp(max=1.0), 0 * want)
        weights = weights * torch.linspace(0.5, 1.0, len(weights), dtype=weights.dtype, device=weights.device)
        found = self.runs.engine(records, weights)
        numbers = numbers[known]
        repeated = {name: rows[numbers] for name, rows in self.truth.items()}
        kept = Found(found.norms[known], found.factors[known], found.sums, {})

        def off() -> float:
            errors = (kept.norms - self.norms[numbers]).abs() / self.sizes[numbers]
            return largest([float(errors.max()), _sum_error(kept, repeated, self.norms[numbers], self.least[numbers])])

        if not (first := off()) <= self.tolerance and not self._known:
            self.know_rounding()
            return off()
        return first

    def _off_as_a_set(self, records: Records, numbers: Tensor) -> float:
        """The same where the samples may stand anywhere: each gradient is there, and the routes agree with them."""
        found = self.runs.engine(records, rows=True)
        wanted, norms = {name: rows[numbers] for name, rows in self.truth.items()}, norms_of(found.rows)
        places = places_of(wanted, found.rows)
        off = apart(wanted, {name: g[places] for name, g in found.rows.items()}) / self.sizes[numbers]
        sizes = norms.clamp(min=max(self.floor, float(self.least.max())))
        errors = [off.max(), ((found.norms - norms).abs() / sizes).max()]
        least = self.least.max().expand_as(norms)
        return largest([*map(float, errors), _sum_error(found, found.rows, norms, least)])

    def tell(self, report: VerifyReport) -> None:
        """Say what was taken for rounding, and that samples changed their places."""
        count = int((self.least > 0).sum())
        if count:
            report.not_looked_at.append(
                f"{count} of {len(self.least)} samples' gradients here: they are zero but for rounding"
            )
        if not self.ordered:
            report.looked_at.append("gradients as a set, as the program puts the samples into another order")


def _alone(runs: Runs, base: Records) -> Rows:
    """Each sample's gradient by itself."""
    alone: dict[str, list[Tensor]] = {name: [] for name in runs.named}
    for sample in range(base.samples):
        for name, gradient in runs.alone(base.of([sample])).items():
            alone[name].append(gradient)
    return {name: torch.stack(rows) for name, rows in alone.items()}


# --------------------------------------------------------------------------- other batches


def _other_batches(seen: Seen, pool: Records, probes: list[Probe], report: VerifyReport) -> None:
    """The samples in other batches, each against its own gradient."""
    base, runs = seen.base, seen.runs
    sizes = {1, base.samples}
    for probe in probes:
        records = pool.of(probe.samples)
        try:
            off = seen.off(records)
        except SampleMixingError:
            raise
        except Miscounted as count:
            report.problem = _miscounted(count, records, report.tolerance).problem
            return
        except (FastDPError, RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            first = str(error).strip().splitlines()
            report.not_looked_at.append(
                f"batches of {records.samples} samples, which the program does not take: {type(error).__name__}: "
                f"{first[0][:160] if first else ''}"
            )
            continue
        report.coupling = largest([report.coupling, off])
        sizes.add(records.samples)
        if not off <= report.tolerance:
            where = where_coupled(runs, records)
            report.problem = (
                f"a sample's gradient depends on the batch that it is in: in batches of {records.samples} samples it "
                f"is {off:.1e} off its own, though not in those of {base.samples} here. {where[:1].upper()}{where[1:]}"
                f"{'.' if where else ''} Clipping does not bound it: let nothing be computed from the size of the "
                "batch, from the places of the samples in it or from all of them together."
            )
            return
    report.looked_at[-1] = f"batches of {_listed(sizes)} samples"


def _listed(sizes: Iterable[int]) -> str:
    found = [str(size) for size in sorted(set(sizes))]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def _coupling(runs: Runs, base: Records, ours: Rows, sizes: Tensor) -> float:
    """Largest change of a sample's gradient when all others are replaced by copies of it."""
    moves, size = [], base.samples
    for i in {0, size - 1}:
        other = runs.engine(base.of([i] * size), rows=True).rows
        moved = sum(float((other[name][i] - g[i]).square().sum()) for name, g in ours.items()) ** 0.5
        moves.append(moved / float(sizes[i]))
    return largest(moves)


def _by_place(runs: Runs, base: Records) -> float:
    """Largest change of norms, relatively, where the samples stand in reversed order."""
    own = runs.engine(base).norms
    turned = runs.engine(base.of(range(base.samples - 1, -1, -1))).norms.flip(0)
    return largest([float(((turned - own).abs() / own.clamp(min=1e-30)).max())])


def between_equal_runs(runs: Runs, base: Records) -> float:
    """How far two equal runs are apart, relative to the largest gradient."""
    one, other = runs.engine(base, rows=True).rows, runs.engine(base, rows=True).rows
    moved = norms_of({name: other[name] - g for name, g in one.items()}).max()
    return largest([float(moved / norms_of(one).max().clamp(min=1e-30))])


def carried(runs: Runs, base: Records) -> float:
    """How far a sample's gradient is apart after two others: what the buffers carry from one batch to the next."""
    last = base.of([base.samples - 1])
    found = []
    for sample in (0, 1):
        runs.alone(base.of([sample]))
        found.append(runs.alone(last, fresh=False))
    runs.put_back()
    one, other = ({name: g[None] for name, g in rows.items()} for rows in found)
    moved = norms_of({name: other[name] - g for name, g in one.items()})
    return largest([float(moved / norms_of(one).clamp(min=1e-30))])


# --------------------------------------------------------------------------- in words


def _problem(runs: Runs, base: Records, report: VerifyReport) -> str:
    parameters, coupling, reduction = report.parameters, report.coupling, runs.reduction
    worst = max(parameters, key=lambda name: parameters[name])
    where = where_coupled(runs, base)
    if where or not coupling <= report.tolerance:
        orders = {} if runs.draws is None else runs.draws.orders
        remedy = (
            f"A random order of the samples is drawn, {_some(orders)}: mix no samples."
            if orders
            else "Replace what works across the batch (BatchNorm by GroupNorm, for example)."
            if where and where is not BEFORE
            else f"Let the loss be the {reduction} of the samples' own losses (for token models: of each sample's own "
            "mean; with weights of classes: the weighted losses' plain mean), and check loss_reduction."
        )
        problem = (
            f"a sample's gradient depends on other samples, {where or 'in the loss'}: clipping does not bound it. "
            f"{remedy}"
        )
    elif (moved := _by_place(runs, base)) > report.tolerance:
        report.coupling = largest([coupling, moved])
        problem = (
            "a sample's gradient depends on its place in the batch, or on the order of the samples: if one is removed, "
            "others move to other places, and clipping does not bound it. Let nothing be computed from the places of "
            "the samples."
        )
        if runs.draws is not None and runs.draws.constants:
            problem += f" What is drawn after one seed in every call is such a constant: {_some(runs.draws.constants)}."
    elif parameters[worst] <= report.tolerance:
        problem = (
            f"wrong norms (off by {report.norm_error:.1e}) or clipped sums (by {report.sum_error:.1e}) of per-sample "
            "gradients that are right: one of the routes is at fault, which `explain()` of the optimizer tells. Please "
            "report the model: this is a bug of fastdp."
        )
    else:
        problem = (
            f"wrong per-sample gradients, most at parameter '{worst}' ({parameters[worst]:.1e}). If the loss is not "
            f"the {reduction} over the samples, set loss_reduction; else please report the model: this is a bug "
            "of fastdp."
        )
    lines = runs.reads[0].lines()
    return problem + (f" Numbers over the batch are read by Python in {'; '.join(lines[:5])}." if lines else "")


def _some(places: Iterable[str]) -> str:
    return "; ".join([*places][:3])


def _miscounted(count: Miscounted, records: Records, tolerance: float) -> VerifyReport:
    problem = (
        f"the engine sees {count.found} samples in a batch of {count.wanted}: each of them would be clipped and "
        "counted by itself. "
    )
    if count.found > count.wanted and count.found % count.wanted == 0:
        rows = count.found // count.wanted
        problem += (
            f"If the loss makes {rows} rows of each sample, one record could contribute {rows} times the clipping "
            f"norm: put its rows one after the other (x.repeat_interleave({rows}, 0)) and give rows_per_sample={rows}, "
            "here and to the optimizer; or say whose the rows are by fastdp.mark_rows."
        )
    else:
        problem += "Say which rows are whose, by fastdp.mark_rows, rows_per_sample= or batch_size=."
    infinite = float("inf")
    return VerifyReport(records.samples, infinite, infinite, infinite, tolerance, {}, problem)


# --------------------------------------------------------------------------- numbers


def _sum_error(found: Found, truth: Rows, norms: Tensor, rounding: Tensor) -> float:
    """The clipped sum's error relative to its norm, or to one sample's share: where samples cancel, it is rounding.

    rounding: sizes of gradients that are nothing but rounding.
    """
    want = {name: torch.einsum("b,b...->...", found.factors, g) for name, g in truth.items()}
    least = max(float((found.factors * norms).max()), float((found.factors * rounding).norm()))
    wrong = sum(float((found.sums[n] - want[n]).square().sum()) for n in want)
    size = sum(float(t.square().sum()) for t in want.values())
    return float((wrong / max(size, least**2, 1e-60)) ** 0.5)
